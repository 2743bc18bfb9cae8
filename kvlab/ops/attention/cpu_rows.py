"""The inner loops of decode attention: rows of a page against the query heads that share them, in vector registers.

A row is read and turned into fp32 once for up to three heads. Twelve sums stay in registers: of keys, four rows by three
heads; of values, three heads by four vectors of the row. A row's product has the same bits wherever the row lies in its
page, and values are added token by token, so results do not depend on the page size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from kvlab.ops.numba_support import kernel
from kvlab.quant.numba_flags import FASTMATH
from kvlab.quant.rows_lanes import LANES, VECTOR, lanes

HEADS, ROWS, VECTORS = 3, 4, 4  # of a tile; HEADS * ROWS and HEADS * VECTORS sums leave registers for what is read
_FLOAT, _INT, _SMALL, _BYTE = ir.FloatType(), ir.IntType(64), ir.IntType(32), ir.IntType(8)


def in_vectors(codes, is_bf16, width):  # type: ignore[no-untyped-def]
    """Whether rows of `width` values of these codes can be read here: whole vectors, and not of fp16."""
    raise NotImplementedError("compiled code only")


@overload(in_vectors, jit_options={"fastmath": FASTMATH})
def _in_vectors(codes, is_bf16, width):  # type: ignore[no-untyped-def]
    if codes.dtype == numba.uint32:  # two values to a byte, each half of the row in whole vectors
        return lambda codes, is_bf16, width: width % (2 * LANES) == 0
    if codes.dtype == numba.uint16:
        return lambda codes, is_bf16, width: width % LANES == 0 and is_bf16
    return lambda codes, is_bf16, width: width % LANES == 0


@kernel()
def key_products(query, codes, page, place, n, weights, first) -> None:
    """weights[:, first : first + n] = products of query [share, D] with `n` rows of a page.

    Args:
        codes: [num_pages, elements of a page]. place: (first element, row stride, width D).
        weights: fp32 [share, at least first + n].
    """
    share, whole = query.shape[0], n // ROWS * ROWS
    g = 0
    while g < share:
        for t in range(0, whole, ROWS):
            if share - g >= 3:
                _keys_3x4(query, g, codes, page, place, t, weights, first)
            elif share - g == 2:
                _keys_2x4(query, g, codes, page, place, t, weights, first)
            else:
                _keys_1x4(query, g, codes, page, place, t, weights, first)
        for t in range(whole, n):
            for one in range(g, min(g + HEADS, share)):
                _keys_1x1(query, one, codes, page, place, t, weights, first)
        g += HEADS


@kernel()
def add_values(weights, first, codes, page, place, n, acc) -> None:
    """acc [share, Dv] += weights[:, first : first + n] times `n` rows of a page; arguments as of `key_products`."""
    share, whole = acc.shape[0], place[2] // (VECTORS * LANES) * (VECTORS * LANES)
    g = 0
    while g < share:
        for d in range(0, whole, VECTORS * LANES):
            if share - g >= 3:
                _values_3x4(weights, g, first, codes, page, place, n, d, acc)
            elif share - g == 2:
                _values_2x4(weights, g, first, codes, page, place, n, d, acc)
            else:
                _values_1x4(weights, g, first, codes, page, place, n, d, acc)
        for d in range(whole, place[2], LANES):
            for one in range(g, min(g + HEADS, share)):
                _values_1x1(weights, one, first, codes, page, place, n, d, acc)
        g += HEADS


def _key_tile(heads: int, rows: int) -> Any:
    """An intrinsic: the products of `heads` queries from g on with `rows` rows of a page from row t on."""

    @intrinsic
    def tile(typingctx, query, g, codes, page, place, t, weights, first):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            kinds = dict(zip(("query", "codes", "weights"), (query, codes, weights), strict=True))
            values = dict(zip(("query", "codes", "weights"), (args[0], args[2], args[6]), strict=True))
            own = [_address(context, builder, kinds["query"], values["query"], builder.add(args[1], _INT(g)))
                   for g in range(heads)]  # fmt: skip
            read, width = _rows(context, builder, codes, args[2], args[3], args[4])
            places = [builder.add(args[5], _INT(r)) for r in range(rows)]

            def step(d: Any, sums: list[Any]) -> list[Any]:
                columns = [_load(builder, q, d) for q in own]
                found = []
                for r, place in enumerate(places):
                    row = read(place, d)
                    found += [_add_product(builder, sums[r * heads + g], row, columns[g]) for g in range(heads)]
                return found

            sums = _loop(builder, _INT(LANES), width, [VECTOR([0.0] * LANES)] * (heads * rows), step)
            column = builder.add(args[7], args[5])
            for g in range(heads):
                out = _address(context, builder, weights, args[6], builder.add(args[1], _INT(g)))
                totals = _totals(builder, [sums[r * heads + g] for r in range(rows)])
                for r in range(rows):
                    place = builder.gep(builder.bitcast(out, _FLOAT.as_pointer()), [builder.add(column, _INT(r))])
                    builder.store(builder.extract_element(totals, _SMALL(r)), place)
            return context.get_dummy_value()

        return types.void(query, types.int64, codes, types.int64, place, types.int64, weights, types.int64), codegen

    return tile


def _value_tile(heads: int, vectors: int) -> Any:
    """An intrinsic: adds `n` weighted rows of a page to `vectors` vectors, from d on, of `heads` heads from g on."""

    @intrinsic
    def tile(typingctx, weights, g, first, codes, page, place, n, d, acc):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            heads_of = [builder.add(args[1], _INT(g)) for g in range(heads)]
            own = [builder.gep(builder.bitcast(_address(context, builder, weights, args[0], h), _FLOAT.as_pointer()),
                               [args[2]]) for h in heads_of]  # fmt: skip
            read, _ = _rows(context, builder, codes, args[3], args[4], args[5])
            columns = [builder.add(args[7], _INT(v * LANES)) for v in range(vectors)]
            places = [
                _vector_at(builder, _address(context, builder, acc, args[8], h), c) for h in heads_of for c in columns
            ]

            def step(t: Any, sums: list[Any]) -> list[Any]:
                spread = [_spread(builder, builder.load(builder.gep(w, [t]))) for w in own]
                rows = [read(t, c) for c in columns]
                return [
                    _add_product(builder, sums[g * vectors + v], rows[v], spread[g])
                    for g in range(heads)
                    for v in range(vectors)
                ]

            sums = _loop(builder, _INT(1), args[6], [builder.load(p, align=4) for p in places], step)
            for p, total in zip(places, sums, strict=True):
                builder.store(total, p, align=4)
            return context.get_dummy_value()

        signature = types.void(
            weights, types.int64, types.int64, codes, types.int64, place, types.int64, types.int64, acc
        )
        return signature, codegen

    return tile


def _rows(context: Any, builder: Any, kind: Any, codes: Any, page: Any, place: Any) -> tuple[Callable[..., Any], Any]:
    """(a function (row, d) -> the row's eight values from d on, the width of a row)."""
    start, stride, width = cgutils.unpack_tuple(builder, place)
    item = kind.dtype.bitwidth // 8
    base = builder.gep(_address(context, builder, kind, codes, page), [builder.mul(start, _INT(item))])
    step = builder.mul(stride, _INT(item))

    def read(row: Any, d: Any) -> Any:
        return lanes(builder, kind.dtype, builder.gep(base, [builder.mul(row, step)]), d, width)

    return read, width


def _address(context: Any, builder: Any, kind: Any, array: Any, row: Any) -> Any:
    """The address of array[row], as bytes; what follows the first axis has no gaps."""
    struct = context.make_array(kind)(context, builder, array)
    stride = cgutils.unpack_tuple(builder, struct.strides)[0]
    return builder.gep(builder.bitcast(struct.data, _BYTE.as_pointer()), [builder.mul(row, stride)])


def _vector_at(builder: Any, address: Any, d: Any) -> Any:
    """Where eight fp32 from d on lie in the row at `address`."""
    return builder.bitcast(builder.gep(builder.bitcast(address, _FLOAT.as_pointer()), [d]), VECTOR.as_pointer())


def _load(builder: Any, address: Any, d: Any) -> Any:
    return builder.load(_vector_at(builder, address, d), align=4)


def _add_product(builder: Any, total: Any, a: Any, b: Any) -> Any:
    return builder.fadd(total, builder.fmul(a, b, flags=("contract",)), flags=("contract",))


def _spread(builder: Any, value: Any) -> Any:
    """A vector that holds `value` in every lane."""
    empty = ir.Constant(VECTOR, ir.Undefined)
    return _shuffle(builder, builder.insert_element(empty, value, _SMALL(0)), empty, [0] * LANES)


def _shuffle(builder: Any, a: Any, b: Any, places: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_SMALL, len(places)), places))


