"""Encoders and decoders of the storage formats; their sizes come from `kvlab.specs.formats`.

A codec turns rows [..., D] into codes and, for scaled formats, metadata: what a row's codes are scaled and shifted by.
Codes of 8 bits and more are [..., D], of fewer uint8 [..., bytes] (see `kvlab.quant.packing`). Formats that quantize
several tokens together have no codec of rows: see `kvlab.quant.closed`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvlab.quant import (
    fp8_e4m3,
    fp8_e5m2,
    fp8_rows,
    hadamard,
    int4,
    int4_g32,
    int4_sym_g32,
    int8,
    int8_asym,
    int8_asym_g32,
    int8_g32,
    mxfp4,
    nvfp4,
    plain,
)  # fmt: skip
from kvlab.specs.formats import FORMATS


@dataclass(frozen=True)
class Codec:
    """One storage format in torch.

    Attributes:
        name: storage format name.
        dtype: torch type of the codes; uint8 for packed ones.
        encode: rows -> (codes, metadata or None).
        decode: (codes, metadata or None, width D) -> rows, in fp32 (fp64 for fp64 codes). Packed codes of an odd
            width need it.
        meta: torch type of the metadata, None for formats without.
    """

    name: str
    dtype: torch.dtype
    encode: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
    decode: Callable[..., torch.Tensor]
    meta: torch.dtype | None = None

    @property
    def scaled(self) -> bool:
        """Whether rows have metadata."""
        return self.meta is not None


_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_PLAIN = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CODECS = {
    c.name: c
    for c in (
        *(Codec(name, dtype, plain.encoder(dtype), plain.decode) for name, dtype in _PLAIN.items()),
        Codec("fp8_e4m3", _E4M3, fp8_e4m3.encode, fp8_e4m3.decode),
        Codec("fp8_e5m2", _E5M2, fp8_e5m2.encode, fp8_e5m2.decode),
        Codec("fp8_e4m3_row", _E4M3, fp8_rows.encoder(fp8_e4m3), fp8_rows.decode, torch.float32),
        Codec("fp8_e5m2_row", _E5M2, fp8_rows.encoder(fp8_e5m2), fp8_rows.decode, torch.float32),
        Codec("int8", torch.int8, int8.encode, int8.decode, torch.float32),
        Codec("int8_asym", torch.uint8, int8_asym.encode, int8_asym.decode, torch.float32),
        Codec("int8_g32", torch.int8, int8_g32.encode, int8_g32.decode, torch.float16),
        Codec("int8_asym_g32", torch.uint8, int8_asym_g32.encode, int8_asym_g32.decode, torch.float16),
        Codec("int4", torch.uint8, int4.encode, int4.decode, torch.float32),
        Codec("int4_sym", torch.uint8, int4.encode_symmetric, int4.decode, torch.float32),
        Codec("int4_g32", torch.uint8, int4_g32.encode, int4_g32.decode, torch.float16),
        Codec("int4_sym_g32", torch.uint8, int4_sym_g32.encode, int4_sym_g32.decode, torch.float16),
        Codec("nvfp4", torch.uint8, nvfp4.encode, nvfp4.decode, _E4M3),
        Codec("mxfp4", torch.uint8, mxfp4.encode, mxfp4.decode, torch.uint8),
        Codec("int4_had", torch.uint8, hadamard.encode_int4, hadamard.decode_int4, torch.float32),
        Codec("int3_had", torch.uint8, hadamard.encode_int3, hadamard.decode_int3, torch.float16),
    )
}


def row_formats() -> tuple[str, ...]:
    """Names of the formats that store each token's rows on their own."""
    return tuple(_CODECS)


def get_codec(name: str) -> Codec:
    """The codec of storage format `name`.

    Raises:
        ValueError: unknown, or a format that quantizes several tokens together.
    """
    if name in FORMATS and name not in _CODECS:
        raise ValueError(f"kv dtype {name!r}: stores groups of tokens, not rows; it is for keys and values that stay")
    if name not in _CODECS:
        raise ValueError(f"kv dtype {name!r}: the engine stores {', '.join(FORMATS)}")
    return _CODECS[name]


def storage_types(name: str) -> tuple[torch.dtype, torch.dtype | None]:
    """The torch types of the codes and of the metadata of storage format `name`, formats of groups included."""
    if name in FORMATS and FORMATS[name].group_tokens:
        return torch.uint8, torch.float16
    codec = get_codec(name)
    return codec.dtype, codec.meta


def round_trip(name: str, rows: torch.Tensor) -> torch.Tensor:
    """`rows` [..., D] encoded and decoded."""
    codec = get_codec(name)
    return codec.decode(*codec.encode(rows), rows.shape[-1])
