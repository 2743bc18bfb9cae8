"""Paged attention against a loop over queries, with NaN in every slot that holds no live token."""

from __future__ import annotations

import random

import pytest
import torch
from paged import fill, oracle, pairwise
from tolerances import assert_close

from kvlab.ops import numba_support
from kvlab.ops.attention import paged_attention
from kvlab.quant import row_formats

BACKENDS = ["reference", "torch", "cpu"]
MIXES = {
    "one token alone": ([1], [1]),
    "decodes": ([1, 1, 1, 1], [1, 15, 16, 17]),
    "whole prompts": ([15, 16, 17, 1], [15, 16, 17, 1]),
    "decodes, then chunks": ([1, 1, 5, 20], [40, 2, 33, 20]),
    "a chunk that ends a page": ([16, 3], [32, 35]),
}
OPTIONS = {
    "backend": BACKENDS,
    "fmt": [name for name in row_formats() if name != "fp64"],
    "heads": [(4, 4), (8, 2), (9, 3), (5, 1)],
    "head_dim": [64, 80, 96, 128, 20],
    "block_size": [16, 1, 7],
    "window": [0, 1, 6, 100],
    "softcap": [0.0, 1.5, 50.0],
    "chunk": [0, 8, 3],
    "sinks": [False, True],
    "alibi": [False, True],
    "value_dim": [0, 12],
    "mix": list(MIXES),
}


