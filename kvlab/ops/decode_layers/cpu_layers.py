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
from kvlab.ops.linear.cpu import WEIGHT_ROWS, add_block, prepare
from kvlab.ops.mlp.cpu import silu_mul_block
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
    """What phases hand on: (stream, projected heads, attention, gate, up, partial sums, their stats, heads' counters)."""
    num_heads, kv_heads, head_dim, width = sizes
    rows, share = x.shape[0], num_heads // kv_heads
    heads = np.empty((rows, (num_heads + 2 * kv_heads) * head_dim), np.float32)
    seen = np.zeros((rows, num_heads, head_dim), np.float32)
    gate, up = np.empty((rows, width), np.float32), np.empty((rows, width), np.float32)
    partial, stats = np.empty((most, share, head_dim), np.float32), np.empty((most, share, 2), np.float32)
    return x, heads, seen, gate, up, partial, stats, np.zeros(rows * kv_heads, np.int64)


@kernel()
def _work(weights, reals, pages, sizes, step, items, buffers, team) -> None:
    """One thread's way through all phases."""
    x, heads, seen, gate, up, _, _, _ = buffers
    num_heads, _, head_dim, width = sizes
    hidden, mixed = x.shape[1], seen.reshape(x.shape[0], num_heads * head_dim)
    normed, none = np.empty_like(x), np.empty(0, np.float32)
    for i in range(weights.shape[0]):
        w, phase, total = weights[i], i * PHASES, heads.shape[1]
        norm, bias = vector(w[NORM], hidden), vector(w[QKV_BIAS], total if w[QKV_BIAS] else 0)
        _product(team, phase, (x, norm, reals[i, 0], normed), matrix(w[QKV], total, hidden), bias, heads, False)
        _attention(team, phase + 1, (w, reals[i], pages[i]), sizes, step, items, i, buffers)
        bias = vector(w[OUT_BIAS], hidden if w[OUT_BIAS] else 0)
        out = matrix(w[OUT], hidden, num_heads * head_dim)
        _product(team, phase + 2, (mixed, none, 0.0, normed), out, bias, x, True)
        norm, bias = vector(w[MLP_NORM], hidden), vector(w[GATE_UP_BIAS], 2 * width if w[GATE_UP_BIAS] else 0)
        both = matrix(w[GATE_UP], 2 * width, hidden)
        _gate_up(team, phase + 3, (x, norm, reals[i, 3], normed), both, bias, gate, up)
        bias = vector(w[DOWN_BIAS], hidden if w[DOWN_BIAS] else 0)
        down = matrix(w[DOWN], hidden, width)
        _product(team, phase + 4, (gate, none, 0.0, normed), down, bias, x, True)


@kernel()
def _product(team, phase, source, weight, bias, y, add) -> None:
    """y = source @ weight.T + bias, or y += that; the source is normed first where a norm is given."""
    x, norm, eps, normed = source
    count = (weight.shape[0] + WEIGHT_ROWS - 1) // WEIGHT_ROWS
    done = 0
    item, turn = claim(team, phase, count, 0)
    rows = x
    if item >= 0 and norm.shape[0]:
        for t in range(x.shape[0]):
            norm_row(x[t], norm, eps, normed[t])
        rows = normed
    packed = prepare(rows if item >= 0 else rows[:0])
    while item >= 0:
        first = item * WEIGHT_ROWS
        _start(y, bias, first, min(weight.shape[0], first + WEIGHT_ROWS), add)
        add_block(rows, packed, weight, first, y)
        done += 1
        item, turn = claim(team, phase, count, turn)
    finish(team, phase, done, count)


@kernel()
def _start(y, bias, first, last, add) -> None:
    """Columns first .. last - 1 of y before a product is added: the bias, or what is there plus the bias."""
    for t in range(y.shape[0]):
        for n in range(first, last):
            value = bias[n] if bias.shape[0] else np.float32(0)
            y[t, n] = y[t, n] + value if add else value


@kernel()
def _gate_up(team, phase, source, weight, bias, gate, up) -> None:
    """gate = silu(gate part) * up part of the normed source; an item is the same rows of both halves."""
    x, norm, eps, normed = source
    width = gate.shape[1]
    count = (width + WEIGHT_ROWS - 1) // WEIGHT_ROWS
    w_gate, w_up = weight[:width], weight[width:]
    gate_bias = bias[:width] if bias.shape[0] else bias
    up_bias = bias[width:] if bias.shape[0] else bias
    done = 0
    item, turn = claim(team, phase, count, 0)
    if item >= 0:
        for t in range(x.shape[0]):
            norm_row(x[t], norm, eps, normed[t])
    packed = prepare(normed if item >= 0 else normed[:0])
    while item >= 0:
        first = item * WEIGHT_ROWS
        last = min(width, first + WEIGHT_ROWS)
        _start(gate, gate_bias, first, last, False)
        _start(up, up_bias, first, last, False)
        add_block(normed, packed, w_gate, first, gate)
        add_block(normed, packed, w_up, first, up)
        silu_mul_block(gate, up, first)
        done += 1
        item, turn = claim(team, phase, count, turn)
    finish(team, phase, done, count)


@kernel()
def _attention(team, phase, layer, sizes, step, items, index, buffers) -> None:
    """Rotates, stores and attends; the thread that ends a head's last item merges them."""
    w, reals, place = layer
    num_heads, kv_heads, head_dim, _ = sizes
    cos, sin, seq_lens, _, kinds, kind_of = step
    _, heads, seen, _, _, partial, stats, ended = buffers
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
