"""From which length on one cache is smaller than another: where the lines of two architectures cross."""

from __future__ import annotations

from collections.abc import Callable

from kvlab.plan.derivation import part_counts
from kvlab.specs.model import ModelSpec

LONGEST = 2**24  # 16M tokens, beyond every model's reach


def crossings(model: ModelSpec, than: ModelSpec, longest: int = LONGEST) -> list[int]:
    """Every length in 2 .. `longest` from which on the answer to "does `model` need fewer bytes?" is another one.

    Between lengths where a window or a chunk fills both caches are straight lines, which cross at most once, so each
    stretch is searched by halving. Entries that stand for several tokens make small steps: within one such step of
    the crossing the answer may alternate, and one of these lengths is returned.

    Raises:
        ValueError: longest is not positive.
    """
    if longest < 1:
        raise ValueError(f"longest {longest}: must be at least 1 token")

    size, other = _sizes(model), _sizes(than)

    def smaller(tokens: int) -> bool:
        return size(tokens) < other(tokens)

    edges = sorted({1, longest, *(e for e in _bends(model) | _bends(than) if 1 < e < longest)})
    answers = [smaller(edge) for edge in edges]
    return [
        _first(smaller, edges[i], edges[i + 1], answers[i + 1])
        for i in range(len(edges) - 1)
        if answers[i] != answers[i + 1]
    ]


def first_smaller(model: ModelSpec, than: ModelSpec, longest: int = LONGEST) -> int | None:
    """The length from which on `model` needs fewer bytes than `than`, 1 when it always does, None when not at last.

    Raises:
        ValueError: longest is not positive.
    """
    found = crossings(model, than, longest)
    if model.bytes_at(longest) >= than.bytes_at(longest):
        return None
    return found[-1] if found else 1


def _sizes(model: ModelSpec) -> Callable[[int], int]:
    """`model.bytes_at`, each distinct part asked once: layers are mostly alike."""
    parts = [(part, count) for part, count in part_counts(model) if part.kind != "buffer"]
    return lambda tokens: sum(count * part.bytes_at(tokens) for part, count in parts)


def _bends(model: ModelSpec) -> set[int]:
    """Lengths at which a cache's line bends: a window or a chunk is full."""
    return {p.retention.size + p.retention.sinks for _, p in model.parts() if p.retention.rule in ("window", "chunk")}


def _first(answer: Callable[[int], bool], left: int, right: int, wanted: bool) -> int:
    """The first length in (left, right] that answers `wanted`, when all after it do."""
    while right - left > 1:
        middle = (left + right) // 2
        left, right = (left, middle) if answer(middle) == wanted else (middle, right)
    return right
