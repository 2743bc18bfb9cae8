"""kvlab against the oracle, on every way a sequence can reach the cache."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.lab.parity.paging import PagedSequences
from kvlab.lab.parity.small.row import TESTED_TOKENS, VOCAB
from kvlab.models.load import LoadedModel
from kvlab.specs.parts import OpenBuffer, RecurrentState

TOLERANCE = 1e-4
# model types whose transformers implementation does not reproduce itself to 1e-4, and why
LOOSER: dict[str, float] = {
    # its own logits in fp32 and in fp64 are 2e-4 apart over 18 layers, and its decode further: streams are brought to
    # one another's size again and again
    "gemma3n_text": 2e-3,
    # 2e-4 between fp32 and fp64 over 5 layers: what its shared blocks give is normed with no residual beside it
    "zamba2": 1e-3,
}
LENGTHS = (TESTED_TOKENS, 23, 5)  # of the ragged batch's sequences
CHUNKS = (7, 1, 11, 3, 2, 13)


@dataclass(frozen=True)
class ModeResult:
    """Error of one way of running: max |difference| / std(oracle's logits), and whether it is within tolerance."""

    mode: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Within tolerance; NaN is not."""
        return self.error <= self.tolerance

    @property
    def seen(self) -> bool:
        """Of a mutation: a finite error outside the tolerance. NaN is no sign that the fact itself was noticed."""
        return self.tolerance < self.error < math.inf


def prompts(seed: int) -> list[list[int]]:
    """The tested sequences, one per length of `LENGTHS`."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in LENGTHS]


def error(got: Tensor, wanted: Tensor) -> float:
    """max |got - wanted| / std(wanted); NaN where `got` has one."""
    return float((got - wanted).abs().max() / wanted.std())


def whole_prefill(model: LoadedModel, texts: list[list[int]]) -> list[Tensor]:
    """All tokens of the first sequence in one step."""
    return [PagedSequences(model, 1, len(texts[0])).step({0: texts[0]})[0]]


def decode(model: LoadedModel, texts: list[list[int]]) -> list[Tensor]:
    """The first sequence token by token from its very first."""
    cache = PagedSequences(model, 1, len(texts[0]), block_size=5)
    return [torch.cat([cache.step({0: [token]}, padded_rows=i % 2)[0] for i, token in enumerate(texts[0])])]


def chunked_prefill(model: LoadedModel, texts: list[list[int]], forgotten: str = "") -> list[Tensor]:
    """The first sequence in chunks of odd sizes that fit no page.

    Args:
        forgotten: a state array that is zeroed before each chunk; "" for none.
    """
    cache, start, pieces = PagedSequences(model, 1, len(texts[0])), 0, []
    for size in CHUNKS * len(texts[0]):
        if piece := texts[0][start : start + size]:
            cache.forget(forgotten)
            pieces.append(cache.step({0: piece})[0])
        start += size
    return [torch.cat(pieces)]


def ragged_batch(model: LoadedModel, texts: list[list[int]]) -> list[Tensor]:
    """All sequences at once, each step a mix of decodes and prefill chunks of different lengths."""
    cache = PagedSequences(model, len(texts), max(map(len, texts)), block_size=3)
    pieces: list[list[Tensor]] = [[] for _ in texts]
    sizes = [iter((*CHUNKS[i:], *[1] * TESTED_TOKENS)) for i in range(len(texts))]
    step = 0
    while any(n < len(text) for n, text in zip(cache.lengths, texts, strict=True)):
        # sequence i joins at step i
        work = {i: text[cache.lengths[i] :][: next(sizes[i])] for i, text in enumerate(texts) if i <= step}
        for i, logits in cache.step({i: ids for i, ids in work.items() if ids}, padded_rows=step % 3).items():
            pieces[i].append(logits)
        step += 1
    return [torch.cat(p) for p in pieces]


def preempt_resume(model: LoadedModel, texts: list[list[int]]) -> list[Tensor]:
    """The first sequence taken out after some decodes, its pages used by another, then computed again and finished."""
    text, cache = texts[0], PagedSequences(model, 1, len(texts[0]), block_size=4)
    kept = len(text) // 2
    for piece in (text[: kept - 2], text[kept - 2 : kept - 1], text[kept - 1 : kept]):
        cache.step({0: piece})
    cache.reset(0)
    cache.step({0: texts[1]})
    cache.reset(0)
    pieces = [cache.step({0: text[:kept]})[0]]
    pieces += [cache.step({0: text[i : i + 1]})[0] for i in range(kept, len(text))]
    return [torch.cat(pieces)]


MODES: dict[str, Callable[[LoadedModel, list[list[int]]], list[Tensor]]] = {
    "whole prefill": whole_prefill,
    "decode": decode,
    "chunked prefill": chunked_prefill,
    "ragged batch": ragged_batch,
    "preempt and resume": preempt_resume,
}


def forgetful(model: LoadedModel, texts: list[list[int]], wanted: Tensor) -> Iterator[ModeResult]:
    """Chunked prefill with each array not carried from chunk to chunk: parity must fail.

    Arrays of recurrent states, and those of open windows of tokens that wait to be compressed.
    """
    parts = [part for _, part in model.spec.parts() if isinstance(part, RecurrentState | OpenBuffer)]
    for name in dict.fromkeys(array.name for part in parts for array in part.arrays):
        got = chunked_prefill(model, texts, name)[0]
        yield ModeResult(f"{name} not carried over a chunk boundary", error(got, wanted), tolerance_of(model))


def tolerance_of(model: LoadedModel) -> float:
    """What parity asks of the model's family."""
    return LOOSER.get(model.config.model_type, TOLERANCE)


def compare(model: LoadedModel, texts: list[list[int]], wanted: list[Tensor]) -> tuple[ModeResult, ...]:
    """The result of each mode of `MODES`; `wanted` holds the oracle's logits of each of `texts`."""
    tolerance = tolerance_of(model)
    results = []
    for mode, run in MODES.items():
        got = run(model, texts)
        errors = [error(g.float(), w) for g, w in zip(got, wanted, strict=False)]
        worst = float("nan") if any(e != e for e in errors) else max(errors)
        results.append(ModeResult(mode, worst, tolerance))
    return tuple(results)
