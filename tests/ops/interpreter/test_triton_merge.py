"""The merge of partial results: empty parts, units of the sums, sinks counted once, the same bits in any company."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from paged import fill, oracle
from tolerances import TOLERANCES, assert_close

from kvlab.ops.attention import triton_
from kvlab.ops.attention.rules import Rules
from kvlab.ops.attention.triton_merge import merge_launch
from kvlab.ops.batch import make_batch
from kvlab.ops.mla_attention.merge import merge as merge_torch

NAN = float("nan")


def parts_of(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(parts [1, S, 1, 8], log2 of their sums [1, S, 1], attention over all of them [8]); an empty part holds NaN."""
    generator = torch.Generator().manual_seed(seed)
    scores = [torch.randn(n, generator=generator, dtype=torch.float64) * 4 for n in lengths]
    values = [torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in lengths]
    nothing = torch.full((8,), NAN)
    parts = torch.stack([s.softmax(0) @ v if len(s) else nothing for s, v in zip(scores, values, strict=True)])
    sums = torch.tensor([s.logsumexp(0) if len(s) else -math.inf for s in scores]) / math.log(2)
    whole = torch.cat(scores).softmax(0) @ torch.cat(values) if sum(lengths) else torch.zeros(8, dtype=torch.float64)
    return parts.float()[None, :, None], sums.float()[None, :, None], whole


def merged(parts: torch.Tensor, lse2: torch.Tensor, sinks: torch.Tensor | None = None) -> tuple[torch.Tensor, float]:
    out, total = torch.full((1, parts.shape[2], parts.shape[3]), NAN), torch.full((1, parts.shape[2]), NAN)
    merge_launch(parts, lse2, out, sinks, total).run()
    return out[0, 0], float(total[0, 0])


@pytest.mark.parametrize("empty", [e for n in range(5) for e in itertools.combinations(range(4), n)], ids=str)
def test_any_subset_of_parts_may_be_empty(empty: tuple[int, ...]) -> None:
    parts, lse2, whole = parts_of([0 if i in empty else 3 + i for i in range(4)])
    out, total = merged(parts, lse2)
    assert_close("merge", whole, out, "fp32")
    assert total == pytest.approx(float(torch.logsumexp(lse2[0, :, 0] * math.log(2), 0)) / math.log(2), abs=1e-5)
    if len(empty) == 4:
        assert (out == 0).all() and total == -math.inf


def test_more_parts_than_a_tile() -> None:
    parts, lse2, whole = parts_of([n % 3 for n in range(37)])
    assert_close("merge", whole, merged(parts, lse2)[0], "fp32")


def test_natural_logarithms_are_not_taken_for_base_2() -> None:
    """The fault of engines that mixed the two: a part counts too much. The right unit agrees with one pass."""
    parts, lse2, whole = parts_of([9, 2])
    wrong, _ = merged(parts, lse2 * math.log(2))
    assert (wrong - whole).abs().max() > 100 * TOLERANCES["fp32"][0]
    natural, _ = merge_torch(parts[0], lse2[0] * math.log(2))
    assert_close("units", natural[0], merged(parts, lse2)[0], "fp32")


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must fit parts \(2, 3, 4, 8\)"):
        merge_launch(torch.zeros(2, 3, 4, 8), torch.zeros(2, 4, 3), torch.zeros(2, 4, 8))


@pytest.mark.parametrize("splits", range(1, 9))
@pytest.mark.parametrize("window", [0, 5])
def test_sinks_count_once_however_many_splits(splits: int, window: int) -> None:
    """With a window the first splits see nothing, which is where a sink went missing or counted twice."""
    n = 16 * splits
    paged = fill("fp32", (1, 16, 16), ([1, 1], [n, 3]))
    query, sinks = torch.randn(2, 2, 16), torch.tensor([0.5, 4.0])
    out = torch.full_like(query, NAN)
    rules = Rules(0.5, window=window, sinks=sinks)
    for launch in triton_.decode_launches(query, paged.views, paged.batch, rules, out, split=16):
        launch.run()
    assert_close("sinks", oracle(query, paged, 0.5, window, sinks=sinks), out, "fp32")
    without = oracle(query, paged, 0.5, window)
    assert (out - without).abs().max() > 0.01, "the sinks must change the result"


def test_a_result_has_the_same_bits_in_any_company() -> None:
    """Splits are cut at fixed positions, so neighbours and the longest sequence change nothing."""
    paged = fill("bf16", (2, 64, 16), ([1, 1, 1], [35, 70, 9]))
    query = torch.randn(3, 4, 64)
    together = torch.empty_like(query)
    for launch in triton_.decode_launches(query, paged.views, paged.batch, Rules(0.3), together, split=32):
        launch.run()
    batch = paged.batch
    alone = torch.empty_like(query[:1])
    one = make_batch([1], [35], batch.block_table[:1], 16)
    for launch in triton_.decode_launches(query[:1], paged.views, one, Rules(0.3), alone, split=32):
        launch.run()
    assert torch.equal(together[:1], alone)


@pytest.mark.parametrize("split", [512, 16])
def test_an_empty_row_is_zero_and_its_sum_is_minus_infinity(split: int) -> None:
    paged = fill("fp32", (1, 16, 16), ([1, 1], [0, 20]))
    query = torch.full((2, 2, 16), NAN)
    query[1] = 1.0
    out = torch.full_like(query, NAN)
    launches = triton_.decode_launches(query, paged.views, paged.batch, Rules(1.0, sinks=torch.ones(2)), out, split)
    for launch in launches:
        launch.run()
    assert (out[0] == 0).all() and torch.isfinite(out[1]).all()
    assert (launches[0].args["p_lse"][0] == -math.inf).all()
