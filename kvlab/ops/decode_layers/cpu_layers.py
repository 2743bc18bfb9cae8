"""The kernel of decode_layers: five phases a layer, whose items all threads of the launch share.

1 norm and projection to queries, keys and values; 2 rotation, the new entries, attention; 3 projection out, added;
4 norm, gate and up; 5 down, added. Sums are those of the single operations, so the result has the same bits.
Traffic of a step: every weight once, every live cache entry once.
"""

from __future__ import annotations

import numba
import numpy as np

from kvlab.ops.attention.cpu_decode import attend_item, make_items, merge_items
from kvlab.ops.cpu_team import claim, count_up, finish, integers, matrix, new_phases, table_at, vector
from kvlab.ops.linear.cpu import WEIGHT_ROWS, add_block
from kvlab.ops.linear.cpu_tile import pack, packing
from kvlab.ops.mlp.cpu import gate_block
from kvlab.ops.norm.cpu import norm_row
from kvlab.ops.numba_support import kernel
from kvlab.ops.rope.cpu import rotate_row

# columns of the table of weights
NORM, QKV, QKV_BIAS, Q_NORM, K_NORM, OUT, OUT_BIAS = range(7)
MLP_NORM, GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS = range(7, 12)
PHASES = 5


@kernel(parallel=True)
def run(weights, reals, pages, sizes, step, x, threads) -> None:
    """x [T, H] = the residual stream after the layers.

    Args:
        weights, reals, sizes: of `kvlab.ops.decode_layers.cpu`.
        pages: int64 [L, 11], address, number of pages, values of a page, geometry.
        step: (cos, sin, seq_lens, num_decodes, kinds, kind_of).
        threads: of the launch; asking Numba for it here would keep the kernel out of the cache on disk.
    """
    items, bounds, most = _all_items(step[2], step[3], sizes[1], step[4])
    buffers = _buffers(x, sizes, most)
    phases = new_phases(PHASES * weights.shape[0], threads)
    for me in numba.prange(threads):
        _work(weights, reals, pages, sizes, step, (items, bounds), buffers, (phases, me, threads))


@kernel()
def _all_items(seq_lens, decodes, kv_heads, kinds):
    """(attention's items of every kind, where each kind's begin and end, the most of one kind)."""
    bounds = np.zeros(kinds.shape[0] + 1, np.int64)
    items = make_items(seq_lens, decodes, kv_heads, kinds[0, 3], 0)
    bounds[1] = most = items.shape[0]
    for k in range(1, kinds.shape[0]):
        more = make_items(seq_lens, decodes, kv_heads, kinds[k, 3], 0)
        items, most = np.concatenate((items, more)), max(most, more.shape[0])
        bounds[k + 1] = items.shape[0]
    return items, bounds, most


@kernel()
def _buffers(x, sizes, most):
    """What phases hand on: (stream, projected heads, attention, packed rows between gate and down, partial sums, their
    stats, heads' counters).
    """
    num_heads, kv_heads, head_dim, width = sizes
    rows, share = x.shape[0], num_heads // kv_heads
    heads = np.empty((rows, (num_heads + 2 * kv_heads) * head_dim), np.float32)
    seen = np.zeros((rows, num_heads, head_dim), np.float32)
    groups, lanes = packing(rows)
    gate = np.empty((groups, width * lanes), np.float32)
    partial, stats = np.empty((most, share, head_dim), np.float32), np.empty((most, share, 2), np.float32)
    return x, heads, seen, gate, partial, stats, np.zeros(rows * kv_heads, np.int64)


@kernel()
def _work(weights, reals, pages, sizes, step, items, buffers, team) -> None:
    """One thread's way through all phases."""
    x, heads, seen, gate, _, _, _ = buffers
    num_heads, _, head_dim, width = sizes
    hidden, mixed = x.shape[1], seen.reshape(x.shape[0], num_heads * head_dim)
    none = np.empty((0, 0), np.float32)
    for i in range(weights.shape[0]):
        w, phase, total = weights[i], i * PHASES, heads.shape[1]
        norm, bias = vector(w[NORM], hidden), vector(w[QKV_BIAS], total if w[QKV_BIAS] else 0)
        _product(team, phase, (x, norm, reals[i, 0]), matrix(w[QKV], total, hidden), bias, heads)
        _attention(team, phase + 1, (w, reals[i], pages[i]), sizes, step, items, i, buffers)
        bias = vector(w[OUT_BIAS], hidden if w[OUT_BIAS] else 0)
        out = matrix(w[OUT], hidden, num_heads * head_dim)
        _add_product(team, phase + 2, (none, mixed), out, bias, x)
        norm, bias = vector(w[MLP_NORM], hidden), vector(w[GATE_UP_BIAS], 2 * width if w[GATE_UP_BIAS] else 0)
        both = matrix(w[GATE_UP], 2 * width, hidden)
        _gate_up(team, phase + 3, (x, norm, reals[i, 3]), both, bias, gate)
        bias = vector(w[DOWN_BIAS], hidden if w[DOWN_BIAS] else 0)
        down = matrix(w[DOWN], hidden, width)
        _add_product(team, phase + 4, (gate, none), down, bias, x)


@kernel()
def _packed(source, wanted):
    """The normed rows of a product packed; nothing for a thread that has no item."""
    x, norm, eps = source
    rows = x if wanted else x[:0]
    normed = np.empty_like(rows)
    for t in range(rows.shape[0]):
        norm_row(rows[t], norm, eps, normed[t])
    return pack(normed)


