"""Stored rows as fp32 inside CPU kernels: one small decode per format, chosen when a kernel is compiled.

Numba has no bf16, fp16 or fp8, so pages of those are read as integers and their bits moved into place. A scaled
format gives its codes as numbers: the caller subtracts the zero point and multiplies by the scale once per row.
Packed 4-bit codes are read as uint32, eight to an element; a row's width is then a multiple of 8.
"""

from __future__ import annotations

import numba
import numpy as np
from numba.extending import overload

from kvlab.quant.numba_flags import FASTMATH

_OPTIONS = {"fastmath": FASTMATH, "error_model": "numpy"}


def row_floats(codes, is_bf16, bits):  # type: ignore[no-untyped-def]
    """The row `codes` [D] as fp32 [D]: itself if it is fp32, else decoded into `bits`.

    Args:
        codes: fp32, uint16 (bf16 or fp16), uint8 (fp8 e4m3), int8, or uint32 [D / 8] (int4).
        is_bf16: which of the two 16-bit formats; ignored for others.
        bits: uint32 scratch of at least D elements.
    """
    raise NotImplementedError("compiled code only")


def block_floats(codes, page, place, n, is_bf16, bits):  # type: ignore[no-untyped-def]
    """Rows of `n` tokens that follow each other in a page, as fp32 [n, at least width]; fp32 codes are not copied.

    Args:
        codes: [num_pages, elements of a page].
        place: (first element, row stride, width).
        bits: uint32 scratch of at least [n, width].
    """
    raise NotImplementedError("compiled code only")


def zero_point(codes, scales, page, place):  # type: ignore[no-untyped-def]
    """The code that stands for zero, fp32: of int4 the last 4 bits of its scale scales[page, place], else 0."""
    raise NotImplementedError("compiled code only")


def row_codes(codes, width):  # type: ignore[no-untyped-def]
    """Elements of `codes` that a row of `width` values takes."""
    raise NotImplementedError("compiled code only")


@overload(zero_point, jit_options=_OPTIONS)
def _zero_point(codes, scales, page, place):  # type: ignore[no-untyped-def]
    return _zero_in_scale if codes.dtype == numba.uint32 else lambda codes, scales, page, place: np.float32(0)


def _zero_in_scale(codes, scales, page, place):  # type: ignore[no-untyped-def]
    return np.float32(np.float32(scales[page, place]).view(np.uint32) & np.uint32(15))


@overload(row_codes, jit_options=_OPTIONS)
def _row_codes(codes, width):  # type: ignore[no-untyped-def]
    return (lambda codes, width: width // 8) if codes.dtype == numba.uint32 else lambda codes, width: width


@overload(block_floats, jit_options=_OPTIONS)
def _block_floats(codes, page, place, n, is_bf16, bits):  # type: ignore[no-untyped-def]
    return _as_they_lie if codes.dtype == numba.float32 else _decoded


def _as_they_lie(codes, page, place, n, is_bf16, bits):  # type: ignore[no-untyped-def]
    return codes[page, place[0] : place[0] + n * place[1]].reshape(n, place[1])


def _decoded(codes, page, place, n, is_bf16, bits):  # type: ignore[no-untyped-def]
    start, stride, width = place
    count = row_codes(codes, width)
    for t in range(n):
        row_floats(codes[page, start + t * stride : start + t * stride + count], is_bf16, bits[t])
    return bits[:n].view(np.float32)


@overload(row_floats, jit_options=_OPTIONS)
def _row_floats(codes, is_bf16, bits):  # type: ignore[no-untyped-def]
    # Numba compares this signature with the chosen function's, annotations included: so there are none
    return {
        numba.float32: lambda codes, is_bf16, bits: codes,
        numba.uint16: _from_16,
        numba.uint8: _from_fp8,
        numba.int8: _from_int8,
        numba.uint32: _from_int4,
    }[codes.dtype]


def _from_int4(codes, is_bf16, bits):  # type: ignore[no-untyped-def]
    packed = codes.view(np.uint8)
    half = packed.shape[0]
    out = bits[: 2 * half].view(np.float32)
    for d in range(half):
        out[d] = np.float32(packed[d] & np.uint8(15))
    for d in range(half):
        out[half + d] = np.float32(packed[d] >> np.uint8(4))
    return out


def _from_int8(codes, is_bf16, bits):  # type: ignore[no-untyped-def]
    out = bits[: codes.shape[0]].view(np.float32)
    for d in range(codes.shape[0]):
        out[d] = np.float32(codes[d])
    return out


def _from_16(codes, is_bf16, bits):  # type: ignore[no-untyped-def]
    n = codes.shape[0]
    out = bits[:n].view(np.float32)
    if is_bf16:
        for d in range(n):
            bits[d] = np.uint32(codes[d]) << np.uint32(16)
        return out
    for d in range(n):
        bits[d] = (np.uint32(codes[d]) & np.uint32(0x7FFF)) << np.uint32(13)
    for d in range(n):
        out[d] *= np.float32(2.0**112)  # moves the exponent's bias from 15 to 127; exact, subnormals too
    for d in range(n):
        code = np.uint32(codes[d])
        special = np.uint32(0x7F800000) if (code & np.uint32(0x7C00)) == np.uint32(0x7C00) else np.uint32(0)
        bits[d] |= special | ((code & np.uint32(0x8000)) << np.uint32(16))
    return out


def _from_fp8(codes, is_bf16, bits):  # type: ignore[no-untyped-def]
    n = codes.shape[0]
    out = bits[:n].view(np.float32)
    for d in range(n):
        bits[d] = (np.uint32(codes[d]) & np.uint32(0x7F)) << np.uint32(20)
    for d in range(n):
        out[d] *= np.float32(2.0**120)  # moves the exponent's bias from 7 to 127
    for d in range(n):
        code = np.uint32(codes[d])
        nan = np.uint32(0x7FC00000) if (code & np.uint32(0x7F)) == np.uint32(0x7F) else np.uint32(0)
        bits[d] |= nan | ((code & np.uint32(0x80)) << np.uint32(24))
    return out
