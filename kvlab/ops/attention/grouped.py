"""Attention over closed groups and a recent window, and the closing of groups: plain torch, and a kernel for decodes.

A query at t reads the codes of a group that ended at least `recent` tokens before t, and everything behind that in
full. Which of the two it reads is a mask; keys and values of both lie side by side in one product.
"""

from __future__ import annotations

import torch

from kvlab.ops.attention.rules import Rules
from kvlab.ops.batch import AttentionBatch
from kvlab.ops.coded import decode_rows, pick, put
from kvlab.ops.dispatch import backend
from kvlab.ops.grouped_views import GroupedViews
from kvlab.quant.closed import codec_of

QUERY_BLOCK = 128  # query tokens of a sequence whose scores exist at one time


def paged_attention(
    query: torch.Tensor, views: GroupedViews, batch: AttentionBatch, rules: Rules, out: torch.Tensor
) -> None:
    """See `kvlab.ops.attention.paged_attention`; `batch.closed` is the block table of the groups.

    Groups that the step's last query reads as closed are encoded first, from the recent window that still has them.
    """
    close_groups(views, batch)
    out.zero_()
    done = _decodes(query, views, batch, rules, out)
    row = sum(batch.query_lens[:done])
    for b in range(done, len(batch.ends)):
        count, end = batch.query_lens[b], batch.ends[b]
        for first in range(0, count if end else 0, QUERY_BLOCK):
            stop = min(first + QUERY_BLOCK, count)
            # count - stop query tokens follow
            mine = slice(row + first, row + stop)
            rows = _attend(query[None, mine], views, batch, slice(b, b + 1), rules, end - (count - stop))
            out[mine] = rows[0].to(out.dtype)
        row += count


def _decodes(
    query: torch.Tensor, views: GroupedViews, batch: AttentionBatch, rules: Rules, out: torch.Tensor
) -> int:  # fmt: skip
    """Attends the batch's decodes; how many of its sequences are done with that."""
    n = batch.num_decodes
    if n and backend(query, triton=True) == "triton":
        from kvlab.ops.attention import triton_grouped

        if triton_grouped.supports(query, views):
            triton_grouped.decode(query[:n], views, batch, rules, out[:n])
            return n
    if n and n == len(batch.ends) and all(batch.ends):
        out[:n] = _attend(query[:n, None], views, batch, slice(0, n), rules)[:, 0]
        return n
    return 0


def _attend(
    query: torch.Tensor,
    views: GroupedViews,
    batch: AttentionBatch,
    which: slice,
    rules: Rules,
    end: int | None = None,
) -> torch.Tensor:
    """[b, n, Hq, Dv] of the last n query tokens [b, n, Hq, D] of some sequences, up to token `end` (None: their own)."""
    b, n, num_heads, head_dim = query.shape
    lens = batch.seq_lens[which].long()[:, None] if end is None else batch.seq_lens.new_full((b, 1), end).long()
    longest = batch.max_seq_len if end is None else end
    position = lens - n + torch.arange(n, device=query.device)  # [b, n]
    dtype = torch.promote_types(query.dtype, torch.float32)
    closed = _closed_rows(views, batch.closed[which], longest)
    recent = _recent_rows(views, batch.block_table[which], lens, min(longest, _window(views) + n))
    fmt = views.part.format
    group_end = torch.div(closed[2], fmt.group_tokens, rounding_mode="floor") * fmt.group_tokens + fmt.group_tokens - 1
    sealed = group_end[:, None] <= position[..., None] - fmt.recent  # [b, n, S]
    last = torch.div(position - fmt.recent + 1, fmt.group_tokens, rounding_mode="floor") * fmt.group_tokens
    open_ = (recent[2][:, None] >= last.clamp_min(0)[..., None]) & (recent[2] >= 0)[:, None]
    k_pos = torch.cat((closed[2], recent[2]), dim=1)
    seen = torch.cat((sealed, open_), dim=2) & rules.seen(position[..., None], k_pos[:, None])
    # what no query of the block may read is 0: it may hold anything
    live = seen.any(1)[:, None, :, None]
    key, value = (torch.where(live, torch.cat((c.to(dtype), r.to(dtype)), dim=2), 0)
                  for c, r in zip(closed[:2], recent[:2], strict=True))  # fmt: skip
    kv_heads = key.shape[1]
    q = query.to(dtype).transpose(1, 2).reshape(b, kv_heads, -1, head_dim)
    products = (q @ key.transpose(2, 3)).view(b, num_heads, n, -1)
    weights = rules.weights(products, seen[:, None], (k_pos[:, None] - position[..., None])[:, None])
    result = weights.view(b, kv_heads, -1, weights.shape[-1]) @ value
    return result.view(b, num_heads, n, -1).transpose(1, 2).to(query.dtype)


