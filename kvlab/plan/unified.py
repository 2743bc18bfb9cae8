"""The `vllm` policy: every group draws blocks of one size from one pool, so kinds of layers pad one another.

Source: vLLM 0.33 `v1/core/kv_cache_planning.py` and `kv_cache_interface.py`, followed in four rules.

1. Layers of equal retention and width form a type; types are cut into groups of equal many layers, as many as the
   rarest type has, or as the commonest has when that is less than 1.5 times as many. The last group of a type may
   have empty places.
2. All pages of a layer are equally large. A type with narrow rows puts more tokens into a block; where a state is
   larger than a page, the attention blocks grow (in steps of the block size) until a page covers it; the rest is
   padding.
3. A block id is one page in each layer of one group, so it costs page_bytes x layers_per_group.
4. A sequence takes cdiv(n, bs) blocks of a full group, cdiv(min(W - 1 + in flight, n), bs) + 1 of a window,
   cdiv(min(C + in flight, n), bs) of a chunk, one of a state.

It differs in one thing: where all types keep every token (latents and index keys), they share one group whose
blocks are as large as their rows together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvlab.plan.policies import (
    GroupBytes,
    PolicySettings,
    SequenceBytes,
    encoder_tokens,
    local_tokens,
)
from kvlab.specs.layout import retention_name
from kvlab.specs.model import ModelSpec
from kvlab.specs.pages import cdiv
from kvlab.specs.parts import CacheSpec, Retention


@dataclass(frozen=True)
class UnifiedGroup:
    """One group of a unified pool.

    Attributes:
        name: "full", "sliding512", "state", ... with "#2" and so on for further groups of a type.
        retention: of its layers.
        block_size: tokens of a block (of a state group: 0, a block is one state).
        parts: the parts of its layers, at most `layers_per_group`.
    """

    name: str
    retention: Retention
    block_size: int
    parts: tuple[CacheSpec, ...]


@dataclass(frozen=True)
class UnifiedPool:
    """How a model's layers share one pool: `block_bytes` is what one block id costs over all its layers."""

    page_bytes: int
    layers_per_group: int
    block_bytes: int
    groups: tuple[UnifiedGroup, ...]


def unified_pool(model: ModelSpec, block_size: int) -> UnifiedPool:
    """The groups, page size and block size of `model` when one pool serves all of them.

    Raises:
        ValueError: the model compresses tokens to entries, which this policy does not model.
    """
    types: dict[tuple[Retention, int], list[CacheSpec]] = {}
    for _, part in model.parts():
        rule = part.retention
        if rule.rule == "stride":
            raise ValueError(f"policy 'vllm': {part.kind} entries (one per {rule.size} tokens) are not modelled by it")
        if rule.rule != "none":
            size = part.fixed_bytes if rule.rule == "state" else part.entry_bytes
            types.setdefault((rule, size), []).append(part)
    if len({rule for rule, _ in types}) <= 1:
        return _single(types, block_size)
    page, blocks = _page_size(list(types), block_size)
    counts = [len(parts) for parts in types.values()]
    per_group = max(counts) if 2 * max(counts) < 3 * min(counts) else min(counts)
    groups = []
    for (rule, size), parts in types.items():
        for i in range(0, len(parts), per_group):
            name = retention_name(rule) + (f"#{i // per_group + 1}" if i else "")
            groups.append(UnifiedGroup(name, rule, blocks[rule, size], tuple(parts[i : i + per_group])))
    return UnifiedPool(page, per_group, page * per_group, tuple(groups))


def _single(types: dict[tuple[Retention, int], list[CacheSpec]], block_size: int) -> UnifiedPool:
    if not types:
        return UnifiedPool(0, 0, 0, ())
    rule = next(iter(types))[0]
    parts = tuple(p for found in types.values() for p in found)
    tokens = 1 if rule.rule == "state" else block_size
    block = sum(size * tokens * len(found) for (_, size), found in types.items())
    group = UnifiedGroup(retention_name(rule), rule, 0 if rule.rule == "state" else block_size, parts)
    return UnifiedPool(block // len(parts), len(parts), block, (group,))


def _page_size(types: list[tuple[Retention, int]], block_size: int) -> tuple[int, dict[tuple[Retention, int], int]]:
    """(bytes of a layer's page, tokens of a block of each type): rule 2 of the module's docstring."""
    widest = max((size for rule, size in types if rule.rule != "state"), default=0)
    state = max((size for rule, size in types if rule.rule == "state"), default=0)
    step = block_size * widest
    page = max(1, cdiv(state, step)) * step
    blocks = {(r, s): 0 if r.rule == "state" else page // (block_size * s) * block_size for r, s in types}
    return page, blocks


def unified_blocks(group: UnifiedGroup, tokens: int, in_flight: int) -> int:
    """Blocks one sequence of `tokens` tokens takes of `group` at most."""
    rule, size = group.retention, group.block_size
    if rule.rule == "state":
        return 1
    if rule.rule == "window":
        return cdiv(min(rule.size + rule.sinks - 1 + in_flight, tokens), size) + 1
    if rule.rule == "chunk":
        return cdiv(min(rule.size + in_flight, tokens), size)
    if rule.rule == "encoder":
        return cdiv(encoder_tokens(group.parts), size)
    return cdiv(tokens, size)


def unified_sequence(model: ModelSpec, tokens: int, settings: PolicySettings) -> SequenceBytes:
    """Bytes of one sequence in a unified pool; `pool_overhead` is its null block."""
    pool = unified_pool(model, settings.block_size)
    found = []
    for group in pool.groups:
        local = local_tokens(group.retention, tokens, settings.cp)
        blocks = unified_blocks(group, local, settings.in_flight)
        settled = min(blocks, unified_blocks(group, local, 1))
        useful = sum(p.bytes_at(local) for p in group.parts)
        # what the layers of the group could fill of its blocks; the rest of a block is padding
        rows = max(1, group.block_size)
        fillable = sum(p.entry_bytes * rows if group.block_size else p.fixed_bytes for p in group.parts) * settled
        found.append(
            GroupBytes(
                group.name,
                len(group.parts),
                group.block_size,
                blocks,
                pool.block_bytes,
                useful,
                page_tail=fillable - useful,
                padding=pool.block_bytes * settled - fillable,
                reserve=(blocks - settled) * pool.block_bytes,
            )
        )
    return SequenceBytes("vllm", tuple(found), pool.block_bytes)


def unified_bytes_function(model: ModelSpec, settings: PolicySettings) -> Callable[[int], int]:
    """tokens -> total bytes of a sequence, the pool worked out once."""
    pool = unified_pool(model, settings.block_size)
    return lambda tokens: (
        pool.block_bytes
        * sum(
            unified_blocks(g, local_tokens(g.retention, tokens, settings.cp), settings.in_flight) for g in pool.groups
        )
    )
