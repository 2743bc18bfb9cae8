"""Tests of the puzzles; KVLAB_PUZZLES names another module with the same kernels."""

from __future__ import annotations

import importlib
import os

import pytest
import torch

puzzles = importlib.import_module(os.environ.get("KVLAB_PUZZLES", "puzzles"))
NAN, GUARD = float("nan"), 777.0


def paged(n: int, page: int, dim: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pages full of NaN but for the sequence's rows, its block table, the rows [n, dim])."""
    generator = torch.Generator().manual_seed(seed)
    count = -(-n // page)
    table = (torch.randperm(count + 3, generator=generator)[:count] + 1).to(torch.int32)
    pages = torch.full((count + 5, page, dim), NAN)
    rows = torch.randn(n, dim, generator=generator)
    for t in range(n):
        pages[int(table[t // page]), t % page] = rows[t]
    return pages, table, rows


def close(out: torch.Tensor, expected: torch.Tensor, hint: str) -> None:
    assert not (out == GUARD).all(), "nothing was written: is the body still empty?"
    assert not out.isnan().any(), "NaN: a slot without a token was read, or 0 * NaN was summed; mask the load"
    assert torch.allclose(out, expected, atol=1e-5), hint


@pytest.mark.parametrize("n", [1, 8, 13])
def test_task_1_slots(n: int) -> None:
    _, table, _ = paged(n, 4, 2)
    out = torch.full((n + 2,), int(GUARD))
    puzzles.slots[(1,)](table, out, n, PAGE=4, BLOCK=16)
    expected = torch.tensor([int(table[t // 4]) * 4 + t % 4 for t in range(n)])
    assert out[:n].tolist() == expected.tolist(), "a slot is its page times PAGE, plus the place in the page"
    assert (out[n:] == GUARD).all(), "written behind n: mask the store"


@pytest.mark.parametrize("n", [1, 16, 21])
def test_task_2_gather(n: int) -> None:
    pages, table, rows = paged(n, 4, 8)
    out = torch.full((n + 1, 8), GUARD)
    puzzles.gather[(-(-n // 8),)](pages, table, out, n, pages.stride(0), PAGE=4, D=8, BLOCK=8)
    close(out[:n], rows, "rows in the wrong order: token t is row t % PAGE of page table[t // PAGE]")
    assert (out[n:] == GUARD).all(), "written behind n: mask the store"


@pytest.mark.parametrize(("n", "dim"), [(9, 6), (16, 20), (1, 3)])
def test_task_3_scores(n: int, dim: int) -> None:
    pages, table, rows = paged(n, 4, dim)
    query, out = torch.randn(dim), torch.full((n + 1,), GUARD)
    puzzles.scores[(-(-n // 8),)](query, pages, table, out, n, 0.5, pages.stride(0), PAGE=4, D=dim, BLOCK=8)
    close(out[:n], rows @ query * 0.5, "masked lanes must add 0 to the sum over D, and scale comes after it")
    assert (out[n:] == GUARD).all(), "written behind n: mask the store"


@pytest.mark.parametrize("n", [0, 1, 8, 27])
def test_task_4_decode(n: int) -> None:
    keys, table, k = paged(n, 4, 8)
    values, _, v = paged(n, 4, 8, seed=0)
    query, out = torch.randn(8) * 3, torch.full((8,), GUARD)
    puzzles.decode[(1,)](query, keys, values, table, out, n, 0.7, keys.stride(0), PAGE=4, D=8, BLOCK=8)
    expected = (k @ query * 0.7).softmax(0) @ v if n else torch.zeros(8)
    close(out, expected, "scale down the sums by exp(old best - new best) before adding a tile")


@pytest.mark.parametrize("lens", [(3, 5), (4, 0, 2, 0), (0, 0)])
def test_task_5_merge(lens: tuple[int, ...]) -> None:
    scores, values = [torch.randn(n) * 5 for n in lens], [torch.randn(n, 8) for n in lens]
    parts = torch.stack(
        [s.softmax(0) @ v if len(s) else torch.full((8,), NAN) for s, v in zip(scores, values, strict=True)]
    )
    lse = torch.tensor([float(s.logsumexp(0)) if len(s) else -torch.inf for s in scores])
    out = torch.full((8,), GUARD)
    puzzles.merge[(1,)](parts, lse, out, S=len(lens), D=8)
    expected = torch.cat(scores).softmax(0) @ torch.cat(values) if sum(lens) else torch.zeros(8)
    close(out, expected, "a part counts by exp(its lse - the highest lse), over the sum of those")


@pytest.mark.parametrize("n", [1, 5, 8])
def test_task_6_packed_scores(n: int) -> None:
    codes = torch.randint(0, 16, (n, 8), dtype=torch.uint8)
    scale, zero, query = torch.rand(n) + 0.1, torch.randint(0, 16, (n,)).float(), torch.randn(8)
    out = torch.full((n + 1,), GUARD)
    puzzles.packed_scores[(1,)](query, codes[:, :4] | (codes[:, 4:] << 4), scale, zero, out, n, HALF=4, BLOCK=8)
    expected = ((codes.float() - zero[:, None]) * scale[:, None]) @ query
    close(out[:n], expected, "the zero point meets the sum of the query's values, once per row")
    assert (out[n:] == GUARD).all(), "written behind n: mask the store"