def _totals(builder: Any, sums: list[Any]) -> Any:
    """A vector whose lane r is the sum of the lanes of sums[r]; of one vector or of four, in the same order.

    The flag keeps Numba from adding its own, which would let LLVM choose another order for each.
    """
    a, b, c, d = sums if len(sums) == 4 else sums * 4

    def folded(x: Any, y: Any, places: tuple[list[int], list[int]]) -> Any:
        return builder.fadd(*(_shuffle(builder, x, y, p) for p in places), flags=("contract",))

    pairs = [0, 2, 8, 10, 4, 6, 12, 14], [1, 3, 9, 11, 5, 7, 13, 15]
    both = folded(folded(a, b, pairs), folded(c, d, pairs), pairs)
    return folded(both, both, ([0, 1, 2, 3], [4, 5, 6, 7]))


def _loop(builder: Any, step: Any, stop: Any, start: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> Any:
    """Emits `for i in range(0, stop, step): values = body(i, values)` for a stop of at least 1; returns the values."""
    before, loop, done = builder.block, builder.append_basic_block("rows"), builder.append_basic_block("rows.done")
    builder.branch(loop)
    builder.position_at_end(loop)
    i, values = builder.phi(_INT), [builder.phi(VECTOR) for _ in start]
    found = body(i, values)
    following = builder.add(i, step)
    for phi, first, new in zip([i, *values], [_INT(0), *start], [following, *found], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(new, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, stop), loop, done)
    builder.position_at_end(done)
    return found


_keys_3x4, _keys_2x4, _keys_1x4, _keys_1x1 = (_key_tile(*size) for size in ((3, 4), (2, 4), (1, 4), (1, 1)))
_values_3x4, _values_2x4, _values_1x4, _values_1x1 = (_value_tile(*size) for size in ((3, 4), (2, 4), (1, 4), (1, 1)))
