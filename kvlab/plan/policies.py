"""Bytes of one sequence under a named policy, split into what carries data and what does not.

    ideal   every byte carries data: no pages, windows hold min(n, W) tokens
    paged   this project's own allocator, its groups in memory as `kvlab.specs.pools` has it: whole pages, pages for
            the tokens in flight, rows padded to 16 bytes, one page per state, open buffers, a null page per pool
    vllm    one pool and one page size for all groups: see `kvlab.plan.unified`

Every figure is an exact integer, and the figures of `WASTE` and useful are together the total, group by group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvlab.specs.layout import Group, retention_name
from kvlab.specs.model import ModelSpec
from kvlab.specs.pages import cdiv
from kvlab.specs.parts import CacheSpec, Retention
from kvlab.specs.pools import POOLS, PoolLayout, group_pages, pool_layout
from kvlab.specs.rollback import NOTHING_KEPT, RollbackPolicy

POLICIES = ("ideal", "paged", "vllm")

WASTE = {
    "page_tail": "rows of held pages that no token fills",
    "padding": "padding",
    "reserve": "reserved for tokens in flight",
    "kept_states": "states kept to step back to",
    "remainder": "unused rest of sectors",
}
"""What of a sequence's bytes carries no data of its tokens, in words."""


@dataclass(frozen=True)
class PolicySettings:
    """What a policy needs to know beside the model and the length.

    Attributes:
        policy: "ideal", "paged" or "vllm".
        block_size: tokens of a page.
        in_flight: the most tokens of one sequence that one step computes (the step's token budget).
        cp: context-parallel ranks: parts that keep every token are split over them.
        pools: how the groups share memory under "paged": one of `kvlab.specs.pools.POOLS`.
        rollback: what sequences keep to step back to, under "paged".
    """

    policy: str = "ideal"
    block_size: int = 16
    in_flight: int = 2048
    cp: int = 1
    pools: str = "per_kind"
    rollback: RollbackPolicy = NOTHING_KEPT

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy {self.policy!r}: must be one of {', '.join(POLICIES)}")
        if self.pools not in POOLS:
            raise ValueError(f"pools {self.pools!r}: must be one of {', '.join(POOLS)}")
        for name in ("block_size", "in_flight", "cp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be a positive whole number")


@dataclass(frozen=True)
class GroupBytes:
    """Bytes one sequence takes in one group, on one rank.

    Attributes:
        name: of the group.
        parts: member parts (layers of that retention).
        block_size: tokens covered by a page.
        pages: pages the sequence holds at its peak.
        block_bytes: bytes of one page id over all its layers, as the pool gives it out.
        useful: bytes that carry data.
        page_tail: rows that no retained token fills: the last page, and windows that start inside a page.
        padding: bytes that can never carry data: alignment, pages larger than a layer needs, unpaired layers.
        reserve: pages held only for the tokens a step has in flight, or may step back over.
        kept_states: pages of states kept to step back to.
        remainder: pages of the last sector that this sequence alone does not fill.
        pages_per_unit: pages that a unit of the pool gives; only sectors give more than one.
    """

    name: str
    parts: int
    block_size: int
    pages: int
    block_bytes: int
    useful: int
    page_tail: int = 0
    padding: int = 0
    reserve: int = 0
    kept_states: int = 0
    remainder: int = 0
    pages_per_unit: int = 1

    @property
    def total(self) -> int:
        """All bytes the group takes."""
        return self.useful + sum(getattr(self, name) for name in WASTE)

    def bytes_of(self, count: int) -> int:
        """Bytes that `count` such sequences take of the group: they fill each other's sectors."""
        if self.pages_per_unit == 1:
            return count * self.total
        return cdiv(count * self.pages, self.pages_per_unit) * self.pages_per_unit * self.block_bytes


@dataclass(frozen=True)
class SequenceBytes:
    """Bytes of one sequence under one policy. `pool_overhead` is paid once per pool, not per sequence.

    `waste(name)` sums one of `WASTE` over the groups.
    """

    policy: str
    groups: tuple[GroupBytes, ...]
    pool_overhead: int = 0

    @property
    def total(self) -> int:
        """Bytes of the sequence: useful and every kind of `WASTE`."""
        return sum(g.total for g in self.groups)

    @property
    def useful(self) -> int:
        """Bytes that carry data."""
        return sum(g.useful for g in self.groups)

    def waste(self, name: str) -> int:
        """Bytes of one kind of waste, a name of `WASTE`, over all groups."""
        return sum(getattr(g, name) for g in self.groups)

    def bytes_of(self, count: int) -> int:
        """Bytes that `count` such sequences take."""
        return sum(g.bytes_of(count) for g in self.groups)


