"""The inner loop of products on the CPU: sums of a tile kept in registers while the weights pass once.

Rows are packed side by side, as many as fill one, two or three vectors; a weight is read once, spread over a vector and
multiplied with all rows. Twelve sums stay in registers: enough to keep two multiply-add units busy, few enough for
the sixteen registers of AVX2. Each row's sum runs over k in order, whatever the other rows are, so that its bits do not
depend on them. (One row alone, and columns beyond a multiple of SUMS, are dot products in `cpu.py` instead.)
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvlab.ops.numba_support import kernel

LANES = 8  # fp32 of a vector; LLVM splits it where the machine's are shorter
SUMS = 12  # vectors of sums of a tile
MAX_VECTORS = 3  # vectors of rows of a tile
_FLOAT, _INT, _SMALL = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)


def _tile(vectors: int) -> Any:
    """An intrinsic (packed, weight, first, out): out [SUMS * LANES] = sums, [weight row][vector][lane].

    It multiplies SUMS / vectors rows of `weight` from `first` on with `packed` [K * vectors * LANES], and asks for the
    rows of the next tile ahead of their use.
    """
    rows = SUMS // vectors

    @intrinsic
    def tile(typingctx, packed, weight, first, out):  # type: ignore[no-untyped-def]
        if not packed.layout == weight.layout == out.layout == "C":
            raise numba.TypingError("a tile needs contiguous arrays")

        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            x = context.make_array(packed)(context, builder, args[0]).data
            w = context.make_array(weight)(context, builder, args[1])
            depth = cgutils.unpack_tuple(builder, w.shape)[1]
            start = builder.gep(w.data, [builder.mul(args[2], depth)])
            sums = _loop(builder, (x, start, depth), vectors, rows)
            place = context.make_array(out)(context, builder, args[3]).data
            place = builder.bitcast(place, _VECTOR.as_pointer())
            for i, total in enumerate(sums):
                builder.store(total, builder.gep(place, [_INT(i)]), align=4)
            return context.get_dummy_value()

        return types.void(packed, weight, types.int64, out), codegen

    return tile


def _loop(builder: Any, source: tuple[Any, Any, Any], vectors: int, rows: int) -> list[Any]:
    """Emits the loop over k; returns the vectors of sums."""
    x, start, depth = source
    weights = [builder.gep(start, [builder.mul(depth, _INT(r))]) for r in range(rows)]
    ahead = builder.gep(start, [builder.mul(depth, _INT(rows))])
    before, loop, done = builder.block, builder.append_basic_block("tile"), builder.append_basic_block("tile.done")
    builder.branch(loop)
    builder.position_at_end(loop)
    k, sums = builder.phi(_INT), [builder.phi(_VECTOR) for _ in range(SUMS)]
    place = builder.bitcast(builder.gep(x, [builder.mul(k, _INT(vectors * LANES))]), _VECTOR.as_pointer())
    own = [builder.load(builder.gep(place, [_INT(v)]), align=4) for v in range(vectors)]
    more = []
    for r in range(rows):
        weight = _spread(builder, builder.load(builder.gep(weights[r], [k])))
        for v in range(vectors):
            product = builder.fmul(own[v], weight, flags=("contract",))
            more.append(builder.fadd(sums[r * vectors + v], product, flags=("contract",)))
    _ask(builder, builder.gep(ahead, [builder.mul(k, _INT(rows))]))
    following = builder.add(k, _INT(1))
    for phi, first, new in [(k, _INT(0), following)] + [
        (s, _VECTOR([0.0] * LANES), m) for s, m in zip(sums, more, strict=True)
    ]:
        phi.add_incoming(first, before)
        phi.add_incoming(new, loop)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, done)
    builder.position_at_end(done)
    return more


def _spread(builder: Any, value: Any) -> Any:
    """A vector that holds `value` in every lane."""
    empty = ir.Constant(_VECTOR, ir.Undefined)
    one = builder.insert_element(empty, value, _SMALL(0))
    return builder.shuffle_vector(one, empty, ir.Constant(ir.VectorType(_SMALL, LANES), [0] * LANES))


def _ask(builder: Any, address: Any) -> None:
    """Asks for the line at `address` in the second-level cache; an address outside the array does no harm."""
    place = builder.bitcast(address, ir.IntType(8).as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [place.type, _SMALL, _SMALL, _SMALL])
    function = builder.module.declare_intrinsic("llvm.prefetch", (place.type,), kind)
    builder.call(function, [place, _SMALL(0), _SMALL(2), _SMALL(1)])  # for reading, second level, data


_tile_1, _tile_2, _tile_3 = (_tile(vectors) for vectors in range(1, MAX_VECTORS + 1))


@kernel()
def packing(rows: int) -> tuple[int, int]:
    """(groups, lanes of a group) that `rows` rows are packed in: even shares; one row alone is one lane."""
    if rows == 1:
        return 1, 1
    most = MAX_VECTORS * LANES
    groups = max(1, (rows + most - 1) // most)
    share = (rows + groups - 1) // groups
    lanes = max(1, (share + LANES - 1) // LANES) * LANES
    return (rows + lanes - 1) // lanes, lanes


@kernel()
def pack(x: np.ndarray) -> np.ndarray:
    """The rows of x [T, K] side by side: fp32 [groups, K * lanes], zeros where a group's last lanes have no row."""
    rows, depth = x.shape
    groups, width = packing(rows)
    packed = np.empty((groups, depth * width), np.float32)
    for i in range(groups):
        own = packed[i]
        for lane in range(width):
            t = i * width + lane
            for k in range(depth):
                own[k * width + lane] = x[t, k] if t < rows else np.float32(0)
    return packed


@kernel()
def add_tiles(packed: np.ndarray, weight: np.ndarray, first: int, y: np.ndarray) -> None:
    """Adds the products of all packed rows with SUMS rows of `weight` from `first` on to those columns of y [T, N]."""
    lanes = packed.shape[1] // weight.shape[1]
    rows = SUMS * LANES // lanes
    flat = np.empty(SUMS * LANES, np.float32)
    sums = flat.reshape(rows, lanes)
    for i in range(packed.shape[0]):
        own = y[i * lanes : (i + 1) * lanes]
        for n in range(first, first + SUMS, rows):
            _put_tile(packed[i], weight, n, flat)
            for t in range(own.shape[0]):
                for r in range(rows):
                    own[t, n + r] += sums[r, t]


@kernel()
def put_tiles(packed: np.ndarray, weight: np.ndarray, first: int, out: np.ndarray) -> None:
    """The same products as packed rows: to columns `first` to `first` + SUMS - 1 of out [groups, N * lanes]."""
    lanes = packed.shape[1] // weight.shape[1]
    rows = SUMS * LANES // lanes
    for i in range(packed.shape[0]):
        for n in range(first, first + SUMS, rows):
            _put_tile(packed[i], weight, n, out[i, n * lanes : (n + rows) * lanes])


@kernel()
def _put_tile(packed: np.ndarray, weight: np.ndarray, first: int, out: np.ndarray) -> None:
    vectors = packed.shape[0] // (weight.shape[1] * LANES)
    if vectors == 1:
        _tile_1(packed, weight, first, out)
    elif vectors == 2:
        _tile_2(packed, weight, first, out)
    else:
        _tile_3(packed, weight, first, out)