def use(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    if backend == "cpu" and not numba_support.available():
        pytest.skip("Numba is not installed")
    monkeypatch.setenv("KVLAB_OPS", backend)


def case_id(case: dict) -> str:
    return "-".join(str(v).replace(" ", "_") for v in case.values())


def check(case: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, case["backend"])
    num_heads, kv_heads = case["heads"]
    shape = (kv_heads, case["head_dim"], case["block_size"])
    paged = fill(case["fmt"], shape, MIXES[case["mix"]], padded_rows=3, value_dim=case["value_dim"])
    query = torch.randn(paged.batch.num_tokens, num_heads, case["head_dim"])
    options = {"scale": 2 * case["head_dim"] ** -0.5, **{k: case[k] for k in ("window", "softcap", "chunk")}}
    options |= {k: torch.randn(num_heads) if case[k] else None for k in ("sinks", "alibi")}
    out = paged_attention(query, paged.views, paged.batch, **options)
    assert_close(case_id(case), oracle(query, paged, **options), out, "fp32")
    assert (out[-3:] == 0).all(), "padded rows must give zeros"


@pytest.mark.parametrize("case", pairwise(OPTIONS), ids=case_id)
def test_every_two_options_together(case: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_of_the_full_product(backend: str, mix: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole product has millions of cases, hours of them; a hundred draws for each seed, other ones under fuzz."""
    generator = random.Random(f"{backend} {mix} {seed}")
    for _ in range(100):
        drawn = {name: generator.choice(values) for name, values in OPTIONS.items()}
        check(drawn | {"backend": backend, "mix": mix}, monkeypatch)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [0, 130])
def test_sequences_longer_than_a_chunk_of_the_kernel(backend: str, window: int, monkeypatch) -> None:
    use(monkeypatch, backend)
    lens = [127, 128, 129, 256, 257, 300]
    paged = fill("fp32", (1, 16, 16), ([1] * 5 + [290], lens))
    query = torch.randn(paged.batch.num_tokens, 2, 16)
    out = paged_attention(query, paged.views, paged.batch, scale=0.7, window=window)
    assert_close("long", oracle(query, paged, 0.7, window), out, "fp32")


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_fp64_stays_fp64(backend: str, monkeypatch) -> None:
    use(monkeypatch, backend)
    paged = fill("fp64", (2, 24, 5), ([1, 7], [13, 9]))
    query = torch.randn(8, 6, 24, dtype=torch.float64)
    out = paged_attention(query, paged.views, paged.batch, scale=0.3, window=4, softcap=3.0)
    assert out.dtype == torch.float64
    assert_close("fp64", oracle(query, paged, 0.3, 4, 3.0), out, "fp64")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_queries(backend: str, dtype: torch.dtype, monkeypatch) -> None:
    use(monkeypatch, backend)
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    paged = fill(name, (2, 64, 16), ([1, 1, 9], [20, 33, 30]), padded_rows=2)
    query = torch.randn(13, 4, 64).to(dtype)
    out = paged_attention(query, paged.views, paged.batch, scale=0.2)
    assert out.dtype == dtype
    assert_close("half", oracle(query, paged, 0.2), out, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_before_the_window_may_be_gone(backend: str, monkeypatch) -> None:
    use(monkeypatch, backend)
    paged = fill("fp32", (2, 16, 4), ([1, 5], [30, 29]))
    query = torch.randn(6, 4, 16)
    expected = oracle(query, paged, 0.5, window=6)
    # the first query of the chunk stands at 24 and sees 19..24: pages 0-3 hold nothing it needs
    paged.batch.block_table[:, :4] = 0
    out = paged_attention(query, paged.views, paged.batch, scale=0.5, window=6)
    assert_close("null pages", expected, out, "fp32")


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_before_the_chunk_may_be_gone_and_a_sink_takes_its_share(backend: str, monkeypatch) -> None:
    use(monkeypatch, backend)
    paged = fill("fp32", (2, 16, 4), ([1, 3, 2], [31, 27, 17]))
    query, sinks = torch.randn(6, 4, 16), torch.tensor([-3.0, 0.0, 2.0, 30.0])
    expected = oracle(query, paged, 0.5, chunk=8, sinks=sinks)
    # chunks begin at 24 (both first sequences) and at 8 and 16: what lies before belongs to nobody
    paged.batch.block_table[:2, :6] = 0
    paged.batch.block_table[2, :2] = 0
    out = paged_attention(query, paged.views, paged.batch, scale=0.5, chunk=8, sinks=sinks)
    assert_close("chunks", expected, out, "fp32")
    assert out[:, 3].abs().max() < 1e-9, "a sink far above every score leaves the values nothing"


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_every_rule_at_once_in_fp64(backend: str, monkeypatch) -> None:
    use(monkeypatch, backend)
    paged = fill("fp64", (2, 24, 5), ([1, 7], [13, 9]), padded_rows=1, value_dim=9)
    query, vectors = torch.randn(9, 6, 24, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64)
    options = {"window": 6, "softcap": 3.0, "chunk": 8, "sinks": vectors[0], "alibi": vectors[1]}
    out = paged_attention(query, paged.views, paged.batch, scale=0.3, **options)
    assert out.shape == (9, 6, 9) and (out[8] == 0).all()
    assert_close("fp64", oracle(query, paged, 0.3, **options), out, "fp64")
    for name in options:
        fewer = paged_attention(query, paged.views, paged.batch, scale=0.3, **{**options, name: type(options[name])(0)
                                if name not in ("sinks", "alibi") else None})  # fmt: skip
        assert not torch.allclose(fewer, out, rtol=1e-3), f"{name} changes nothing"


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_without_tokens_are_zeros_and_touch_nothing(backend: str, monkeypatch) -> None:
    use(monkeypatch, backend)
    paged = fill("fp32", (1, 16, 4), ([1, 1, 1], [9, 1, 3]))
    paged.batch.seq_lens[1] = 0  # what a padded row of a captured decode batch looks like
    paged.batch.block_table[1] = 0
    query = torch.randn(3, 2, 16)
    out = paged_attention(query, paged.views, paged.batch, scale=0.5)
    assert (out[1] == 0).all() and torch.isfinite(out).all()
    paged.keys[1], paged.values[1] = paged.keys[0], paged.values[0]
    assert_close("live rows", oracle(query, paged, 0.5)[[0, 2]], out[[0, 2]], "fp32")


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_written_outside_the_result(backend: str, monkeypatch) -> None:
    use(monkeypatch, backend)
    paged = fill("int8", (3, 20, 5), ([1, 4], [11, 12]))
    before = paged.views.buffer.clone()
    guarded = torch.full((9, 6, 20), 1234.5)
    paged_attention(torch.randn(5, 6, 20), paged.views, paged.batch, scale=0.2, out=guarded[2:7])
    assert (guarded[:2] == 1234.5).all() and (guarded[7:] == 1234.5).all()
    assert (guarded[2:7] != 1234.5).all()
    assert torch.equal(paged.views.buffer, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_among_live_keys_is_not_hidden(backend: str, monkeypatch) -> None:
    use(monkeypatch, backend)
    paged = fill("fp32", (1, 16, 4), ([1, 1], [9, 9]))
    paged.views.k[int(paged.batch.block_table[0, 1]), 0, 2, 3] = torch.nan
    out = paged_attention(torch.randn(2, 2, 16), paged.views, paged.batch, scale=0.5)
    assert torch.isnan(out[0]).all() and torch.isfinite(out[1]).all()


def test_softcap_changes_the_result(monkeypatch) -> None:
    use(monkeypatch, "reference")
    paged = fill("fp32", (1, 16, 4), ([1], [30]))
    query = torch.randn(1, 2, 16)
    results = [paged_attention(query, paged.views, paged.batch, scale=1.0, softcap=cap) for cap in (0.0, 5.0, 50.0)]
    assert not any(torch.allclose(a, b, rtol=1e-3) for a, b in zip(results, results[1:] + results[:1], strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"window": -1},
        {"softcap": -2.0},
        {"chunk": -3},
        {"heads": 4},
        {"sinks": torch.ones(3)},
        {"alibi": torch.ones(1)},
    ],
)
def test_wrong_arguments_are_refused(changes: dict) -> None:
    paged = fill("fp32", (3, 16, 4), ([1], [5]))
    query = torch.randn(1, changes.pop("heads", 6), 16)
    with pytest.raises(
        ValueError, match=r"must not be negative|each of 6 heads|query heads 4: must be a multiple of the 3"
    ):
        paged_attention(query, paged.views, paged.batch, scale=1.0, **changes)
