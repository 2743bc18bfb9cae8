"""Attention of one query token per sequence, reading pages in place.

Work is cut at fixed positions (every CHUNK tokens of a sequence), one item per sequence, KV head and chunk, spread
over the cores; partial results are merged by their maxima and sums. Where the cuts lie depends on nothing but the
position, so a result does not change with batch mates or the number of threads.
Traffic per item: its keys and values once, for all query heads of the KV head.

An item is a row of int64: sequence, KV head, first token, end token, the head's first item, the head's number of
items, the sequence's length.
"""

from __future__ import annotations

import numba
import numpy as np

from kvlab.ops.attention.cpu_math import exp_row, softcap_row
from kvlab.ops.cpu_prefetch import prefetch
from kvlab.ops.linear.cpu import dot, tile_1x4
from kvlab.ops.numba_support import kernel
from kvlab.quant.rows import block_floats, zero_point

CHUNK = 128  # tokens of an item
LANES = 4  # tokens that are computed together


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
    codes = pages[0]
    weights = np.empty((query.shape[0], CHUNK), np.float32)
    bits = np.empty((min(CHUNK, geometry[0]), max(query.shape[1], acc.shape[1])), np.uint32)
    _key_pass(query, codes, geometry, table, item, options[4], bits, weights)
    shifts = np.zeros(query.shape[0], np.float32)
    _soften(query, item, pages, geometry, table, options, slopes, weights, shifts, stats)
    for g in range(acc.shape[0]):
        acc[g] = -shifts[g]
    block_size, first, share = geometry[0], item[2], acc.shape[0]
    head, ahead = geometry[3] + item[1] * block_size * geometry[7], cdiv(block_size * geometry[7], share)
    while first < item[3]:
        offset = first % block_size
        n = min(block_size - offset, item[3] - first)
        place = (head + offset * geometry[7], geometry[7], acc.shape[1])
        rows = block_floats(codes, table[first // block_size], place, n, options[4], bits)
        for g in range(share):
            _add_weighted(weights[g, first - item[2] : first - item[2] + n], rows, acc[g])
            if first + n < item[3]:
                prefetch(codes, table[(first + n) // block_size], head + g * ahead, ahead)
        first += n


@kernel()
def _key_pass(query, codes, geometry, table, item, is_bf16, bits, weights) -> None:
    """weights [share, tokens] = products of the queries with the item's keys, one page after the other."""
    block_size, first, share = geometry[0], item[2], query.shape[0]
    head, ahead = geometry[2] + item[1] * block_size * geometry[1], cdiv(block_size * geometry[1], share)
    while first < item[3]:
        offset = first % block_size
        n = min(block_size - offset, item[3] - first)
        place = (head + offset * geometry[1], geometry[1], query.shape[1])
        rows = block_floats(codes, table[first // block_size], place, n, is_bf16, bits)
        for g in range(share):
            _products(query[g], rows, weights[g, first - item[2] : first - item[2] + n])
            if first + n < item[3]:
                prefetch(codes, table[(first + n) // block_size], head + g * ahead, ahead)
            else:  # values come next
                prefetch(codes, table[item[2] // block_size], geometry[3] + item[1] * block_size * geometry[7], ahead)
        first += n


@kernel()
def cdiv(a, b):
    """a / b, rounded up."""
    return (a + b - 1) // b


@kernel()
def _products(query, rows, out) -> None:
    """out [n] = query [D] times each row of rows [n, >= D]."""
    whole = out.shape[0] // LANES * LANES
    for t in range(0, whole, LANES):
        out[t], out[t + 1], out[t + 2], out[t + 3] = tile_1x4(query, rows[t], rows[t + 1], rows[t + 2], rows[t + 3])
    for t in range(whole, out.shape[0]):
        out[t] = dot(query, rows[t])


@kernel()
def _soften(query, item, pages, geometry, table, options, slopes, weights, shifts, stats) -> None:
    """From products to weights, in place: scales of the keys, soft-cap, slopes, exponentials, scales of the values.

    A row is scale * (codes - zero): products lose zero * sum(query), and shifts [share] gets what every value has too
    much, the sum of weight * zero.
    """
    scale, _, softcap, _, _, scaled = options
    codes, scales = pages
    block_size, tokens = geometry[0], item[3] - item[2]
    for g in range(weights.shape[0]):
        row = weights[g, :tokens]
        for t in range(tokens):
            row[t] *= np.float32(scale)
        if scaled:
            total = np.float32(0)
            for d in range(query.shape[1]):
                total += query[g, d]
            total *= np.float32(scale)
            for t in range(tokens):
                position = item[2] + t
                page, place = table[position // block_size], geometry[4] + item[1] * block_size + position % block_size
                row[t] = (row[t] - zero_point(codes, scales, page, place) * total) * scales[page, place]
        if softcap > 0:
            softcap_row(row, np.float32(softcap))
        if slopes.shape[0]:
            for t in range(tokens):
                row[t] += slopes[g] * np.float32(item[2] + t - item[6] + 1)
        stats[g, 0], stats[g, 1] = exp_row(row)
        if scaled:
            for t in range(tokens):
                position = item[2] + t
                page, place = table[position // block_size], geometry[5] + item[1] * block_size + position % block_size
                row[t] *= scales[page, place]
                shifts[g] += row[t] * zero_point(codes, scales, page, place)


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
