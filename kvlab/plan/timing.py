"""How long a step takes at best: bytes over bandwidth, operations over the arithmetic rate, whichever is longer.

A decode step reads the weights once for the whole batch, and each sequence's cache. With experts it reads the shared
weights and the expected number of distinct experts at that batch (`kvlab.specs.weights`).
A sliding window reads min(n, W) tokens; a state is read and written. Time on the links between GPUs is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.plan.policies import part_bytes
from kvlab.specs.model import ModelSpec
from kvlab.specs.parts import CacheSpec

Dims = tuple[int, int]

STATE_OPERATIONS = 6
"""Operations per state element and token: decay, outer product, add, and the product that reads it out."""


@dataclass(frozen=True)
class StepTime:
    """One step: what it moves and computes per GPU, how long each takes, and which bounds it.

    Attributes:
        weights_read_bytes, cache_bytes: moved per GPU (summed over pipeline stages, which run one after another).
        operations: multiplications and additions per GPU; None when the GPU's rate is not known.
        memory_s, compute_s: seconds of each; compute_s None when the rate is not known.
        bound_by: "weights", "cache" or "compute".
    """

    weights_read_bytes: int
    cache_bytes: int
    operations: int
    memory_s: float
    compute_s: float | None
    bound_by: str

    @property
    def seconds(self) -> float:
        """The longer of the two, as if they overlapped fully."""
        return max(self.memory_s, self.compute_s or 0.0)


def _sources(model: ModelSpec) -> dict[int, CacheSpec]:
    """For each layer, the attention part that a layer sharing it would read."""
    return {index: part for index, part in reversed(tuple(model.parts())) if part.kind not in ("shared", "recurrent")}


def cache_read_bytes(model: ModelSpec, tokens: int, cp: int = 1) -> int:
    """Bytes of cache that one decode step of one sequence moves on one GPU: reads, and states written back.

    A layer that shares another's cache reads it again. Sparse attention is counted as if it read every entry.
    """
    sources = _sources(model)
    moved = 0
    for _, part in model.parts():
        if part.kind == "shared":
            source = sources.get(part.source)  # type: ignore[attr-defined]
            moved += part_bytes(source, tokens, cp) if source else 0
        elif part.kind in ("recurrent", "buffer"):
            moved += 2 * part.fixed_bytes
        elif part.retention.rule == "chunk":
            moved += part.retained(tokens) * part.entry_bytes
        else:
            moved += part_bytes(part, tokens, cp)
    return moved


def attention_operations(model: ModelSpec, tokens: int, *, prompt: bool, mla_dims: Dims | None = None) -> int:
    """Operations of attention and of recurrences for one token at `tokens`, or for a `prompt` of `tokens`, all ranks.

    Two operations per product, causal: a prompt's token t attends to t entries (min(t, W) in a window).
    `mla_dims`: (key, value) width per head that an MLA model computes a prompt with; decoding works on the latent.
    """
    sources = _sources(model)
    found = 0
    for _, part in model.parts():
        if part.kind == "shared":
            part = sources.get(part.source, part)  # type: ignore[attr-defined]
        if part.kind == "recurrent":
            elements = max(a.elements for a in part.arrays)  # type: ignore[attr-defined]
            found += STATE_OPERATIONS * elements * (tokens if prompt else 1)
            continue
        width = _score_width(part, mla_dims if prompt else None)
        if width:
            pairs = _prompt_pairs(part, tokens) if prompt else _entries(part, tokens)
            found += 2 * model.num_query_heads * width * pairs
    return found


def _score_width(part: CacheSpec, mla_dims: Dims | None) -> int:
    """Values per head and entry that scores and sums multiply: key width + value width."""
    if part.kind == "mla":
        if mla_dims:
            return sum(mla_dims)
        return 2 * part.latent_dim + part.rope_dim  # type: ignore[attr-defined]
    if part.kind in ("index", "buffer", "shared"):
        return 0
    if part.kind == "closed":  # an entry is a group of tokens
        return (part.key_width + part.value_width) * part.retention.size  # type: ignore[attr-defined]
    if hasattr(part, "key_dim"):
        return part.key_dim + part.value_dim
    return 2 * part.width  # type: ignore[attr-defined]


def _entries(part: CacheSpec, tokens: int) -> int:
    return part.encoder_tokens if part.kind == "cross" else part.entries(tokens)  # type: ignore[attr-defined]


def _prompt_pairs(part: CacheSpec, tokens: int) -> int:
    """Pairs (query, entry it attends to) over a prompt of `tokens` tokens."""
    rule = part.retention
    if rule.rule == "encoder":
        return tokens * part.encoder_tokens  # type: ignore[attr-defined]
    if rule.rule == "window":
        full = min(tokens, rule.size)
        return full * (full + 1) // 2 + (tokens - full) * rule.size
    if rule.rule == "chunk":
        chunks, rest = divmod(tokens, rule.size)
        return chunks * rule.size * (rule.size + 1) // 2 + rest * (rest + 1) // 2
    if rule.rule == "stride":
        # the sum of t // size over tokens t = 1 .. n: entries complete when token t is there
        entries, rest = divmod(tokens, rule.size)
        return rule.size * entries * (entries - 1) // 2 + entries * (rest + 1)
    return tokens * (tokens + 1) // 2


def step_time(weights_read: float, cache_bytes: int, operations: float, bandwidth: int, flops: int | None) -> StepTime:
    """The time of one step from what it moves (bytes per GPU) and computes (operations per GPU)."""
    weights_bytes = round(weights_read)
    memory_s = (weights_bytes + cache_bytes) / bandwidth
    compute_s = operations / flops if flops else None
    bound_by = "weights" if weights_bytes >= cache_bytes else "cache"
    if compute_s is not None and compute_s > memory_s:
        bound_by = "compute"
    return StepTime(weights_bytes, cache_bytes, round(operations), memory_s, compute_s, bound_by)