def _window(views: GroupedViews) -> int:
    """Tokens before a query that may be in no closed group, its own included."""
    return views.part.format.recent + views.part.format.group_tokens


def _closed_rows(
    views: GroupedViews, table: torch.Tensor, longest: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(keys [b, Hkv, S, D], values, positions int64 [b, S]) of all groups before token `longest`, closed or not."""
    part, b = views.part, len(table)
    tokens, per_page = part.format.group_tokens, views.closed.block_size
    entry = torch.arange(longest // tokens, device=table.device)
    page = table[:, torch.div(entry, per_page, rounding_mode="floor")].long()
    index = (page, slice(None), (entry % per_page).expand_as(page))
    stored = {name: pick(segment, index) for name, segment in views.closed.segments.items()}
    key, value = codec_of(part).decode(stored, part)  # [b, groups, Hkv, tokens, D]
    key, value = (rows.transpose(1, 2).flatten(2, 3) for rows in (key, value))
    position = torch.arange(key.shape[2], device=table.device)
    if views.turn is not None and len(position):
        turned = views.turn(key.permute(2, 0, 1, 3).flatten(1, 2), position, False)
        key = turned.unflatten(1, (b, -1)).permute(1, 2, 0, 3)
    return key, value, position.expand(b, -1)


def _recent_rows(
    views: GroupedViews, table: torch.Tensor, lens: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(keys [b, Hkv, count, D], values, positions int64 [b, count]) of the last tokens; negative: there is none."""
    position = lens - count + torch.arange(count, device=table.device)
    place = position.clamp_min(0)
    page = table.gather(1, torch.div(place, views.block_size, rounding_mode="floor")).long()
    index = (page, slice(None), place % views.block_size)
    key, value = (decode_rows(views.recent, name, index).transpose(1, 2) for name in ("k", "v"))
    return key, value, torch.where(page > 0, position, -1)


def close_groups(views: GroupedViews, batch: AttentionBatch) -> None:
    """Encodes the groups that a query of this step is the first to read as closed; changes `views` in place."""
    part, fmt = views.part, views.part.format
    sequence, group = [], []
    for b, (count, end) in enumerate(zip(batch.query_lens, batch.ends, strict=True)):
        first, stop = (max(0, (n - fmt.recent) // fmt.group_tokens) for n in (end - count, end))
        group += range(first, stop)
        sequence += [b] * (stop - first)
    if not group:
        return
    device = batch.block_table.device
    rows, groups = torch.tensor(sequence, device=device), torch.tensor(group, device=device)
    position = groups[:, None] * fmt.group_tokens + torch.arange(fmt.group_tokens, device=device)
    page = batch.block_table[rows[:, None], torch.div(position, views.block_size, rounding_mode="floor")].long()
    index = (page, slice(None), position % views.block_size)
    key, value = (decode_rows(views.recent, name, index) for name in ("k", "v"))  # [n, tokens, Hkv, D]
    if views.turn is not None:
        key = views.turn(key.flatten(0, 1), position.flatten(), True).view_as(key)
    stored = codec_of(part).encode(key.transpose(1, 2), value.transpose(1, 2), part)
    per_page = views.closed.block_size
    place = batch.closed[rows, torch.div(groups, per_page, rounding_mode="floor")].long()
    live = place > 0
    for name, new in stored.items():
        put(views.closed[name], (place, slice(None), groups % per_page), new, live)
