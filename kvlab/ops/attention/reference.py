"""paged_attention, one sequence after the other, scores written out in full."""

from __future__ import annotations

import torch

from kvlab.ops.attention.rules import Rules
from kvlab.ops.batch import AttentionBatch
from kvlab.ops.coded import decode_rows
from kvlab.ops.views import PageViews


def paged_attention(
    query: torch.Tensor, views: PageViews, batch: AttentionBatch, rules: Rules, out: torch.Tensor
) -> None:
    """See `kvlab.ops.attention.paged_attention`; writes to `out`."""
    starts = batch.query_start_loc.tolist()
    out.zero_()
    for b, end in enumerate(batch.seq_lens.tolist()):
        rows = slice(starts[b], starts[b + 1])
        first = end - (rows.stop - rows.start)  # position of the sequence's first query
        if end == 0 or first == end:
            continue
        low = rules.lowest(first)
        key, value = gather(views, batch.block_table[b], low, end, query)
        seen = None
        if batch.tree is not None:
            slots = torch.arange(first, end, device=query.device)[None], torch.arange(low, end, device=query.device)
            seen = batch.tree.seen(slice(b, b + 1), slots, batch.seq_lens[b : b + 1, None].long())[0]
        out[rows] = attend(query[rows], key, value, (first, low), rules, seen).to(out.dtype)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, begin: tuple[int, int], rules: Rules,
    among: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention [T, Hq, Dv] of query [T, Hq, D] over key [Hkv, S, D] and value [Hkv, S, Dv].

    Args:
        begin: positions of the first query and of the first key.
        among: bool [T, S], what a query sees at most beside the rules; None: everything.
    """
    rows, num_heads, head_dim = query.shape
    kv_heads, tokens, _ = key.shape
    q = query.to(key.dtype).transpose(0, 1).reshape(kv_heads, -1, head_dim)  # [Hkv, Hq / Hkv * T, D]
    products = (q @ key.transpose(1, 2)).view(num_heads, rows, tokens)
    q_pos = torch.arange(begin[0], begin[0] + rows, device=query.device)[:, None]
    k_pos = torch.arange(begin[1], begin[1] + tokens, device=query.device)[None, :]
    seen = rules.seen(q_pos, k_pos) if among is None else rules.seen(q_pos, k_pos) & among
    weights = rules.weights(products, seen, k_pos - q_pos)
    result = weights.view(kv_heads, -1, tokens) @ value
    return result.view(num_heads, rows, -1).transpose(0, 1)


def gather(
    views: PageViews, table: torch.Tensor, low: int, end: int, query: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decoded (key, value) [Hkv, end - low, D] of positions low .. end - 1, in fp32, or fp64 for an fp64 query."""
    positions = torch.arange(low, end, device=query.device)
    page = table[positions // views.block_size].long()
    offset = positions % views.block_size
    dtype = torch.promote_types(query.dtype, torch.float32)
    key, value = (decode_rows(views, name, (page, slice(None), offset)).to(dtype) for name in ("k", "v"))
    return key.transpose(0, 1), value.transpose(0, 1)
