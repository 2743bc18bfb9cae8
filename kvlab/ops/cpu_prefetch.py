"""Asking for memory ahead of its use, for CPU kernels that jump from page to page: the hardware follows lines only."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvlab.ops.numba_support import kernel

_LINE_BYTES = 64


@kernel()
def prefetch(array, row, start, count) -> None:
    """Asks for array[row, start : start + count], a contiguous array of any type; what lies outside is left out."""
    step = max(1, _LINE_BYTES // array.itemsize)
    first = row * array.shape[1]
    for i in range(max(0, start), min(start + count, array.shape[1]), step):
        _prefetch(array, first + i)


@intrinsic
def _prefetch(typingctx, array, index):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", (place.type,), kind)
        builder.call(function, [place, number(0), number(3), number(1)])  # for reading, near, data
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen
