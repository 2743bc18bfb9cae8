"""Attention of one query token per sequence, reading pages in place.

Work is cut at fixed positions (every CHUNK tokens of a sequence), one item per sequence, KV head and chunk, spread
over the cores; partial results are merged by their maxima and sums. Where the cuts lie depends on nothing but the
position, so a result does not change with batch mates or the number of threads.
Traffic per item: its keys and values once, for all query heads of the KV head.
"""

from __future__ import annotations

import numba
import numpy as np

from kvlab.ops.attention.cpu_math import exp_row, softcap_row
from kvlab.ops.linear.cpu import tile_1x4
from kvlab.ops.numba_support import kernel
from kvlab.quant.rows import row_floats

CHUNK = 128  # tokens of an item
LANES = 4  # tokens whose rows are in flight together


@kernel(parallel=True)
def decode_attention(query, codes, scales, geometry, arrays, num_decodes, options, out) -> None:
    """Rows 0 .. num_decodes - 1 of out [T, Hq, D] = attention of query [T, Hq, D] over the pages.

    Args:
        codes, scales, geometry: as in `PageViews`.
        arrays: (query_start_loc, seq_lens, block_table).
        options: (scale, window, softcap, is_bf16, scaled).
    """
    _, seq_lens, table = arrays
    _, num_heads, head_dim = query.shape
    share = num_heads // geometry[6]
    items = _items(seq_lens, num_decodes, geometry[6], options[1])
    partial = np.empty((items.shape[0], share, head_dim), np.float32)
    stats = np.empty((items.shape[0], share, 2), np.float32)
    for i in numba.prange(items.shape[0]):
        b, h = items[i, 0], items[i, 1]
        q = query[b, h * share : (h + 1) * share]
        _item(q, (codes, scales), geometry, table[b], items[i], options, partial[i], stats[i])
    _merge(items, partial, stats, num_decodes, share, out)


@kernel()
def _items(seq_lens, num_decodes, kv_heads, window):
    """int64 [n, 4]: (sequence, KV head, first token, end token), the chunks of a head one after the other."""
    count = 0
    for b in range(num_decodes):
        low = max(0, seq_lens[b] - window) if window else 0
        if seq_lens[b] > 0:
            count += kv_heads * ((seq_lens[b] - 1) // CHUNK - low // CHUNK + 1)
    items = np.empty((count, 4), np.int64)
    i = 0
    for b in range(num_decodes):
        end = seq_lens[b]
        low = max(0, end - window) if window else 0
        for h in range(kv_heads):
            if end <= 0:
                break
            for chunk in range(low // CHUNK, (end - 1) // CHUNK + 1):
                items[i, 0], items[i, 1] = b, h
                items[i, 2], items[i, 3] = max(low, chunk * CHUNK), min(end, (chunk + 1) * CHUNK)
                i += 1
    return items


@kernel()
def _item(query, pages, geometry, table, item, options, acc, stats) -> None:
    """Unnormalised attention acc [share, D] of one chunk; stats [share, 2] = (largest score, sum of weights)."""
    scale, _, softcap, is_bf16, scaled = options
    codes, scales = pages
    share, head_dim = query.shape
    tokens = item[3] - item[2]
    starts, scale_at = np.empty((CHUNK + LANES, 2), np.int64), np.empty((CHUNK + LANES, 2), np.int64)
    _addresses(geometry, table, item, starts, scale_at)
    weights = np.zeros((share, CHUNK + LANES), np.float32)
    bits = np.empty((LANES, head_dim), np.uint32)
    for t in range(0, tokens, LANES):
        k0, k1, k2, k3 = _rows(codes, starts, scale_at, t, 0, head_dim, is_bf16, bits)
        for g in range(share):
            a, b, c, d = tile_1x4(query[g], k0, k1, k2, k3)
            weights[g, t], weights[g, t + 1], weights[g, t + 2], weights[g, t + 3] = a, b, c, d
    for g in range(share):
        row = weights[g, :tokens]
        for t in range(tokens):
            factor = scales[scale_at[t, 0], scale_at[t, 1]] if scaled else np.float32(1)
            row[t] *= np.float32(scale) * factor
        if softcap > 0:
            softcap_row(row, np.float32(softcap))
        stats[g, 0], stats[g, 1] = exp_row(row)
        weights[g, tokens:] = 0
        if scaled:
            for t in range(tokens):
                row[t] *= scales[scale_at[t, 0], scale_at[t, 1] + geometry[5] - geometry[4]]
    acc[:] = 0
    for t in range(0, tokens, LANES):
        v0, v1, v2, v3 = _rows(codes, starts, scale_at, t, 1, head_dim, is_bf16, bits)
        for g in range(share):
            _add_weighted(weights[g, t : t + LANES], v0, v1, v2, v3, acc[g])


@kernel()
def _addresses(geometry, table, item, starts, scale_at) -> None:
    """Where each token's key and value rows start in their page, and its (page, key scale); past the end: the last."""
    block_size, stride, k_offset, v_offset, k_scales = geometry[0], geometry[1], geometry[2], geometry[3], geometry[4]
    tokens = item[3] - item[2]
    for t in range(tokens + LANES):
        position = item[2] + min(t, tokens - 1)
        row = item[1] * block_size + position % block_size
        starts[t, 0], starts[t, 1] = k_offset + row * stride, v_offset + row * stride
        scale_at[t, 0], scale_at[t, 1] = table[position // block_size], k_scales + row


@kernel()
def _rows(codes, starts, pages, t, which, width, is_bf16, bits):
    """The key (which 0) or value (1) rows of tokens t .. t + 3 as fp32."""
    return (
        row_floats(codes[pages[t, 0], starts[t, which] : starts[t, which] + width], is_bf16, bits[0]),
        row_floats(codes[pages[t + 1, 0], starts[t + 1, which] : starts[t + 1, which] + width], is_bf16, bits[1]),
        row_floats(codes[pages[t + 2, 0], starts[t + 2, which] : starts[t + 2, which] + width], is_bf16, bits[2]),
        row_floats(codes[pages[t + 3, 0], starts[t + 3, which] : starts[t + 3, which] + width], is_bf16, bits[3]),
    )


@kernel()
def _add_weighted(weights, v0, v1, v2, v3, acc) -> None:
    """acc += sum of weights[i] * v_i over four rows."""
    w0, w1, w2, w3 = weights[0], weights[1], weights[2], weights[3]
    for d in range(acc.shape[0]):
        acc[d] += w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]


@kernel()
def _merge(items, partial, stats, num_decodes, share, out) -> None:
    """Normalised sums of each head's chunks into `out`; a sequence without items gives 0."""
    out[:num_decodes] = 0
    i = 0
    while i < items.shape[0]:
        j = i
        while j < items.shape[0] and items[j, 0] == items[i, 0] and items[j, 1] == items[i, 1]:
            j += 1
        for g in range(share):
            row = out[items[i, 0], items[i, 1] * share + g]
            largest = stats[i, g, 0]
            for n in range(i + 1, j):
                largest = max(largest, stats[n, g, 0])
            total = np.float32(0)
            for n in range(i, j):
                factor = np.exp(stats[n, g, 0] - largest)
                total += factor * stats[n, g, 1]
                for d in range(row.shape[0]):
                    row[d] += factor * partial[n, g, d]
            for d in range(row.shape[0]):
                row[d] /= total
        i = j
