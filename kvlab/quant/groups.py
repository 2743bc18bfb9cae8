"""Codes of groups of values: unsigned ones over a smallest value and a step per group, signed ones times a scale, in fp16.

A group that does not fill its last place (a row of 80 values in groups of 32) has fewer values, and its range is that
of its own values alone.
"""

from __future__ import annotations

import torch

from kvlab.quant.packing import pack, unpack


def split(x: torch.Tensor, group: int) -> torch.Tensor:
    """`x` [..., D] as [..., groups, group]; an incomplete last group is filled with its own first value."""
    width = x.shape[-1]
    group = group or width
    missing = -width % group
    if missing:
        first = x[..., width - (width % group), None]
        x = torch.cat((x, first.expand(*x.shape[:-1], missing)), dim=-1)
    return x.unflatten(-1, (-1, group))


def encode(x: torch.Tensor, bits: int, group: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed codes uint8 [..., bytes], fp16 [..., 2 * groups]: step and smallest value of each group in turn).

    Value = smallest + step * code, off by at most step / 2 and what fp16 rounds. A group with NaN or infinity, or
    beyond fp16, decodes to NaN or infinity.
    """
    grouped = split(x.float(), group)
    low, high = grouped.amin(-1, keepdim=True).half(), grouped.amax(-1, keepdim=True)
    step = ((high - low.float()) / (2**bits - 1)).half()
    step = torch.where(step == 0, torch.ones_like(step), step)
    codes = torch.round((grouped - low.float()) / step.float()).nan_to_num(0.0).clamp(0, 2**bits - 1)
    meta = torch.cat((step, low), dim=-1).flatten(-2)
    return pack(codes.to(torch.uint8).flatten(-2)[..., : x.shape[-1]], bits), meta


def decode(packed: torch.Tensor, meta: torch.Tensor, bits: int, width: int, group: int = 0) -> torch.Tensor:
    """The rows fp32 [..., width]."""
    codes = split(unpack(packed, bits, width).float(), group)
    step, low = meta.float().unflatten(-1, (-1, 2)).unbind(-1)
    return (codes * step[..., None] + low[..., None]).flatten(-2)[..., :width]


def encode_signed(x: torch.Tensor, largest: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes fp32 [..., D], whole numbers from -largest to largest; scale fp16 [..., groups], a group's max|x| / largest).

    Value = scale * code; zero is stored exactly. Off by at most scale / 2 and what fp16 rounds, where the
    scale is a normal number of fp16 (at least 2**-14); a smaller one is coarse, and the largest values of its group are cut
    to `largest`, one that fp16 has no place for makes the group zeros, and one beyond fp16 or with NaN or infinity NaN.
    """
    grouped = split(x.float(), group)
    scale = (grouped.abs().amax(-1, keepdim=True) / largest).half()
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = torch.round(grouped / scale.float()).nan_to_num(0.0).clamp(-largest, largest)
    return codes.flatten(-2)[..., : x.shape[-1]], scale[..., 0]


def decode_signed(codes: torch.Tensor, scale: torch.Tensor, group: int) -> torch.Tensor:
    """The rows fp32 [..., D]."""
    return (split(codes.float(), group) * scale.float()[..., None]).flatten(-2)[..., : codes.shape[-1]]
