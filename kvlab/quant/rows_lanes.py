"""Eight stored values at once as a vector of fp32, inside CPU kernels: LLVM code per format, chosen by the codes' type.

As in `rows`, codes come as numbers: the caller subtracts zero points and multiplies by scales. LLVM splits the vector
where a machine's are shorter.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir

LANES = 8
VECTOR = ir.VectorType(ir.FloatType(), LANES)
_WORDS = ir.VectorType(ir.IntType(32), LANES)
_INT = ir.IntType(64)


def lanes(builder: Any, dtype: Any, row: Any, d: Any, width: Any) -> Any:
    """The values d .. d + 7 of the row whose bytes begin at `row`.

    Args:
        dtype: fp32, uint16 (bf16), int8, uint8 (fp8 e4m3), or uint32 (int4: low halves of the bytes first).
        d, width: int64; `width` is the number of values of the row.
    """
    return _READERS[dtype](builder, row, d, width)


def _codes(builder: Any, row: Any, d: Any, bits: int) -> Any:
    """Eight integers of `bits` bits, as they lie."""
    kind = ir.VectorType(ir.IntType(bits), LANES)
    place = builder.gep(row, [builder.mul(d, _INT(bits // 8))])
    return builder.load(builder.bitcast(place, kind.as_pointer()), align=bits // 8)


def _fp32(builder: Any, row: Any, d: Any, width: Any) -> Any:
    return builder.bitcast(_codes(builder, row, d, 32), VECTOR)


def _bf16(builder: Any, row: Any, d: Any, width: Any) -> Any:
    words = builder.zext(_codes(builder, row, d, 16), _WORDS)
    return builder.bitcast(builder.shl(words, _all(16)), VECTOR)


def _int8(builder: Any, row: Any, d: Any, width: Any) -> Any:
    return builder.sitofp(builder.sext(_codes(builder, row, d, 8), _WORDS), VECTOR)


def _int4(builder: Any, row: Any, d: Any, width: Any) -> Any:
    half = builder.lshr(width, _INT(1))
    high = builder.icmp_signed(">=", d, half)
    words = builder.zext(_codes(builder, row, builder.select(high, builder.sub(d, half), d), 8), _WORDS)
    shift = builder.select(high, _all(4), _all(0))
    return builder.sitofp(builder.and_(builder.lshr(words, shift), _all(15)), VECTOR)


def _fp8(builder: Any, row: Any, d: Any, width: Any) -> Any:
    words = builder.zext(_codes(builder, row, d, 8), _WORDS)
    size = builder.and_(words, _all(0x7F))
    bias = ir.Constant(VECTOR, [2.0**120] * LANES)  # moves the exponent's bias from 7 to 127
    value = builder.fmul(builder.bitcast(builder.shl(size, _all(20)), VECTOR), bias)
    sign = builder.shl(builder.and_(words, _all(0x80)), _all(24))
    nan = builder.select(builder.icmp_unsigned("==", size, _all(0x7F)), _all(0x7FC00000), _all(0))
    return builder.bitcast(builder.or_(builder.bitcast(value, _WORDS), builder.or_(sign, nan)), VECTOR)


def _all(number: int) -> Any:
    return ir.Constant(_WORDS, [number] * LANES)


_READERS = {numba.float32: _fp32, numba.uint16: _bf16, numba.int8: _int8, numba.uint8: _fp8, numba.uint32: _int4}