@kernel()
def _product(team, phase, source, weight, bias, y) -> None:
    """y = source @ weight.T + bias."""
    count = (weight.shape[0] + WEIGHT_ROWS - 1) // WEIGHT_ROWS
    done = 0
    item, turn = claim(team, phase, count, 0)
    packed = _packed(source, item >= 0)
    while item >= 0:
        first = item * WEIGHT_ROWS
        for t in range(y.shape[0]):
            for n in range(first, min(weight.shape[0], first + WEIGHT_ROWS)):
                y[t, n] = bias[n] if bias.shape[0] else np.float32(0)
        add_block(packed, weight, first, y)
        done += 1
        item, turn = claim(team, phase, count, turn)
    finish(team, phase, done, count)


@kernel()
def _add_product(team, phase, source, weight, bias, y) -> None:
    """y += source @ weight.T + bias; a source without rows (the second value) is packed already."""
    packed, rows = source
    count = (weight.shape[0] + WEIGHT_ROWS - 1) // WEIGHT_ROWS
    done = 0
    item, turn = claim(team, phase, count, 0)
    if rows.shape[0] and item >= 0:
        packed = pack(rows)
    while item >= 0:
        first = item * WEIGHT_ROWS
        if bias.shape[0]:
            for t in range(y.shape[0]):
                for n in range(first, min(weight.shape[0], first + WEIGHT_ROWS)):
                    y[t, n] += bias[n]
        add_block(packed, weight, first, y)
        done += 1
        item, turn = claim(team, phase, count, turn)
    finish(team, phase, done, count)


@kernel()
def _gate_up(team, phase, source, weight, bias, gate) -> None:
    """gate = silu(gate part) * up part of the normed source, packed; an item is the same rows of both halves."""
    count = (weight.shape[0] // 2 + WEIGHT_ROWS - 1) // WEIGHT_ROWS
    done = 0
    item, turn = claim(team, phase, count, 0)
    packed = _packed(source, item >= 0)
    while item >= 0:
        gate_block(packed, weight, bias, item * WEIGHT_ROWS, gate)
        done += 1
        item, turn = claim(team, phase, count, turn)
    finish(team, phase, done, count)


@kernel()
def _attention(team, phase, layer, sizes, step, items, index, buffers) -> None:
    """Rotates, stores and attends; the thread that ends a head's last item merges them."""
    w, reals, place = layer
    num_heads, kv_heads, head_dim, _ = sizes
    cos, sin, seq_lens, _, kinds, kind_of = step
    _, heads, seen, _, partial, stats, ended = buffers
    rows, share, kind = heads.shape[0], num_heads // kv_heads, kind_of[index]
    own = items[0][items[1][kind] : items[1][kind + 1]]
    table, slots = table_at(kinds[kind, 0], rows, kinds[kind, 2]), integers(kinds[kind, 1], rows)
    codes, geometry = matrix(place[0], place[1], place[2]), place[3:]
    q_norm = vector(w[Q_NORM], head_dim if w[Q_NORM] else 0)
    k_norm = vector(w[K_NORM], head_dim if w[K_NORM] else 0)
    none, query = np.empty(0, np.float32), np.empty((share, head_dim), np.float32)
    options = (reals[1], kinds[kind, 3], reals[2], 0, False, False)
    done = 0
    item, turn = claim(team, phase, own.shape[0], 0)
    while item >= 0:
        b, h = own[item, 0], own[item, 1]
        for g in range(share):
            first = (h * share + g) * head_dim
            _turned(heads[b, first : first + head_dim], q_norm, reals[0], cos[b], sin[b], query[g])
        if own[item, 3] == seq_lens[b] and slots[b] >= 0:
            _store(heads[b], (num_heads, kv_heads, h), k_norm, reals[0], (cos[b], sin[b]), codes, geometry, slots[b])
        attend_item(query, (codes, codes), geometry, table[b], own[item], options, none, partial[item], stats[item])
        if count_up(ended, b * kv_heads + h) == own[item, 5] - 1:
            ended[b * kv_heads + h] = 0
            merge_items(own[item], partial, stats, none, seen[b, h * share : (h + 1) * share])
        done += 1
        item, turn = claim(team, phase, own.shape[0], turn)
    finish(team, phase, done, own.shape[0])


@kernel()
def _turned(row, norm, eps, cos, sin, out) -> None:
    """out [D] = a head, normed where there is a norm, rotated."""
    for d in range(row.shape[0]):
        out[d] = row[d]
    if norm.shape[0]:
        norm_row(out, norm, eps, out)
    rotate_row(out, cos, sin)


@kernel()
def _store(row, head, k_norm, eps, angles, codes, geometry, slot) -> None:
    """Writes the new key and value of one KV head to their slot."""
    num_heads, kv_heads, h = head
    cos, sin = angles
    head_dim = row.shape[0] // (num_heads + 2 * kv_heads)
    page, place = slot // geometry[0], h * geometry[0] + slot % geometry[0]
    first, start = (num_heads + h) * head_dim, geometry[2] + place * geometry[1]
    _turned(row[first : first + head_dim], k_norm, eps, cos, sin, codes[page, start : start + head_dim])
    first, start = (num_heads + kv_heads + h) * head_dim, geometry[3] + place * geometry[7]
    for d in range(head_dim):
        codes[page, start + d] = row[first + d]
