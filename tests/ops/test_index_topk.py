"""The indexer's choice against scores written out for every token and entry."""

from __future__ import annotations

import pytest
import torch
from latent_pages import poisoned
from paged import shuffled_table

from kvlab.ops.batch import make_batch
from kvlab.ops.index_topk import index_topk, torch_
from kvlab.specs.formats import get_format
from kvlab.specs.parts import IndexKeys

HEADS, WIDTH, ENTRIES = 5, 6, 3
MIXES = {
    "decodes": ([1, 1, 1, 1], [1, 5, 6, 23]),
    "decodes, then chunks": ([1, 1, 5, 13], [17, 2, 23, 13]),
    "nothing yet": ([1, 2], [1, 2]),
}


def made(lens, ratio: int, padded_rows: int = 0):
    """A pool of NaN with index keys in it; the keys of each sequence; and the batch. A page covers ENTRIES * ratio."""
    generator = torch.Generator().manual_seed(1)
    table = shuffled_table(lens[1], ENTRIES * ratio, generator)
    views = poisoned(IndexKeys(WIDTH, get_format("fp64"), ratio), ENTRIES, int(table.max()) + 2)
    keys = []
    for b, n in enumerate(lens[1]):
        keys.append(torch.randn(n // ratio, WIDTH, generator=generator, dtype=torch.float64))
        for s, key in enumerate(keys[-1]):
            views["index"][int(table[b, s // ENTRIES]), 0, s % ENTRIES] = key
    return views, keys, make_batch(*lens, table, ENTRIES * ratio, padded_rows)


def wanted(query, weights, keys, batch, row_sequence, ratio, top_k):
    """Per row the set of the best entries."""
    found = []
    for row, (b, position) in enumerate(row_sequence):
        ready = (position + 1) // ratio
        scores = [
            sum(float(weights[row, h]) * max(0.0, float(query[row, h] @ keys[b][s])) for h in range(HEADS))
            for s in range(ready)
        ]
        found.append(set(sorted(range(ready), key=lambda s: -scores[s])[:top_k]))
    return found


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_the_best_entries_that_a_token_may_see(backend, mix, ratio, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", backend)
    monkeypatch.setattr(torch_, "QUERY_BLOCK", 4)
    lens = MIXES[mix]
    views, keys, batch = made(lens, ratio, padded_rows=2)
    generator = torch.Generator().manual_seed(9)
    query = torch.randn(batch.num_tokens, HEADS, WIDTH, generator=generator, dtype=torch.float64)
    weights = torch.randn(batch.num_tokens, HEADS, generator=generator, dtype=torch.float64)
    places = [(b, end - n + i) for b, (n, end) in enumerate(zip(*lens, strict=True)) for i in range(n)]
    got = index_topk(query, weights, views, batch, top_k=3, ratio=ratio)
    assert got.shape == (batch.num_tokens, min(3, max(lens[1]) // ratio))
    sets = [{s for s in row if s >= 0} for row in got.tolist()]
    assert sets[: len(places)] == wanted(query, weights, keys, batch, places, ratio, 3)
    assert all(len(row) == len(set(row)) for row in ([s for s in r if s >= 0] for r in got.tolist()))
    assert (got[len(places) :] == -1).all()


@pytest.mark.parametrize(("top_k", "ratio"), [(0, 1), (2, 0)])
def test_counts_must_be_positive(top_k, ratio):
    views, _, batch = made(([1], [4]), 1)
    with pytest.raises(ValueError, match=f"top_k {top_k}, ratio {ratio}: must be positive"):
        index_topk(torch.zeros(1, HEADS, WIDTH), torch.zeros(1, HEADS), views, batch, top_k=top_k, ratio=ratio)
