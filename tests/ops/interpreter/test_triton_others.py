"""The kernels besides attention over keys and values: latents, recurrent states, chosen pages, copies."""

from __future__ import annotations

import latent_pages
import pytest
import torch
from paged import drawn, fill, oracle
from stateful import poisoned, run_schedule
from tolerances import assert_close

from kvlab.ops.batch import make_batch
from kvlab.ops.copy_pages import copy_pages
from kvlab.ops.gated_delta import DeltaRows, gated_delta
from kvlab.ops.mla_attention import mla_attention
from kvlab.ops.mla_attention import triton_ as mla
from kvlab.ops.page_scores import page_scores
from kvlab.ops.page_scores.reference import page_bounds
from kvlab.ops.page_scores.reference import page_scores as plain_scores
from kvlab.ops.selected_pages import reference as selected_reference
from kvlab.ops.selected_pages import selected_pages
from kvlab.ops.selected_pages import triton_ as selected
from kvlab.ops.ssd import SSDRows, ssd


@pytest.mark.parametrize(
    ("widths", "heads", "fmt"),
    [
        ((512, 64, 16), 3, "fp32"),
        ((48, 20, 7), 33, "bf16"),
        ((64, 16, 1), 5, "fp16"),
        ((64, 32, 16), 2, "fp8_e5m2"),
        ((48, 20, 7), 3, "fp8_e4m3"),
    ],
    ids=str,
)
@pytest.mark.parametrize("split", [512, 16])
def test_absorbed_decode(widths, heads: int, fmt: str, split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lens = ([1, 1, 1], [37, 1, 0]) if split == 16 else ([1, 1, 3], [33, 16, 5])
    paged = latent_pages.fill(widths, lens, 1, fmt)
    query = torch.randn(paged.batch.num_tokens, heads, 24 + widths[1])
    up = torch.randn(heads, 24 + 12, widths[0]) * widths[0] ** -0.5
    launches = mla.decode_launches
    monkeypatch.setattr(mla, "decode_launches", lambda *args: launches(*args, split=split))
    out = mla_attention(query, up, paged.views, paged.batch, scale=0.2)
    filled = [s for s in range(3) if lens[1][s]]
    expected = latent_pages.oracle(query, up, paged, 0.2) if len(filled) == 3 else None
    if expected is None:  # the oracle wants tokens: the empty sequence is checked on its own
        assert (out[2] == 0).all()
        whole = latent_pages.LatentPages(paged.views, make_batch([1, 1], lens[1][:2], paged.batch.block_table[:2], widths[2]),
                                         paged.rows[:2])  # fmt: skip
        expected, out = latent_pages.oracle(query[:2], up, whole, 0.2), out[:2]
    assert_close("mla", expected, out[: len(expected)], "fp32")


LATENTS = {
    # widths of latents and their rotary parts, page size; 576/512 is DeepSeek's
    "widths": [(512, 64, 16), (512, 64, 1), (48, 20, 7), (64, 32, 16)],
    "fmt": ["fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"],
    "heads": [1, 5, 33],
    "split": [512, 16],
    "lens": [([1], [1]), ([1, 1, 1], [37, 1, 16]), ([1, 1, 3], [33, 16, 5])],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", drawn(LATENTS, ("widths", "fmt", "heads", "split")), ids=str)
def test_the_product_of_absorbed_decodes(case: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    widths, heads, split = case["widths"], case["heads"], case["split"]
    paged = latent_pages.fill(widths, case["lens"], 1, case["fmt"])
    query = torch.randn(paged.batch.num_tokens, heads, 24 + widths[1])
    up = torch.randn(heads, 24 + 12, widths[0]) * widths[0] ** -0.5
    launches = mla.decode_launches
    monkeypatch.setattr(mla, "decode_launches", lambda *args: launches(*args, split=split))
    out = mla_attention(query, up, paged.views, paged.batch, scale=0.2)
    assert_close("mla", latent_pages.oracle(query, up, paged, 0.2), out, "fp32")


@pytest.mark.parametrize(("heads", "groups", "width", "size"), [(4, 2, 16, 8), (3, 1, 20, 12), (2, 2, 40, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_mamba_2_decode(heads: int, groups: int, width: int, size: int, dtype, monkeypatch) -> None:
    """Every schedule of chunks, decodes and padding gives what the recurrence gives; pages are full of NaN."""
    torch.manual_seed(0)
    sizes = (16, 12, 11)
    rows = [(torch.randn(n, heads, width), torch.rand(n, heads) + 0.1, torch.randn(n, groups, size),
             torch.randn(n, groups, size)) for n in sizes]  # fmt: skip
    decay = -torch.rand(heads) - 0.1

    def run(backend: str, kind: torch.dtype) -> list[torch.Tensor]:
        monkeypatch.setenv("KVLAB_OPS", backend)
        states = poisoned(heads * width * size, kind)
        return run_schedule(lambda r, batch: ssd(SSDRows(*r), decay, states, batch), rows)

    for mine, expected in zip(run("triton", dtype), run("reference", torch.float32), strict=True):
        assert_close("ssd", expected, mine, "fp32" if dtype == torch.float32 else "bf16 state cut")


@pytest.mark.parametrize(("heads", "key_heads", "key_dim", "value_dim"), [(4, 2, 16, 8), (3, 3, 12, 40)])
@pytest.mark.parametrize("channels", [False, True], ids=["scalar", "channels"])
def test_gated_delta_decode(
    heads: int, key_heads: int, key_dim: int, value_dim: int, channels: bool, monkeypatch
) -> None:
    torch.manual_seed(0)

    def normed(n: int) -> torch.Tensor:
        return torch.nn.functional.normalize(torch.randn(n, key_heads, key_dim), dim=-1)

    rows = [(normed(n), normed(n), torch.randn(n, heads, value_dim),
             -torch.rand(n, heads, key_dim if channels else 1), torch.rand(n, heads)) for n in (16, 12, 11)]  # fmt: skip

    def run(backend: str) -> list[torch.Tensor]:
        monkeypatch.setenv("KVLAB_OPS", backend)
        states = poisoned(heads * key_dim * value_dim, torch.float32)
        return run_schedule(lambda r, batch: gated_delta(DeltaRows(*r), states, batch, scale=0.3), rows)

    for mine, expected in zip(run("triton"), run("reference"), strict=True):
        assert_close("delta", expected, mine, "fp32")


def test_padded_sequences_leave_the_null_page_alone() -> None:
    states = torch.full((3, 64), 7.0)
    batch = make_batch([1, 1], [4, 0], torch.tensor([[2], [0]], dtype=torch.int32), 1000)
    rows = SSDRows(torch.ones(2, 1, 8), torch.ones(2, 1), torch.ones(2, 1, 8), torch.ones(2, 1, 8))
    out = ssd(rows, -torch.ones(1), states, batch)
    assert (states[:2] == 7).all() and (states[2] != 7).all() and (out[1] == 0).all()


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("block_size", [16, 5])
def test_page_scores_bound_every_product(group: int, block_size: int) -> None:
    lens = [33, 4, 0]
    paged = fill("fp32", (2, 24, block_size), ([1, 1, 1], lens))
    table = paged.batch.block_table
    counts = torch.zeros(len(paged.views.k), dtype=torch.int64)
    for row, n in zip(table.tolist(), lens, strict=True):
        for i, page in enumerate(row):
            if page:
                counts[page] = min(block_size, n - i * block_size)
    bounds = page_bounds(paged.views, counts)
    query = torch.randn(3, 2 * group, 24)
    scores = page_scores(query, bounds, paged.batch, block_size)
    expected = plain_scores(query, bounds, paged.batch, block_size)
    assert torch.equal(torch.isinf(scores), torch.isinf(expected))
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    for b, n in enumerate(lens):
        for t in range(n):
            products = torch.einsum("hgd,hd->hg", query[b].view(2, group, 24).double(), paged.keys[b][t])
            assert (products.amax(1) <= scores[b, :, t // block_size] + 1e-4).all()


@pytest.mark.parametrize(
    ("fmt", "dim", "dtype"),
    [("fp32", 32, torch.float32), ("fp8_e4m3", 80, torch.float32), ("bf16", 128, torch.bfloat16),
     ("int8", 32, torch.float32), ("int4_g32", 80, torch.float32), ("nvfp4", 128, torch.bfloat16)],
    ids=str,
)  # fmt: skip
def test_chosen_pages_are_read_and_no_others(fmt: str, dim: int, dtype: torch.dtype, monkeypatch) -> None:
    """int8 and 4-bit formats have scales per token, those are torch's: nothing is left to the loop of the reference."""
    monkeypatch.setattr(selected, "PER_SPLIT", 2)
    paged = fill(fmt, (2, dim, 4), ([1, 1, 1], [30, 9, 3]))
    query, kind = torch.randn(3, 6, dim).to(dtype), "fp32" if dtype == torch.float32 else "bf16 cut"
    chosen = torch.tensor([[[0, 7, 3, -1, -1], [5, 4, -1, -1, -1]], [[2, 0, -1, -1, -1], [-1] * 5], [[0, -1, -1, -1, -1]] * 2],
                          dtype=torch.int32)  # fmt: skip
    expected = selected_reference.selected_pages(query, paged.views, paged.batch, chosen, 0.3)
    monkeypatch.setattr(selected_reference, "selected_pages", None)
    out = selected_pages(query, paged.views, paged.batch, chosen, scale=0.3)
    assert_close("chosen", expected, out, kind)
    assert (out[1, 3:] == 0).all(), "a head that chose nothing"
    every = torch.arange(8, dtype=torch.int32).expand(3, 2, 8).contiguous()
    whole = selected_pages(query, paged.views, paged.batch, every, scale=0.3)
    assert_close("all pages", oracle(query, paged, 0.3), whole, kind)


def test_chosen_pages_of_more_heads_than_a_block_holds() -> None:
    """Falcon's 71 query heads of one KV head are two blocks of 64, the second nearly empty."""
    paged = fill("fp32", (1, 16, 4), ([1, 1], [9, 2]))
    query, every = torch.randn(2, 71, 16), torch.arange(3, dtype=torch.int32).expand(2, 1, 3).contiguous()
    assert_close(
        "blocks", oracle(query, paged, 0.3), selected_pages(query, paged.views, paged.batch, every, scale=0.3), "fp32"
    )


def test_chosen_pages_must_fit_the_heads() -> None:
    paged = fill("fp32", (2, 32, 4), ([1], [9]))
    with pytest.raises(ValueError, match=r"chosen \(1, 3, 2\): must be \[1, 2, n\]"):
        selected_pages(torch.randn(1, 2, 32), paged.views, paged.batch, torch.zeros(1, 3, 2), scale=1.0)


@pytest.mark.parametrize("page_bytes", [16, 4112, 50])
def test_pages_are_copied_bit_for_bit(page_bytes: int) -> None:
    """50 bytes are no multiple of 16: torch copies those."""
    source = torch.randint(0, 256, (6, page_bytes), dtype=torch.uint8)
    target = torch.zeros(4, page_bytes, dtype=torch.uint8)
    copy_pages(source, target, torch.tensor([[5, 0], [1, 3]]))
    assert torch.equal(target[0], source[5]) and torch.equal(target[3], source[1])
    assert not target[1:3].any()
    copy_pages(source, source, torch.tensor([[0, 4]]))
    assert torch.equal(source[4], source[0])
    with pytest.raises(ValueError, match="target pages of 16 bytes"):
        copy_pages(torch.zeros(1, 32, dtype=torch.uint8), torch.zeros(1, 16, dtype=torch.uint8), torch.zeros(0, 2))
