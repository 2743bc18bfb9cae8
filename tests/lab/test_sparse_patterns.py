"""Sparse patterns against their definitions, position by position; bytes read and bytes kept counted apart."""

import pytest
import torch

from kvlab.lab import sparse_patterns as sp
from kvlab.ops.views import page_views
from kvlab.ops.write_kv import reference
from kvlab.specs.formats import get_format
from kvlab.specs.layout import page_layout
from kvlab.specs.parts import Attention

TOKENS = 37


def listed(mask) -> list[set[int]]:
    return [{s for s in range(mask.shape[1]) if mask[t, s]} for t in range(len(mask))]


def test_longformer_is_a_window_and_global_positions():
    got = listed(sp.longformer(TOKENS, 5, {0, 11, 99}))
    for t in range(TOKENS):
        near = {s for s in range(TOKENS) if 0 <= t - s < 5} | {s for s in (0, 11) if s <= t}
        assert got[t] == (set(range(t + 1)) if t in (0, 11) else near)


def test_bigbird_is_near_blocks_first_blocks_and_random_ones():
    mask = sp.bigbird(TOKENS, 4, window=2, random_blocks=2, global_blocks=1, seed=3)
    for t, seen in enumerate(listed(mask)):
        block = t // 4
        blocks = {s // 4 for s in seen}
        assert {0, block, max(0, block - 1)} <= blocks and len(blocks) == min(block + 1, 5)
        assert seen == {s for b in blocks for s in range(4 * b, 4 * b + 4) if s <= t}
    rows = listed(mask)
    # all queries of a block read the same blocks, another seed other ones
    assert {s // 4 for s in rows[28]} == {s // 4 for s in rows[31]}
    assert not torch.equal(mask, sp.bigbird(TOKENS, 4, window=2, random_blocks=2, global_blocks=1, seed=4))


def test_lsh_reads_what_fell_into_the_same_bucket():
    vectors = torch.randn(TOKENS, 6, generator=torch.Generator().manual_seed(0))
    buckets = sp.lsh_buckets(vectors, 8, rounds=2, seed=1).tolist()
    for t, seen in enumerate(listed(sp.lsh(vectors, 8, rounds=2, seed=1))):
        assert seen == {s for s in range(t + 1) if s == t or any(b[s] == b[t] for b in buckets)}
    assert 1 < len(set(buckets[0])) <= 8
    # length does not matter, opposite vectors never meet
    assert sp.lsh_buckets(3 * vectors, 8, 2, 1).tolist() == buckets
    assert (sp.lsh_buckets(-vectors, 8, 2, 1) != torch.tensor(buckets)).all()
    with pytest.raises(ValueError, match="buckets 7: must be even"):
        sp.lsh_buckets(vectors, 7)


def test_nsa_is_three_branches():
    f = sp.NSA(stride=2, length=4, block=4, top_k=3, window=5)
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(TOKENS, 6, generator=generator, dtype=torch.float64) for _ in range(3))
    gates = torch.rand(TOKENS, 3, generator=generator, dtype=torch.float64)
    got = sp.nsa_attention(q, k, v, gates, f)

    def attend(t: int, keys, values):
        if not len(keys):
            return torch.zeros(6, dtype=torch.float64)
        return torch.softmax(torch.stack([q[t] @ row for row in keys]) * 6**-0.5, 0) @ torch.stack(list(values))

    for t in range(TOKENS):
        starts = [i for i in range(0, TOKENS, 2) if i + 3 <= t]
        entries = [k[i : i + 4].mean(0) for i in starts]
        compressed = attend(t, entries, [v[i : i + 4].mean(0) for i in starts])
        weights = torch.softmax(torch.stack([q[t] @ e for e in entries]) * 6**-0.5, 0).tolist() if entries else []
        score = {b: sum(w for w, i in zip(weights, starts, strict=True) if i // 4 == b) for b in range(t // 4)}
        chosen = {0, t // 4}
        for b in sorted(range(1, t // 4), key=lambda b: -score[b]):
            if len(chosen) < 3:
                chosen.add(b)
        picked = [s for s in range(t + 1) if s // 4 in chosen]
        near = range(max(0, t - 4), t + 1)
        expected = gates[t, 0] * compressed + gates[t, 1] * attend(t, k[picked], v[picked])
        expected = expected + gates[t, 2] * attend(t, k[list(near)], v[list(near)])
        torch.testing.assert_close(got[t], expected, rtol=0, atol=1e-12)


PATTERNS = {
    "window": sp.window_mask(TOKENS, 6),
    "longformer": sp.longformer(TOKENS, 6, {0}),
    "bigbird": sp.bigbird(TOKENS, 4, window=2, random_blocks=1),
    "lsh": sp.lsh(torch.randn(TOKENS, 4, generator=torch.Generator().manual_seed(4)), 4),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_bytes_read_and_bytes_kept_by_counting(pattern):
    mask = PATTERNS[pattern]
    for position in (0, 5, 20, TOKENS - 2):
        got = sp.traffic(mask, position, entry_bytes=10, block_size=4)
        read = [s for s in range(TOKENS) if mask[position, s]]
        later = {s for t in range(position, TOKENS) for s in range(position + 1) if mask[t, s]}
        assert got.read == 10 * len(read)
        assert got.read_pages == 10 * 4 * len({s // 4 for s in read})
        assert got.resident == 10 * len(later)
        assert got.read <= got.resident


@pytest.mark.parametrize("pattern", PATTERNS)
def test_pages_that_a_pattern_leaves_out_are_not_touched(pattern):
    """All other pages are NaN by the time the query comes."""
    layout = page_layout(Attention(2, 6, 6, get_format("fp32")), 4)
    views = page_views(torch.full((13, layout.page_bytes), 255, dtype=torch.uint8), layout)
    generator = torch.Generator().manual_seed(8)
    table = (torch.randperm(11, generator=generator) + 1).to(torch.int32)
    key, value = (torch.randn(TOKENS, 2, 6, generator=generator) for _ in range(2))
    slots = [int(table[t // 4]) * 4 + t % 4 for t in range(TOKENS)]
    reference.write_kv(key, value, views, torch.tensor(slots))
    at, query = 29, torch.randn(4, 6, generator=generator)
    row = PATTERNS[pattern][at]
    needed = sorted({int(table[s // 4]) for s in range(TOKENS) if row[s]})
    views.buffer[[p for p in range(13) if p not in needed]] = 255
    got, pages = sp.paged_query(query, views, table, row, 0.4)
    assert pages == needed
    assert len(pages) * 4 * 10 == sp.traffic(PATTERNS[pattern], at, 10, 4).read_pages
    for h in range(4):
        read = [s for s in range(TOKENS) if row[s]]
        weights = torch.softmax(key[read, h // 2] @ query[h] * 0.4, 0)
        torch.testing.assert_close(got[h], weights @ value[read, h // 2], rtol=1e-5, atol=1e-5)


def test_only_a_window_gives_memory_back():
    at = 24
    full = 10 * (at + 1)
    kept = {name: sp.traffic(mask, at, 10, 4) for name, mask in PATTERNS.items()}
    assert kept["window"].resident == kept["window"].read == 60
    # one global position more
    assert kept["longformer"].resident == 70
    # what a random block or a bucket may still need stays, though each query reads little
    assert kept["lsh"].read < kept["lsh"].resident <= full
    assert kept["bigbird"].read < kept["bigbird"].resident <= full
    with pytest.raises(ValueError, match="position 37: the mask has 37 queries"):
        sp.traffic(PATTERNS["window"], TOKENS, 10, 4)
