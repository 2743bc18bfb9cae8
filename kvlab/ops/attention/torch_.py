"""paged_attention as padded dense tensors, without host reads: what a device runs where no Triton kernel does."""

from __future__ import annotations

import torch

from kvlab.ops.attention.rules import Rules
from kvlab.ops.batch import AttentionBatch
from kvlab.ops.coded import decode_rows
from kvlab.ops.views import PageViews

QUERY_BLOCK = 128  # query tokens of a sequence whose scores exist at one time


def paged_attention(
    query: torch.Tensor, views: PageViews, batch: AttentionBatch, rules: Rules, out: torch.Tensor
) -> None:
    """See `kvlab.ops.attention.paged_attention`; writes to `out`. Loops over host integers of the batch only."""
    rows = query.shape[0]
    padded = out.new_zeros((rows + 1, *out.shape[1:]))  # one more row takes what belongs nowhere
    decodes, longest = batch.num_decodes, batch.max_query_len
    if decodes:
        _sequences(query, views, batch, (slice(0, decodes), 0, 1), rules, padded)
    if decodes < batch.num_seqs:
        for first in range(0, longest, QUERY_BLOCK):
            count = min(QUERY_BLOCK, longest - first)
            _sequences(query, views, batch, (slice(decodes, batch.num_seqs), first, count), rules, padded)
    out.copy_(padded[:rows])


def _sequences(query, views, batch, which, rules: Rules, padded) -> None:
    """Attention of some query tokens of some sequences, into `padded` [T + 1, Hq, Dv].

    Args:
        which: (slice of the sequences, first query token of each, count of query tokens).
    """
    which, first, count = which
    starts = batch.query_start_loc.long()
    begin, stop = starts[:-1][which, None], starts[1:][which, None]
    seq_lens = batch.seq_lens[which].long()[:, None]
    row = begin + first + torch.arange(count, device=query.device)  # [b, count]
    position = seq_lens - (stop - begin) + (row - begin)
    live = (row < stop) & (seq_lens > 0)
    spare = query.shape[0]
    q = query[torch.where(live, row, 0)]  # [b, count, Hq, D]
    pages = -(-batch.max_seq_len // views.block_size)
    table = batch.block_table[which, :pages].long()
    k_pos = torch.arange(pages * views.block_size, device=query.device)
    # a page behind the window was given back: its entry is the null page, whose bytes mean nothing
    held = (table != 0).repeat_interleave(views.block_size, dim=1)
    key_live = (k_pos < seq_lens) & held  # [b, S]
    dtype = torch.promote_types(query.dtype, torch.float32)
    key, value = (_gather(views, name, table, key_live).to(dtype) for name in ("k", "v"))
    seen = rules.seen(position[..., None], k_pos) & key_live[:, None] & live[..., None]  # [b, count, S]
    if batch.tree is not None:
        seen = seen & batch.tree.seen(which, (position, k_pos), seq_lens)
    b, _, num_heads, head_dim = q.shape
    kv_heads = key.shape[1]
    grouped = q.to(dtype).transpose(1, 2).reshape(b, kv_heads, -1, head_dim)
    products = (grouped @ key.transpose(2, 3)).view(b, num_heads, count, -1)
    weights = rules.weights(products, seen[:, None], (k_pos - position[..., None])[:, None])
    result = (weights.view(b, kv_heads, -1, weights.shape[-1]) @ value).view(b, num_heads, count, -1)
    padded.index_put_((torch.where(live, row, spare),), result.transpose(1, 2).to(padded.dtype))


def _gather(views: PageViews, name: str, table: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """Decoded rows [b, Hkv, S, D] of the pages in `table` [b, n]; entries that are not `live` [b, S] are 0."""
    rows = decode_rows(views, name, table, heads=-3)  # [b, n, Hkv, P, D]
    rows = rows.transpose(1, 2).flatten(2, 3)
    return torch.where(live[:, None, :, None], rows, 0)
