"""Rotary positions: the angle per position of each pair of a head's values, and the rotation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvlab.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Radians per position of each of the head_dim / 2 pairs, float32 (float64 for a float64 model).

    Source: transformers 5.24.0 modeling_rope_utils.py, `_compute_linear_scaling_rope_parameters` and
    `_compute_llama3_parameters`; the same steps in float32, so that angles agree to the last bit.
    """
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(wide) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths stretched by the factor, short ones kept, a linear blend between."""
    wavelengths = 2 * math.pi / frequencies
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_stretched = rope.original_max_position / rope.low_freq_factor
    kept = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    stretched = torch.where(wavelengths > shortest_stretched, frequencies / rope.factor, frequencies)
    blend = (1 - kept) * stretched / rope.factor + kept * stretched
    between = (wavelengths >= longest_kept) & (wavelengths <= shortest_stretched)
    return torch.where(between, blend, stretched)


def rope_tables(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every angle, two tensors [T, head_dim / 2] in `dtype`.

    Args:
        positions: int64 [T].
        frequencies: [head_dim / 2], of `inverse_frequencies`; angles are computed in their dtype.
    """
    angles = positions[:, None].to(frequencies.dtype) * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [T, heads, head_dim] with value i paired with value i + head_dim / 2 and each pair turned by its angle."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
