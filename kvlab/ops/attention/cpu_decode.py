"""Attention of one query token per sequence, reading pages in place.

Work is cut at fixed positions (every CHUNK tokens of a sequence), one item per sequence, KV head and chunk, spread
over the cores; partial results are merged by their maxima and sums. Where the cuts lie depends on nothing but the
position, so a result does not change with batch mates or the number of threads; nor with the page size, where rows are
read as vectors (`cpu_rows`; fp16 and odd widths are not).
Traffic per item: its keys and values once, for all query heads of the KV head.

An item is a row of int64: sequence, KV head, first token, end token, the head's first item, the head's number of
items, the sequence's length.
"""

from __future__ import annotations

import numba
import numpy as np

from kvlab.ops.attention.cpu_math import exp_row, softcap_row
from kvlab.ops.attention.cpu_rows import add_values, in_vectors, key_products
from kvlab.ops.cpu_prefetch import prefetch
from kvlab.ops.linear.cpu import dot, tile_1x4
from kvlab.ops.numba_support import kernel
from kvlab.quant.rows import block_floats, zero_point

CHUNK = 128  # tokens of an item
LANES = 4  # tokens that are computed together
AHEAD = 4096  # bytes of a head's rows that are asked for ahead of their use


@kernel(parallel=True)
def decode_attention(query, pages, geometry, arrays, num_decodes, options, vectors, out) -> None:
    """Rows 0 .. num_decodes - 1 of out [T, Hq, Dv] = attention of query [T, Hq, D] over the pages.

    Args:
        pages, geometry: (codes, scales) and geometry of `PageViews`.
        arrays: (query_start_loc, seq_lens, block_table).
        options: (scale, window, softcap, chunk, is_bf16, scaled).
        vectors: (sinks, alibi), fp32 [Hq], empty for none.
    """
    _, seq_lens, table = arrays
    sinks, alibi = vectors
    share = query.shape[1] // geometry[6]
    items = make_items(seq_lens, num_decodes, geometry[6], options[1], options[3])
    partial = np.empty((items.shape[0], share, out.shape[2]), np.float32)
    stats = np.empty((items.shape[0], share, 2), np.float32)
    for i in numba.prange(items.shape[0]):
        b, h = items[i, 0], items[i, 1]
        q, slopes = query[b, h * share : (h + 1) * share], alibi[h * share : (h + 1) * share]
        attend_item(q, pages, geometry, table[b], items[i], options, slopes, partial[i], stats[i])
    out[:num_decodes] = 0
    i = 0
    while i < items.shape[0]:
        h = items[i, 1]
        merge_items(items[i], partial, stats, sinks[h * share : (h + 1) * share],
                    out[items[i, 0], h * share : (h + 1) * share])  # fmt: skip
        i += items[i, 5]


