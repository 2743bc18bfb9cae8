"""Attention over latents in pages: expanded, absorbed and merged, against heads written out in a loop."""

from __future__ import annotations

import pytest
import torch
from latent_pages import fill, oracle, poisoned

from kvlab.ops.mla_attention import absorbed, expanded, mla_attention, selected_attention
from kvlab.ops.mla_attention.gather import span
from kvlab.ops.mla_attention.merge import merge
from kvlab.ops.mla_attention.rule import crossover, expands, operations
from kvlab.ops.write_rows import write_rows
from kvlab.quant import round_trip, row_formats
from kvlab.specs.formats import get_format
from kvlab.specs.parts import MLALatent

# C, R, tokens per page; heads, unrotated values, values
WIDTHS, HEADS = (19, 6, 5), (3, 7, 11)
MIXES = {
    "one token alone": ([1], [1]),
    "decodes": ([1, 1, 1, 1], [1, 4, 5, 23]),
    "whole prompts": ([4, 5, 6, 1], [4, 5, 6, 1]),
    "decodes, then chunks": ([1, 1, 5, 13], [17, 2, 23, 13]),
}


def inputs(tokens: int, widths=WIDTHS, heads=HEADS, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(tokens, heads[0], heads[1] + widths[1], generator=generator, dtype=torch.float64)
    up = torch.randn(heads[0], heads[1] + heads[2], widths[0], generator=generator, dtype=torch.float64)
    return query.to(dtype), up.to(dtype)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("mix", MIXES)
def test_is_attention_over_expanded_heads(mix, backend, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", backend)
    paged = fill(WIDTHS, MIXES[mix], padded_rows=2)
    query, up = inputs(paged.batch.num_tokens)
    got = mla_attention(query, up, paged.views, paged.batch, scale=0.3)
    torch.testing.assert_close(got, oracle(query, up, paged, 0.3), rtol=0, atol=1e-12)
    assert (got[-2:] == 0).all()


@pytest.mark.parametrize(("count", "end"), [(1, 1), (3, 3), (13, 13), (9, 31), (1, 30)])
def test_absorbed_and_expanded_are_one_product(count, end, monkeypatch):
    """A chunk gives the same whichever way it takes, however the context is cut."""
    paged = fill(WIDTHS, ([count], [end]))
    query, up = inputs(count)
    where = (paged.batch.block_table[0], end)
    monkeypatch.setattr(expanded, "KEY_BLOCK", 7)
    monkeypatch.setattr(absorbed, "QUERY_BLOCK", 4)
    a, b = (way.chunk(query, up, paged.views, where, 0.3) for way in (absorbed, expanded))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    torch.testing.assert_close(a, oracle(query, up, paged, 0.3), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("fmt", "tolerance"), [("fp32", 2e-5), ("bf16", 2e-2), ("fp16", 3e-3)])
def test_other_dtypes_are_rounded_only(fmt, tolerance):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[fmt]
    paged = fill(WIDTHS, MIXES["decodes, then chunks"], fmt=fmt)
    query, up = inputs(paged.batch.num_tokens, dtype=dtype)
    got = mla_attention(query, up, paged.views, paged.batch, scale=0.1)
    assert got.dtype == dtype
    torch.testing.assert_close(
        got.double(), oracle(query.double(), up.double(), paged, 0.1), rtol=0, atol=4 * tolerance
    )


def test_the_real_widths_192_and_128_do_not_spill():
    """Keys of 192 values and values of 128: neither pages nor results are written beyond their rows."""
    views = poisoned(MLALatent(512, 64, get_format("fp32")), 2, 3)
    before = views.buffer.clone()
    write_rows({"latent": torch.ones(1, 512), "rope": torch.ones(1, 64)}, views, torch.tensor([3]))
    assert int((views.buffer != before).any(0).sum()) == 4 * (512 + 64)
    paged = fill((512, 64, 4), ([1, 3], [6, 3]), fmt="fp32")
    query, up = inputs(4, (512, 64, 4), (2, 128, 128), torch.float32)
    got = mla_attention(query, up / 16, paged.views, paged.batch, scale=192**-0.5)
    assert got.shape == (4, 2, 128)
    torch.testing.assert_close(got.double(), oracle(query, up / 16, paged, 192**-0.5), rtol=0, atol=1e-4)


def test_pages_hold_576_numbers_a_token():
    """Not 128 heads of 192 and 128: what a token adds to DeepSeek-V3's cache in one layer."""
    part = MLALatent(512, 64, get_format("bf16"))
    assert part.entry_bytes == 2 * 576
    assert part.per_rank(8) == part, "every rank holds the whole latent"


@pytest.mark.parametrize("empty", [(), (0,), (1,), (0, 2), (0, 1, 2)])
def test_merging_parts_of_which_some_are_empty(empty):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64) * 3
    values = torch.randn(3, 5, 6, generator=generator, dtype=torch.float64)
    results, totals = scores.softmax(-1) @ values, scores.logsumexp(-1)
    for i in empty:
        results[i], totals[i] = float("nan"), float("-inf")
    got, total = merge(results, totals)
    full = [i for i in range(3) if i not in empty]
    if not full:
        assert (got == 0).all() and (total == float("-inf")).all()
        return
    together = torch.cat([scores[i] for i in full], dim=-1)
    expected = together.softmax(-1) @ torch.cat([values[i] for i in full])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(total, together.logsumexp(-1), rtol=0, atol=1e-12)


def test_sums_of_powers_of_two_would_be_seen():
    """A part whose sum is given to base 2 counts too much; natural logarithms are what the merge takes."""
    scores = torch.tensor([[[3.0, 1.0]], [[2.0, 2.5]]], dtype=torch.float64)
    values = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]], dtype=torch.float64)
    results, totals = scores.softmax(-1) @ values, scores.logsumexp(-1)
    one_pass = torch.cat(list(scores), -1).softmax(-1) @ torch.cat(list(values))
    assert float((merge(results, totals)[0] - one_pass).abs().max()) < 1e-12
    base2 = totals.clone()
    base2[0] /= torch.log(torch.tensor(2.0))
    assert float((merge(results, base2)[0] - one_pass).abs().max()) > 0.1


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_selected_attention_reads_what_was_chosen(backend, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", backend)
    paged = fill(WIDTHS, ([1, 4, 3], [22, 4, 9]), padded_rows=1)
    chosen = torch.full((9, 5), -1)
    chosen[0], chosen[1, :1], chosen[2, :2] = torch.tensor([21, 3, 0, 17, 9]), 0, torch.tensor([1, 0])
    chosen[3, 2], chosen[4, :3], chosen[5:8, :2] = 2, torch.tensor([0, 1, 3]), torch.tensor([4, 6])
    query, up = inputs(9)
    # what is not chosen may hold anything
    reachable = {(0, s) for s in (21, 3, 0, 17, 9)} | {(1, s) for s in range(4)} | {(2, 4), (2, 6)}
    for b, n in enumerate((22, 4, 9)):
        for s in range(n):
            if (b, s) not in reachable:
                paged.views["latent"][int(paged.batch.block_table[b, s // 5]), 0, s % 5] = float("nan")
    got = selected_attention(query, up, paged.views, paged.batch, chosen, scale=0.3)
    torch.testing.assert_close(got[:8], oracle(query, up, paged, 0.3, chosen)[:8], rtol=0, atol=1e-12)
    assert (got[8] == 0).all()


def brute_force_operations(count: int, context: int, latent: int, plain: int, value: int) -> tuple[int, int]:
    absorbed_ops = expanded_ops = 0
    for _ in range(count):
        absorbed_ops += plain * latent + latent * value
        for _ in range(context):
            absorbed_ops += latent + latent
            expanded_ops += plain + value
    for _ in range(context):
        expanded_ops += (plain + value) * latent
    return absorbed_ops, expanded_ops


def test_the_rule_counts_operations():
    for shape in ((1, 9, 6, 2, 3), (4, 9, 6, 2, 3), (9, 9, 6, 2, 3), (2, 3, 5, 4, 4)):
        count, context, latent, plain, value = shape
        assert operations(count, context, latent, plain + value) == brute_force_operations(*shape)


def test_long_chunks_expand_and_decodes_do_not():
    assert not expands(1, 4096, 512, 256) and expands(512, 4096, 512, 256)
    at = crossover(4096, 512, 256)
    assert at is not None and expands(at, 4096, 512, 256) and not expands(at - 1, 4096, 512, 256)
    # a prompt without a past: expanding is never more
    assert all(expands(n, n, 512, 256) for n in (1, 2, 100))
    # it gets worse with context only up to a point
    assert crossover(10**6, 512, 256) == 171


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("fmt", row_formats())
def test_latents_in_every_format_are_read_as_their_codec_gives_them_back(fmt, backend, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", backend)
    views = poisoned(MLALatent(13, 6, get_format(fmt)), 4, 4)
    rows = {"latent": torch.randn(3, 13), "rope": torch.randn(3, 6)}
    write_rows(rows, views, torch.tensor([13, -1, 6]))
    table = torch.tensor([3, 1])
    latents, turned = span(views, table, (1, 7), torch.float32)
    for name, got in (("latent", latents), ("rope", turned)):
        want = round_trip(fmt, rows[name]).float()
        assert torch.equal(got[0], want[0]) and torch.equal(got[5], want[2])
        assert got[1:5].isnan().all(), "slots that nobody wrote are NaN"


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_rows_go_to_their_slots(backend, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", backend)
    views = poisoned(MLALatent(5, 3, get_format("fp32")), 4, 4)
    rows = torch.arange(15.0).view(3, 5)
    write_rows({"latent": rows}, views, torch.tensor([13, -1, 6]))
    assert torch.equal(views["latent"][3, 0, 1], rows[0]) and torch.equal(views["latent"][1, 0, 2], rows[2])
    assert int((~views["latent"].isnan()).sum()) == 10 and views["rope"].isnan().all()
