"""Bytes of one sequence under a named policy, split into what carries data and what does not.

    ideal   every byte carries data: no pages, windows hold min(n, W) tokens
    paged   this project's own allocator: one pool per group of `kvlab.specs.layout.group_parts`, whole pages,
            pages for the tokens in flight, rows padded to 16 bytes, one page per state, open buffers, a null page
    vllm    one pool and one page size for all groups: see `kvlab.plan.unified`

Every figure is an exact integer, and useful + page_tail + padding + reserve is the total, group by group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvlab.specs.layout import Group, group_parts, retention_name
from kvlab.specs.model import ModelSpec
from kvlab.specs.pages import PAGED_RULES, cdiv, most_pages
from kvlab.specs.parts import CacheSpec, Retention

POLICIES = ("ideal", "paged", "vllm")


@dataclass(frozen=True)
class PolicySettings:
    """What a policy needs to know beside the model and the length.

    Attributes:
        policy: "ideal", "paged" or "vllm".
        block_size: tokens of a page.
        in_flight: the most tokens of one sequence that one step computes (the step's token budget).
        cp: context-parallel ranks: parts that keep every token are split over them.
    """

    policy: str = "ideal"
    block_size: int = 16
    in_flight: int = 2048
    cp: int = 1

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy {self.policy!r}: must be one of {', '.join(POLICIES)}")
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
        reserve: pages held only for the tokens a step has in flight.
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

    @property
    def total(self) -> int:
        """All bytes the group takes."""
        return self.useful + self.page_tail + self.padding + self.reserve


@dataclass(frozen=True)
class SequenceBytes:
    """Bytes of one sequence under one policy. `pool_overhead` is paid once per pool, not per sequence."""

    policy: str
    groups: tuple[GroupBytes, ...]
    pool_overhead: int = 0

    @property
    def total(self) -> int:
        """Bytes of the sequence: useful + page_tail + padding + reserve."""
        return sum(g.total for g in self.groups)

    @property
    def useful(self) -> int:
        """Bytes that carry data."""
        return sum(g.useful for g in self.groups)

    @property
    def page_tail(self) -> int:
        """Bytes of rows in held pages that no retained token fills."""
        return sum(g.page_tail for g in self.groups)

    @property
    def padding(self) -> int:
        """Bytes that can never carry data."""
        return sum(g.padding for g in self.groups)

    @property
    def reserve(self) -> int:
        """Bytes held only for tokens in flight."""
        return sum(g.reserve for g in self.groups)


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


def paged_sequence_pages(group: Group, tokens: int, in_flight: int, encoder_tokens: int = 0) -> int:
    """The most pages of `group` that one sequence holds on its way to `tokens` tokens.

    At most `in_flight` tokens of it are computed in a step. A state is one page; entries of a compression ratio
    take a page when the first of them is complete; an encoder's tokens are there from the start.
    """
    rule = group.retention
    if rule.rule in PAGED_RULES:
        return most_pages(rule, group.block_size, tokens, in_flight)
    if rule.rule == "stride":
        return cdiv(tokens // rule.size, group.block_size // rule.size)
    if rule.rule == "encoder":
        return cdiv(encoder_tokens, group.block_size)
    return 1


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


def _members(model: ModelSpec, group: Group) -> list[CacheSpec]:
    by_index = {layer.index: layer for layer in model.layers}
    return [by_index[i].parts[j] for i, j in group.members]


def encoder_tokens(parts: Iterable[CacheSpec]) -> int:
    """Encoder tokens that `parts` read; 0 when none is cross attention."""
    return max((getattr(p, "encoder_tokens", 0) for p in parts), default=0)


def _paged(model: ModelSpec, tokens: int, settings: PolicySettings) -> SequenceBytes:
    found = []
    groups = group_parts(model, settings.block_size)
    for group in groups:
        parts = _members(model, group)
        local = local_tokens(group.retention, tokens, settings.cp)
        pages = paged_sequence_pages(group, local, settings.in_flight, encoder_tokens(parts))
        settled = paged_sequence_pages(group, local, 1, encoder_tokens(parts))
        useful = sum(p.bytes_at(local) for p in parts)
        used = sum(layout.used_bytes for layout in group.layouts) * settled
        padding = sum(layout.padding_bytes for layout in group.layouts) * settled
        found.append(
            GroupBytes(
                group.name, len(parts), group.block_size, pages, group.block_bytes, useful,
                page_tail=used - useful, padding=padding, reserve=(pages - settled) * group.block_bytes,
            )
        )  # fmt: skip
    return SequenceBytes("paged", tuple(found), paged_pool_bytes(groups, [1] * len(groups)))


def bytes_function(model: ModelSpec, settings: PolicySettings) -> Callable[[int], int]:
    """tokens -> `sequence_bytes(model, tokens, settings).total`; what does not depend on the length is done once."""
    cp = settings.cp
    if settings.policy == "vllm":
        from kvlab.plan.unified import unified_bytes_function

        return unified_bytes_function(model, settings)
    if settings.policy == "ideal":
        counts = Counter(p for _, p in model.parts() if p.kind != "buffer")
        return lambda tokens: sum(n * part_bytes(p, tokens, cp) for p, n in counts.items())
    terms = [(g, g.block_bytes, encoder_tokens(_members(model, g))) for g in group_parts(model, settings.block_size)]
    return lambda tokens: sum(
        size * paged_sequence_pages(g, local_tokens(g.retention, tokens, cp), settings.in_flight, encoder)
        for g, size, encoder in terms
    )
