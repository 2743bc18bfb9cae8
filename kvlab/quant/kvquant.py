"""KVQuant-style: keys before rotation per channel, values per token, uneven codes, the furthest values kept apart.

Codes are the levels of a Lloyd-Max quantizer of a normal distribution, placed by the mean and spread of each channel
(keys) or token (values) of a closed group. The share of values furthest from their mean, in spreads, is stored with
its place, 4 bytes each, and counts neither for mean nor for spread. Source: arXiv 2401.18079; it learns its codebook
and its ranges per layer from data, here both follow from the group itself.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from statistics import NormalDist

import torch

from kvlab.quant.packing import pack, unpack
from kvlab.quant.tables import table
from kvlab.specs.grouped import ClosedGroups


@cache
def levels(bits: int) -> tuple[float, ...]:
    """The 2**bits values whose nearest is closest on average (squared) to a standard normal variable, ascending.

    Source: J. Max, Quantizing for minimum distortion (1960): for 3 bits 0.2451, 0.7560, 1.344, 2.152 and negatives.
    """
    normal, count = NormalDist(), 2**bits
    found = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
    for _ in range(500):
        borders = [-math.inf, *((a + b) / 2 for a, b in pairwise(found)), math.inf]
        density = [0.0 if math.isinf(x) else normal.pdf(x) for x in borders]
        share = [normal.cdf(x) if math.isfinite(x) else float(x > 0) for x in borders]
        found = [(density[i] - density[i + 1]) / (share[i + 1] - share[i]) for i in range(count)]
    return tuple(found)


def encode(key: torch.Tensor, value: torch.Tensor, part: ClosedGroups) -> dict[str, torch.Tensor]:
    """As `kivi.encode`, of keys before rotation; `k_outliers` and `v_outliers` besides, fp16 [n, Hkv, 2 * count]: places
    as the bits of int16, then values."""
    stored: dict[str, torch.Tensor] = {}
    for name, rows, count in (
        ("k", key.transpose(2, 3).float(), part.outliers[0]),
        ("v", value.float(), part.outliers[1]),
    ):
        codes, scale, outliers = _encode(rows, part.format.bits, count)
        stored |= {f"{name}_closed": codes, f"{name}_closed_scale": scale, f"{name}_outliers": outliers}
    return stored


def _encode(rows: torch.Tensor, bits: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, fp16 (spread, mean) pairs and outliers of `rows` [n, Hkv, lines, values of a line]."""
    flat = rows.flatten(2)
    spread, mean = torch.std_mean(rows, dim=-1, keepdim=True, correction=0)
    distance = ((rows - mean) / spread.clamp_min(1e-12)).abs().flatten(2)
    place = distance.nan_to_num(torch.inf).topk(count, dim=-1).indices
    outliers = torch.cat((place.to(torch.int16).view(torch.float16), flat.gather(-1, place).half()), dim=-1)
    kept = torch.ones_like(flat).scatter(-1, place, 0.0).view_as(rows)
    total = kept.sum(-1, keepdim=True).clamp_min(1)
    mean = ((rows * kept).sum(-1, keepdim=True) / total).half()
    spread = ((rows - mean.float()).square() * kept).sum(-1, keepdim=True).div(total).sqrt().half()
    scaled = (rows - mean.float()) / torch.where(spread == 0, torch.ones_like(spread), spread).float()
    places = table(levels(bits), rows.device)
    codes = torch.bucketize(scaled.contiguous(), (places[1:] + places[:-1]) / 2).to(torch.uint8)
    return pack(codes.flatten(2), bits), torch.cat((spread, mean), dim=-1).flatten(2), outliers


def decode(stored: dict[str, torch.Tensor], part: ClosedGroups) -> tuple[torch.Tensor, torch.Tensor]:
    """(key before rotation, value) fp32 [n, Hkv, tokens, D] of the segments that `encode` gave."""
    tokens, bits = part.format.group_tokens, part.format.bits
    key = _decode(stored, "k", (part.key_width, tokens), bits)
    return key.transpose(-1, -2), _decode(stored, "v", (tokens, part.value_width), bits)


def _decode(stored: dict[str, torch.Tensor], name: str, shape: tuple[int, int], bits: int) -> torch.Tensor:
    codes = unpack(stored[f"{name}_closed"], bits, shape[0] * shape[1])
    spread, mean = stored[f"{name}_closed_scale"].float().unflatten(-1, (-1, 2)).unbind(-1)
    rows = table(levels(bits), codes.device)[codes.int()].unflatten(-1, shape) * spread[..., None] + mean[..., None]
    place, values = stored[f"{name}_outliers"].chunk(2, dim=-1)
    # a slot that nobody wrote may hold any bits: they must not point outside
    place = place.contiguous().view(torch.int16).long().clamp(0, shape[0] * shape[1] - 1)
    return rows.flatten(-2).scatter(-1, place, values.float()).unflatten(-1, shape)
