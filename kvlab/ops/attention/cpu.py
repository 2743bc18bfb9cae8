"""paged_attention on the CPU: decodes by a Numba kernel on the pages in place, chunks by torch on gathered pages."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvlab.ops.attention.cpu_decode import decode_attention
from kvlab.ops.attention.cpu_gather import gather_rows
from kvlab.ops.attention.reference import attend
from kvlab.ops.attention.rules import Rules
from kvlab.ops.batch import AttentionBatch
from kvlab.ops.numba_support import launch
from kvlab.ops.views import PageViews

QUERY_BLOCK = 256  # query tokens whose scores exist at one time: bounds memory to Hq * 256 * S floats
_NONE = np.empty(0, np.float32)


def paged_attention(
    query: torch.Tensor, views: PageViews, batch: AttentionBatch, rules: Rules, out: torch.Tensor
) -> None:
    """See `kvlab.ops.attention.paged_attention`; writes to `out`."""
    starts, seq_lens, table = batch.arrays
    decodes = batch.num_decodes
    if decodes < batch.num_seqs or batch.num_tokens > decodes or query.dtype != torch.float32:
        out.zero_()
    if decodes:
        result = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32)
        flags = (views.format == "bf16", views.k_scale is not None)
        options = (float(rules.scale), int(rules.window), float(rules.softcap), int(rules.chunk), *flags)
        vectors = tuple(_NONE if v is None else v.float().numpy() for v in (rules.sinks, rules.alibi))
        launch(
            decode_attention, query.float().contiguous().numpy(), (views.codes, views.scales), views.geometry,
            (starts, seq_lens, table), decodes, options, vectors, result.numpy(),
        )  # fmt: skip
        if result is not out:
            rows = starts[decodes]
            out[:rows] = result[:rows]
    for b in range(decodes, batch.num_seqs):
        first, stop, end = int(starts[b]), int(starts[b + 1]), int(seq_lens[b])
        if stop > first and end > 0:
            _chunk(query[first:stop], views, table[b], end, rules, out[first:stop])


def _chunk(query: torch.Tensor, views: PageViews, pages: np.ndarray, end: int, rules: Rules, out: torch.Tensor) -> None:
    """out [T, Hq, Dv] = attention of the last T tokens of a sequence of `end` tokens."""
    rows = query.shape[0]
    first = end - rows
    low = rules.lowest(first)
    key, value = gather_rows(views, pages, low, end)
    for i in range(0, rows, QUERY_BLOCK):
        j = min(i + QUERY_BLOCK, rows)
        begin = rules.lowest(first + i)
        seen = slice(begin - low, first + j - low)
        out[i:j] = _attend(query[i:j], key[:, seen], value[:, seen], (first + i, begin), rules)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, begin: tuple[int, int], rules: Rules
) -> torch.Tensor:
    """As `reference.attend`, by torch's fused attention where that knows the rules."""
    if rules.softcap or rules.sinks is not None or rules.alibi is not None or key.shape[2] != value.shape[2]:
        return attend(query, key, value, begin, rules)
    causal = begin[0] == begin[1] and not rules.window and not rules.chunk
    mask = None
    if not causal:
        q_pos = torch.arange(begin[0], begin[0] + query.shape[0])[:, None]
        mask = rules.seen(q_pos, torch.arange(begin[1], begin[1] + key.shape[1]))
    heads = query.to(key.dtype).transpose(0, 1)[None]
    options = {"attn_mask": mask, "is_causal": causal, "scale": rules.scale, "enable_gqa": True}
    return scaled_dot_product_attention(heads, key[None], value[None], **options)[0].transpose(0, 1)
