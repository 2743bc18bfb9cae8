"""Rotary positions: the angle per position of each pair of a head's values, and the rotation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvlab.models.facts import RopeFacts


def inverse_frequencies(rope: RopeFacts, head_dim: int, dtype: torch.dtype = torch.float32, max_len: int = 0) -> Tensor:
    """Radians per position of each pair that turns, float32 (float64 for a float64 model), [dim / 2].

    Args:
        head_dim: pairs are those of the whole head, or of its first `rope.dim` values where that is set.
        max_len: longest sequence that will be run, 0 for longer than the model was trained at: what longrope goes by.

    Source: transformers 5.24.0 modeling_rope_utils.py, `_compute_*_parameters`; the same steps in float32, so that
    angles agree to the last bit.
    """
    wide = torch.promote_types(dtype, torch.float32)
    dim = rope.dim or head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(wide) / dim
    if rope.kind == "longrope":
        divisors = rope.short_divisors if is_short(rope, max_len) else rope.divisors
        return 1.0 / (torch.tensor(divisors, dtype=wide) * rope.theta**exponents)
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(rope, dim, exponents)
    return frequencies


def is_short(rope: RopeFacts, max_len: int) -> bool:
    """Whether longrope takes its short divisors for sequences of at most `max_len` tokens (0: of any length).

    One choice for all sequences and all steps: with another one for each length, as transformers has it, keys in the
    cache would turn out to be rotated wrongly once their sequence grew past the limit.
    """
    return 0 < max_len <= rope.short_up_to


def _llama3(frequencies: Tensor, rope: RopeFacts) -> Tensor:
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


def _yarn(rope: RopeFacts, dim: int, exponents: Tensor) -> Tensor:
    """Pairs that turn often within the original length are kept, those that turn seldom stretched, a ramp between.

    Source: YaRN (arXiv 2309.00071), section 3.2.
    """
    bases = rope.theta**exponents
    kept, stretched = 1.0 / bases, 1.0 / (rope.factor * bases)

    def pair_of(rotations: float) -> float:
        """The pair that makes `rotations` turns within the original length."""
        return dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    ramp = ((torch.arange(dim // 2, dtype=exponents.dtype) - low) / (high - low)).clamp(0, 1)
    return stretched * ramp + kept * (1 - ramp)


def rope_tables(
    positions: Tensor, frequencies: Tensor, dtype: torch.dtype, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every angle, times `factor`: two tensors [T, dim / 2] in `dtype`.

    Args:
        positions: int64 [T].
        frequencies: [dim / 2], of `inverse_frequencies`; angles are computed in their dtype.
    """
    angles = positions[:, None].to(frequencies.dtype) * frequencies
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """`x` [T, heads, head_dim] with each pair of its first values turned by its angle; further values stay.

    Args:
        cos, sin: [T, dim / 2].
        interleaved: value 2i pairs with 2i + 1; else value i with i + dim / 2.
    """
    dim = 2 * cos.shape[-1]
    turned, rest = (x, None) if dim == x.shape[-1] else (x[..., :dim], x[..., dim:])
    cos, sin = cos[:, None, :], sin[:, None, :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        pairs = (first * cos - second * sin, second * cos + first * sin)
        out = torch.stack(pairs, dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        out = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return out if rest is None else torch.cat((out, rest), dim=-1)
