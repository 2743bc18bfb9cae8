"""The prefill kernel: trees of drafts, one block of tokens per sequence and several, addresses beyond 32 bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged import fill, oracle, poisoned_views
from tolerances import assert_close

from kvlab.ops.attention import paged_attention
from kvlab.ops.batch import make_batch
from kvlab.ops.tree import tree_mask
from kvlab.ops.write_kv import write_kv

# a tree of 6 drafts by parent: two branches from the root, one of which branches again
PARENTS = (-1, 0, 0, 1, 1, 2)


def ancestors(node: int) -> list[int]:
    return [] if node < 0 else [*ancestors(PARENTS[node]), node]


@pytest.mark.parametrize(
    ("fmt", "dim", "cap"), [("fp32", 16, 0.0), ("int4", 16, 0.0), ("int8_g32", 80, 1.5), ("nvfp4", 80, 1.5)]
)
def test_a_tree_sees_its_branch_and_everything_before_it(fmt: str, dim: int, cap: float) -> None:
    """With `cap`, under a soft-cap and sinks too."""
    nodes, before = len(PARENTS), 13
    # two ordinary tokens before the tree in its chunk, and a second sequence without a tree
    paged = fill(fmt, (2, dim, 4), ([nodes + 2, 4], [before + nodes, 9]))
    batch = replace(paged.batch, tree=tree_mask([PARENTS, []], torch.device("cpu")))
    query, scale = torch.randn(nodes + 6, 4, dim), 1.6 * dim**-0.5
    rules = {"softcap": cap, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])} if cap else {}
    out = paged_attention(query, paged.views, batch, scale=scale, **rules)
    plain = oracle(query, paged, scale, **rules)
    for i in range(nodes):
        rows = [*range(before), *(before + j for j in ancestors(i))]
        for h in range(4):
            scores = paged.keys[0][rows, h // 2] @ query[i + 2, h].double() * scale
            if cap:
                scores = torch.cat((cap * (scores / cap).tanh(), rules["sinks"][h : h + 1].double()))
            weights = scores.softmax(0)[: len(rows)]
            assert_close(f"node {i}", weights @ paged.values[0][rows, h // 2], out[i + 2, h], "fp32")
    assert_close("before the tree", plain[:2], out[:2], "fp32")
    assert_close("no tree", plain[nodes + 2 :], out[nodes + 2 :], "fp32")


@pytest.mark.parametrize("group", [1, 5, 40])
def test_chunks_of_several_blocks_find_their_sequences(group: int) -> None:
    """A block holds 128 // group tokens: sequences of one block, of several, and one without new tokens."""
    lens = ([3, 26, 0, 1, 9], [3, 30, 6, 12, 20])
    paged = fill("fp32", (1, 16, 16), lens)
    query = torch.randn(39, group, 16)
    out = paged_attention(query, paged.views, paged.batch, scale=0.3, window=11)
    assert_close("blocks", oracle(query, paged, 0.3, 11), out, "fp32")


@pytest.mark.parametrize("backend", ["triton", "torch", "reference"])
def test_chunks_behind_prefixes_of_many_lengths(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pitfall: sglang#22291: beside long prefixes a short one was read with length 0. None, a token, a page, ten pages."""
    monkeypatch.setenv("KVLAB_OPS", backend)
    lens = ([3, 3, 3, 3], [3, 4, 3 + 4, 3 + 40])
    paged = fill("fp32", (2, 16, 4), lens)
    query = torch.randn(12, 4, 16)
    out = paged_attention(query, paged.views, paged.batch, scale=0.3)
    assert_close("in one batch", oracle(query, paged, 0.3), out, "fp32")


@pytest.mark.parametrize("backend", ["triton", "torch", "reference"])
def test_tables_padded_with_minus_one_lead_nowhere(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As nano-vllm pads them. Decodes, an empty sequence between them, a chunk; -1 would be the last page, which is NaN."""
    monkeypatch.setenv("KVLAB_OPS", backend)
    paged = fill("fp32", (2, 16, 4), ([1, 1, 5], [9, 0, 8]), padded_rows=1, seed=3)
    table = torch.where(paged.batch.block_table == 0, -1, paged.batch.block_table)
    assert (table < 0).any(1).all() and paged.views.k[-1].isnan().all()
    query, before = torch.randn(paged.batch.num_tokens, 4, 16), paged.views.buffer.clone()
    out = paged_attention(query, paged.views, replace(paged.batch, block_table=table), scale=0.3)
    assert_close("padded", oracle(query, paged, 0.3), out, "fp32")
    assert out.isfinite().all() and torch.equal(before, paged.views.buffer)


@pytest.mark.parametrize("chunk", [1, 7], ids=["decode", "prefill"])
def test_a_page_beyond_32_bits_is_reached(chunk: int) -> None:
    """int8 pages of 4,352 bytes from page 500,000 on begin beyond 2**31; untouched memory costs nothing."""
    views = poisoned_small(500_003)
    table = torch.tensor([[500_001, 500_002]], dtype=torch.int32)
    batch = make_batch([20], [20], table, 16)
    key, value = torch.randn(20, 2, 64), torch.randn(20, 2, 64)
    assert int(batch.slot_mapping[0]) // 16 * views.k.stride(0) > 2**31
    write_kv(key, value, views, batch.slot_mapping)
    query = torch.randn(chunk, 2, 64)
    out = paged_attention(query, views, make_batch([chunk], [20], table, 16), scale=0.2)
    small = poisoned_views("int8", 2, 64, 16, 3)
    near = torch.tensor([[1, 2]], dtype=torch.int32)
    write_kv(key, value, small, make_batch([20], [20], near, 16).slot_mapping)
    assert torch.equal(out, paged_attention(query, small, make_batch([chunk], [20], near, 16), scale=0.2))


def poisoned_small(pages: int):
    """Views of a pool of that many pages, of which no byte has been written."""
    from kvlab.ops.views import page_views

    layout = poisoned_views("int8", 2, 64, 16, 1).layout
    return page_views(torch.empty((pages, layout.page_bytes), dtype=torch.uint8), layout)
