"""Encoders and decoders of the storage formats; their sizes come from `kvlab.specs.formats`.

A codec turns rows [..., D] into codes [..., D] and, for scaled formats, one fp32 scale per row [..., 1].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvlab.quant import fp8_e4m3, int8, plain


@dataclass(frozen=True)
class Codec:
    """One storage format in torch.

    Attributes:
        name: storage format name.
        dtype: torch type of the codes.
        scaled: whether rows have a scale.
        encode: rows -> (codes, scale or None).
        decode: (codes, scale or None) -> rows, in fp32 (fp64 for fp64 codes).
    """

    name: str
    dtype: torch.dtype
    scaled: bool
    encode: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
    decode: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


_CODECS = {
    c.name: c
    for c in (
        Codec("fp64", torch.float64, False, plain.encoder(torch.float64), plain.decode),
        Codec("fp32", torch.float32, False, plain.encoder(torch.float32), plain.decode),
        Codec("bf16", torch.bfloat16, False, plain.encoder(torch.bfloat16), plain.decode),
        Codec("fp16", torch.float16, False, plain.encoder(torch.float16), plain.decode),
        Codec("fp8_e4m3", torch.float8_e4m3fn, False, fp8_e4m3.encode, fp8_e4m3.decode),
        Codec("int8", torch.int8, True, int8.encode, int8.decode),
    )
}


def get_codec(name: str) -> Codec:
    """The codec of storage format `name`.

    Raises:
        ValueError: the engine cannot store this format (yet).
    """
    if name not in _CODECS:
        raise ValueError(f"kv dtype {name!r}: the engine stores {', '.join(_CODECS)}")
    return _CODECS[name]
