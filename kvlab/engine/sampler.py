"""One batched pick of the next tokens: per-row parameters, and random numbers that belong to (seed, position).

A row's random number is a hash of its request's seed and of the position of the token to be picked. It has no state,
so a request gets the same tokens whatever else is in the batch, however its prompt was cut, and after a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.schedule import SamplingParams


@dataclass(frozen=True)
class RowParams:
    """Parameters of R rows on the device, and what the host knows of all of them together.

    Attributes:
        temperature, top_p: fp32 [R]. top_k: int64 [R], vocabulary size when off. seed, position: int64 [R].
        greedy: every row is. filtered: some row has a top_k or top_p.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    position: Tensor
    greedy: bool
    filtered: bool

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int], like: Tensor
    ) -> RowParams:
        """The parameters of the rows of `like`, logits [R, vocab]."""

        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(like.device, non_blocking=True)

        vocab = like.shape[-1]
        return cls(
            column([p.temperature for p in params], torch.float32),
            column([min(p.top_k or vocab, vocab) for p in params], torch.int64),
            column([p.top_p for p in params], torch.float32),
            column(seeds, torch.int64),
            column(positions, torch.int64),
            greedy=all(p.temperature == 0 for p in params),
            filtered=any(p.top_k or p.top_p < 1 for p in params),
        )

    def at(self, index: Tensor) -> RowParams:
        """The parameters of the rows that `index` int64 [n] names."""
        columns = (self.temperature, self.top_k, self.top_p, self.seed, self.position)
        return RowParams(*(column[index] for column in columns), self.greedy, self.filtered)


def sample(logits: Tensor, rows: RowParams) -> Tensor:
    """The picked tokens, int64 [R]; -1 where the row's largest logit is not a finite number (NaN included).

    Args:
        logits: [R, vocab] in any float dtype.
    """
    # a NaN anywhere in a row is its maximum
    largest, token = logits.max(dim=-1)
    if not rows.greedy:
        drawn = draw(probabilities(logits, rows), uniform(rows.seed, rows.position))
        token = torch.where(rows.temperature > 0, drawn, token)
    return torch.where(torch.isfinite(largest), token, -1)


def probabilities(logits: Tensor, rows: RowParams) -> Tensor:
    """What `sample` draws a row's token from: float64 [R, vocab], after temperature, top_k and top_p.

    A greedy row gets the distribution of a temperature close to 0, from which nothing is drawn.
    """
    scaled = logits.double() / rows.temperature.double().clamp(min=1e-5)[:, None]
    if rows.filtered:
        scaled = scaled.masked_fill(_cut(scaled, rows), float("-inf"))
    return scaled.softmax(dim=-1)


def draw(weights: Tensor, numbers: Tensor) -> Tensor:
    """A token of each row of `weights` float64 [R, vocab] by inverting their cumulated sum at `numbers` [R] in [0, 1).

    Weights are cumulated in the order of the vocabulary, filtered or not: a row must not draw another token because a
    row beside it has a top_k.
    """
    cumulated = weights.cumsum(dim=-1)
    threshold = numbers[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, threshold, right=True).clamp(max=weights.shape[-1] - 1)[:, 0]


def _cut(scaled: Tensor, rows: RowParams) -> Tensor:
    """bool [R, vocab]: tokens past a row's top_k or top_p; the likeliest one never is."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    beyond_k = rank >= rows.top_k[:, None]
    probability = ordered.masked_fill(beyond_k, float("-inf")).softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    # top_p 1 cuts nothing, whatever the rounding of the sum
    beyond_p = (before >= rows.top_p[:, None]) & (rows.top_p[:, None] < 1) & (rank > 0)
    return torch.zeros_like(beyond_k).scatter(1, order, beyond_k | beyond_p)


def uniform(seed: Tensor, position: Tensor, stream: int = 0) -> Tensor:
    """float64 in [0, 1), one per row, a function of (seed, position, stream) alone; int64 in, the same on every device.

    Two rounds of splitmix64's finalizer: the seed, then its hash and the position. Stream 0 picks tokens; drafting and
    verifying have streams of their own, so that what they decide is independent of what is picked.
    """
    hashed = _mix(seed)
    if stream:
        hashed = _mix(hashed ^ _signed(stream * 0xD1B54A32D192ED03 % 2**64))
    bits = _mix(hashed + position * _signed(0x9E3779B97F4A7C15))
    return ((bits >> 11) & (2**53 - 1)).double() / 2**53


def _mix(x: Tensor) -> Tensor:
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """`x` shifted right without its sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x
