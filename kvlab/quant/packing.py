"""Codes of up to 8 bits in whole bytes.

A byte holds values that lie a whole stretch apart: of a row of D 4-bit codes byte i has value i in its low half and
value i + ceil(D / 2) in its high half, so that unpacking writes two contiguous runs and shuffles nothing. 2-bit codes
are four such runs. 3 bits are a plane of the 2 low bits and then a plane of the highest.
"""

from __future__ import annotations

import torch


def planes(bits: int) -> tuple[int, ...]:
    """The planes that codes of `bits` bits are stored in, low bits first: 3 -> (2, 1)."""
    return tuple(bit for bit in (8, 4, 2, 1) if bits & bit)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., bytes] of `codes` uint8 [..., D], each below 2**bits; what a last byte has over is 0."""
    found, shift = [], 0
    for plane in planes(bits):
        found.append(_pack_plane((codes >> shift) & (2**plane - 1), plane))
        shift += plane
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def unpack(packed: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """The codes uint8 [..., width] of `pack`ed bytes."""
    total, start, shift = None, 0, 0
    for plane in planes(bits):
        size = -(-width * plane // 8)
        part = _unpack_plane(packed[..., start : start + size], plane)[..., :width] << shift
        total, start, shift = part if total is None else total | part, start + size, shift + plane
    assert total is not None
    return total


def _pack_plane(codes: torch.Tensor, bits: int) -> torch.Tensor:
    runs, width = 8 // bits, codes.shape[-1]
    size = -(-width // runs)
    padded = torch.nn.functional.pad(codes, (0, size * runs - width)).unflatten(-1, (runs, size))
    packed = padded[..., 0, :]
    for run in range(1, runs):
        packed = packed | (padded[..., run, :] << (run * bits))
    return packed


def _unpack_plane(packed: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.cat([(packed >> (run * bits)) & (2**bits - 1) for run in range(8 // bits)], dim=-1)