@kernel()
def make_items(seq_lens, num_decodes, kv_heads, window, chunk):
    """int64 [n, 7], the items of a head one after the other; none for a sequence of length 0."""
    count = 0
    for b in range(num_decodes):
        if seq_lens[b] > 0:
            count += kv_heads * _chunks(seq_lens[b], window, chunk)
    items = np.empty((count, 7), np.int64)
    i = 0
    for b in range(num_decodes):
        end = np.int64(seq_lens[b])
        if end <= 0:
            continue
        low, parts = _lowest(end, window, chunk), _chunks(end, window, chunk)
        for h in range(kv_heads):
            for part in range(parts):
                start = (low // CHUNK + part) * CHUNK
                items[i, 0], items[i, 1] = b, h
                items[i, 2], items[i, 3] = max(low, start), min(end, start + CHUNK)
                items[i, 4], items[i, 5], items[i, 6] = i - part, parts, end
                i += 1
    return items


@kernel()
def _lowest(seq_len, window, chunk):
    """The first position that the query at seq_len - 1 sees."""
    low = max(np.int64(0), np.int64(seq_len) - window) if window else np.int64(0)
    return max(low, (np.int64(seq_len) - 1) // chunk * chunk) if chunk else low


@kernel()
def _chunks(seq_len, window, chunk):
    return (np.int64(seq_len) - 1) // CHUNK - _lowest(seq_len, window, chunk) // CHUNK + 1


@kernel()
def attend_item(query, pages, geometry, table, item, options, slopes, acc, stats) -> None:
    """Unnormalised attention acc [share, Dv] of one item; stats [share, 2] = (largest score, sum of weights)."""
    codes, share = pages[0], query.shape[0]
    scratch = np.empty((share + 4, CHUNK), np.float32)
    weights = scratch[:share]
    rows = rows_of(geometry, 0, item[1], query.shape[1]), rows_of(geometry, 1, item[1], acc.shape[1])
    ahead = max(1, AHEAD // (geometry[0] * geometry[1] * codes.itemsize))
    for i in range(ahead):
        _ask(codes, table, item, geometry[0], rows, i)
    _key_pass(query, codes, rows, geometry[0], table, item, (options[4], ahead), weights)
    if options[5]:
        _gather_scales(pages, geometry, table, item, scratch[share:])
    for g in range(share):
        row = weights[g, : item[3] - item[2]]
        shift = _soften(query[g], row, scratch[share:], item, options, slopes[g : g + 1], stats[g])
        acc[g] = -shift
    _value_pass(weights, codes, rows, geometry[0], table, item, (options[4], ahead), acc)


@kernel()
def rows_of(geometry, which, head, width):
    """(first element, row stride, width) of a head's keys (which 0) or values (1) in a page."""
    stride = geometry[7] if which else geometry[1]
    return geometry[2 + which] + head * geometry[0] * stride, stride, np.int64(width)


@kernel()
def _ask(codes, table, item, block_size, rows, i) -> None:
    """Asks for the i-th of the pages that an item reads: those of its keys, then those of its values."""
    first, end = item[2] // block_size, (item[3] - 1) // block_size + 1
    start, stride, _ = rows[0] if first + i < end else rows[1]
    page = first + i if first + i < end else 2 * first + i - end
    if page < end:
        prefetch(codes, table[page], start, block_size * stride)


@kernel()
def _key_pass(query, codes, rows, block_size, table, item, flags, weights) -> None:
    """weights [share, tokens] = products of the queries with the item's keys, one page after the other."""
    start, stride, width = rows[0]
    is_bf16, ahead = flags
    first, wide = item[2], in_vectors(codes, is_bf16, width)
    bits = np.empty((0 if wide else min(CHUNK, block_size), width), np.uint32)
    while first < item[3]:
        page, offset, at = table[first // block_size], first % block_size, first - item[2]
        _ask(codes, table, item, block_size, rows, ahead + first // block_size - item[2] // block_size)
        n = min(block_size - offset, item[3] - first)
        place = (start + offset * stride, stride, width)
        if wide:
            key_products(query, codes, page, place, n, weights, at)
        else:
            floats = block_floats(codes, page, place, n, is_bf16, bits)
            for g in range(query.shape[0]):
                _products(query[g], floats, weights[g, at : at + n])
        first += n


@kernel()
def _value_pass(weights, codes, rows, block_size, table, item, flags, acc) -> None:
    """acc [share, Dv] += weights times the item's values, one page after the other."""
    start, stride, width = rows[1]
    is_bf16, ahead = flags
    first, wide = item[2], in_vectors(codes, is_bf16, width)
    bits = np.empty((0 if wide else min(CHUNK, block_size), width), np.uint32)
    before = (item[3] - 1) // block_size + 1  # the keys' pages come first
    while first < item[3]:
        page, offset, at = table[first // block_size], first % block_size, first - item[2]
        _ask(codes, table, item, block_size, rows, ahead + before + first // block_size - 2 * (item[2] // block_size))
        n = min(block_size - offset, item[3] - first)
        place = (start + offset * stride, stride, width)
        if wide:
            add_values(weights, at, codes, page, place, n, acc)
        else:
            floats = block_floats(codes, page, place, n, is_bf16, bits)
            for g in range(acc.shape[0]):
                _add_weighted(weights[g, at : at + n], floats, acc[g])
        first += n


@kernel()
def _products(query, rows, out) -> None:
    """out [n] = query [D] times each row of rows [n, >= D]."""
    whole = out.shape[0] // LANES * LANES
    for t in range(0, whole, LANES):
        out[t], out[t + 1], out[t + 2], out[t + 3] = tile_1x4(query, rows[t], rows[t + 1], rows[t + 2], rows[t + 3])
    for t in range(whole, out.shape[0]):
        out[t] = dot(query, rows[t])


@kernel()
def _soften(query, row, scales, item, options, slope, stats):
    """From products of a head to weights, in place: scales of the keys, soft-cap, slope, exponentials, scales of the
    values. Returns what every value has too much: a row is scale * (codes - zero), so the sum of weight * zero.

    Args:
        row: [tokens]. scales: as `_gather_scales` leaves them. slope: fp32 [1], empty for none.
        stats: fp32 [2], gets the largest score and the sum of the exponentials.
    """
    scale, _, softcap, _, _, scaled = options
    shift, total = np.float32(0), np.float32(0)
    for t in range(row.shape[0]):
        row[t] *= np.float32(scale)
    if scaled:
        for d in range(query.shape[0]):
            total += query[d] * np.float32(scale)
        for t in range(row.shape[0]):
            row[t] = (row[t] - scales[1, t] * total) * scales[0, t]
    if softcap > 0:
        softcap_row(row, np.float32(softcap))
    if slope.shape[0]:
        for t in range(row.shape[0]):
            row[t] += slope[0] * np.float32(item[2] + t - item[6] + 1)
    stats[0], stats[1] = exp_row(row)
    if scaled:
        for t in range(row.shape[0]):
            row[t] *= scales[2, t]
            shift += row[t] * scales[3, t]
    return shift


@kernel()
def _gather_scales(pages, geometry, table, item, out) -> None:
    """out [4, tokens] = the item's scales and zero points of keys, then of values."""
    codes, scales = pages
    block_size, first = geometry[0], item[2]
    while first < item[3]:
        page, offset, at = table[first // block_size], first % block_size, first - item[2]
        n = min(block_size - offset, item[3] - first)
        for which in range(2):
            place = geometry[4 + which] + item[1] * block_size + offset
            for t in range(n):
                out[2 * which, at + t] = scales[page, place + t]
                out[2 * which + 1, at + t] = zero_point(codes, scales, page, place + t)
        first += n


@kernel()
def _add_weighted(weights, rows, acc) -> None:
    """acc [Dv] += weights [n] times rows [n, >= Dv]."""
    whole = weights.shape[0] // LANES * LANES
    for t in range(0, whole, LANES):
        w0, w1, w2, w3 = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
        v0, v1, v2, v3 = rows[t], rows[t + 1], rows[t + 2], rows[t + 3]
        for d in range(acc.shape[0]):
            acc[d] += w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]
    for t in range(whole, weights.shape[0]):
        w0, v0 = weights[t], rows[t]
        for d in range(acc.shape[0]):
            acc[d] += w0 * v0[d]


@kernel()
def merge_items(item, partial, stats, sinks, out) -> None:
    """Normalised sum, out [share, Dv], of all items of a head, of which `item` is one."""
    first, end = item[4], item[4] + item[5]
    for g in range(out.shape[0]):
        row = out[g]
        largest = sinks[g] if sinks.shape[0] else stats[first, g, 0]
        for n in range(first, end):
            largest = max(largest, stats[n, g, 0])
        total = np.exp(sinks[g] - largest) if sinks.shape[0] else np.float32(0)
        row[:] = 0
        for n in range(first, end):
            factor = np.exp(stats[n, g, 0] - largest)
            total += factor * stats[n, g, 1]
            for d in range(row.shape[0]):
                row[d] += factor * partial[n, g, d]
        for d in range(row.shape[0]):
            row[d] /= total