def local_tokens(rule: Retention, tokens: int, cp: int) -> int:
    """Tokens of a sequence of `tokens` that the fullest of `cp` context-parallel ranks keeps under `rule`.

    Parts that keep everything are dealt out token by token (or entry by entry); windows, chunks, states and
    encoder tokens are held whole by every rank.
    """
    if cp == 1 or rule.rule not in ("all", "stride"):
        return tokens
    if rule.rule == "all":
        return cdiv(tokens, cp)
    return cdiv(tokens // rule.size, cp) * rule.size


def part_bytes(part: CacheSpec, tokens: int, cp: int = 1) -> int:
    """Exact bytes of one part of one sequence on the fullest of `cp` ranks, nothing rounded to pages."""
    return part.bytes_at(local_tokens(part.retention, tokens, cp))


def ideal_bytes(model: ModelSpec, tokens: int, cp: int = 1) -> int:
    """Bytes of one sequence with nothing wasted; open compression buffers are counted apart (decision 20)."""
    return sum(part_bytes(p, tokens, cp) for _, p in model.parts() if p.kind != "buffer")


def paged_pool_bytes(groups: Sequence[Group], num_blocks_by_group: Mapping[str, int] | Sequence[int]) -> int:
    """Bytes of the page pools of `groups`, the null page of each included in its number of blocks.

    `num_blocks_by_group` is keyed by group name, or one number per group in their order.

    Raises:
        ValueError: a group without a number of blocks, or a number too many.
    """
    if isinstance(num_blocks_by_group, Mapping):
        if set(num_blocks_by_group) != {g.name for g in groups}:
            raise ValueError(f"num_blocks_by_group {sorted(num_blocks_by_group)}: must name each of the groups once")
        numbers = [num_blocks_by_group[g.name] for g in groups]
    else:
        numbers = list(num_blocks_by_group)
        if len(numbers) != len(groups):
            raise ValueError(f"num_blocks_by_group {numbers}: must be one number for each of {len(groups)} groups")
    return sum(g.block_bytes * n for g, n in zip(groups, numbers, strict=True))


def default_block_size(model: ModelSpec, block_size: int = 16) -> int:
    """The smallest multiple of `block_size` that holds whole entries of every compression ratio of `model`."""
    result = block_size
    for _, part in model.parts():
        if part.retention.rule == "stride":
            result = math.lcm(result, part.retention.size)
    return result


def sequence_bytes(model: ModelSpec, tokens: int, settings: PolicySettings) -> SequenceBytes:
    """Bytes of one sequence of `tokens` tokens of `model` (one rank's model) under `settings`.

    Raises:
        ValueError: a block size that the policy cannot use, or a mechanism it does not model.
    """
    if settings.policy == "paged":
        return _paged(model, tokens, settings)
    if settings.policy == "vllm":
        from kvlab.plan.unified import unified_sequence

        return unified_sequence(model, tokens, settings)
    return _ideal(model, tokens, settings.cp)


def _ideal(model: ModelSpec, tokens: int, cp: int) -> SequenceBytes:
    found: dict[str, list[int]] = {}
    for _, part in model.parts():
        if part.retention.rule != "none" and part.kind != "buffer":
            found.setdefault(retention_name(part.retention), []).append(part_bytes(part, tokens, cp))
    return SequenceBytes("ideal", tuple(GroupBytes(k, len(v), 1, 0, 0, sum(v)) for k, v in found.items()))


def encoder_tokens(parts: Iterable[CacheSpec]) -> int:
    """Encoder tokens that `parts` read; 0 when none is cross attention."""
    return max((getattr(p, "encoder_tokens", 0) for p in parts), default=0)


def _paged(model: ModelSpec, tokens: int, settings: PolicySettings) -> SequenceBytes:
    layout = pool_layout(model, settings.block_size, settings.pools)
    groups = tuple(_paged_group(layout, g, tokens, settings) for g in range(len(layout.groups)))
    return SequenceBytes("paged", groups, sum(layout.unit_bytes))


def _paged_group(layout: PoolLayout, g: int, tokens: int, settings: PolicySettings) -> GroupBytes:
    group, cost, per_unit = layout.groups[g], layout.page_bytes(g), layout.pages_per_unit[g]
    local = local_tokens(group.retention, tokens, settings.cp)
    most = group_pages(group, local, settings.in_flight + settings.rollback.slack)
    settled = group_pages(group, local, 1)
    kept = settings.rollback.most(tokens) if group.retention.rule == "state" else 0
    useful = sum(p.bytes_at(local) for p in group.parts)
    used = sum(page.used_bytes for page in group.layouts) * settled
    return GroupBytes(
        group.name, len(group.parts), group.block_size, most + kept, cost, useful,
        page_tail=used - useful, padding=settled * cost - used, reserve=(most - settled) * cost,
        kept_states=kept * cost, remainder=-(most + kept) % per_unit * cost, pages_per_unit=per_unit,
    )  # fmt: skip


def bytes_function(model: ModelSpec, settings: PolicySettings) -> Callable[[int], int]:
    """tokens -> `sequence_bytes(model, tokens, settings).total`; what does not depend on the length is done once."""
    cp = settings.cp
    if settings.policy == "vllm":
        from kvlab.plan.unified import unified_bytes_function

        return unified_bytes_function(model, settings)
    if settings.policy == "ideal":
        counts = Counter(p for _, p in model.parts() if p.kind != "buffer")
        return lambda tokens: sum(n * part_bytes(p, tokens, cp) for p, n in counts.items())
    layout = pool_layout(model, settings.block_size, settings.pools)
    return lambda tokens: sum(_paged_group(layout, g, tokens, settings).total for g in range(len(layout.groups)))
