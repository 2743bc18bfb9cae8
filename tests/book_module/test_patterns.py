"""Sparse patterns: each mask pair by pair against the sentence that defines it, and what a query reads of pages."""

from __future__ import annotations

import pytest
import torch

from kvlab.book.patterns import bigbird, last_reads, longformer, lsh, nsa, patterns_figure

T = 37


def test_longformer_is_a_window_and_the_first_tokens() -> None:
    mask = longformer(T, window=5, sinks=2)
    wanted = [[s <= t and (t - s < 5 or s < 2) for s in range(T)] for t in range(T)]
    assert mask.tolist() == wanted


def test_bigbird_adds_that_many_earlier_tokens_and_the_same_ones_for_a_seed() -> None:
    mask, local = bigbird(T, 5, 2, drawn=3), longformer(T, 5, 2)
    added = (mask & ~local).sum(1)
    assert (mask | local).equal(mask) and 0 < added.max() <= 3 and not mask.triu(1).any()
    assert mask.equal(bigbird(T, 5, 2, drawn=3)) and not mask.equal(bigbird(T, 5, 2, drawn=3, seed=1))


def test_a_token_is_always_in_its_own_bucket_and_buckets_are_symmetric() -> None:
    mask = lsh(torch.randn(T, 8, generator=torch.Generator().manual_seed(0)), buckets=4)
    assert mask.diagonal().all() and not mask.triu(1).any()
    both = mask | mask.T
    assert all(both[i].equal(both[j]) for i in range(T) for j in range(T) if both[i, j])
    with pytest.raises(ValueError, match="buckets 3"):
        lsh(torch.randn(4, 2), 3)


def test_nsa_reads_whole_complete_blocks_and_the_window() -> None:
    key = torch.zeros(T, 4)
    key[8:12, 0] = 1.0  # the block 8..11 is the only one that scores
    query = torch.zeros(T, 4)
    query[:, 0] = 1.0
    mask = nsa(query, key, block=4, top=1, window=3)
    assert mask[-1].nonzero().flatten().tolist() == [8, 9, 10, 11, 34, 35, 36]
    assert mask[2].nonzero().flatten().tolist() == [0, 1, 2]  # no block is complete yet
    assert mask[11].nonzero().flatten().tolist() == [8, 9, 10, 11]


def test_reads_count_entries_pages_and_what_is_resident() -> None:
    reads = last_reads(longformer(T, window=5, sinks=2), block_size=4, entry_bytes=10, extra=3)
    assert (reads.tokens, reads.pages) == (7 + 3, 1 + 2)  # 0, 1 in page 0; 32..36 in pages 8 and 9
    assert (reads.read_bytes, reads.page_bytes, reads.resident_bytes) == (100, (3 + 1) * 40, 400)


def test_every_pair_is_drawn() -> None:
    masks = {"a": longformer(9, 2, 1), "b": longformer(9, 3, 0), "c": longformer(9, 9, 0)}
    fig = patterns_figure(masks)
    assert [len(trace.x) for trace in fig.data] == [int(m.sum()) for m in masks.values()]
