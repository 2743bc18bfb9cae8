"""How many pages a sequence holds under a retention rule: one answer for planner, allocator and widget.

A block table is positional: entry i covers tokens i * block_size .. (i + 1) * block_size - 1, whether its page is
still held or was given back. `dead_pages` says which entries no later query can read.
"""

from __future__ import annotations

from kvlab.specs.parts import Retention

PAGED_RULES = ("all", "window", "chunk")


def cdiv(a: int, b: int) -> int:
    """`a / b` rounded up."""
    return -(-a // b)


def dead_pages(rule: Retention, block_size: int, computed: int) -> range:
    """Table entries that hold nothing a query at position `computed` or later reads.

    `computed` is the number of tokens that are certain: in the cache, verified, with no step in flight. A page that
    also holds a live token is alive.

    Raises:
        ValueError: a rule whose pages are not laid out by position.
    """
    if rule.rule == "all":
        return range(0)
    if rule.rule == "window":
        first_live = max(0, computed - rule.size + 1)
    elif rule.rule == "chunk":
        first_live = computed // rule.size * rule.size
    else:
        raise ValueError(f"retention {rule.rule!r}: pages are laid out by position for {', '.join(PAGED_RULES)} only")
    return range(cdiv(rule.sinks, block_size), first_live // block_size)


def most_pages(rule: Retention, block_size: int, tokens: int, in_flight: int) -> int:
    """The most pages one sequence holds at once on its way to `tokens` tokens, at most `in_flight` new ones a step.

    A window keeps window - 1 older tokens while the step's tokens are written, and this run of tokens may start
    anywhere inside a page.
    """
    every = cdiv(tokens, block_size)
    if rule.rule == "all" or not tokens:
        return every
    if rule.rule not in PAGED_RULES:
        raise ValueError(f"retention {rule.rule!r}: pages are laid out by position for {', '.join(PAGED_RULES)} only")
    span = min(rule.size - 1 + in_flight, tokens)
    return min(every, cdiv(span - 1, block_size) + 1 + cdiv(rule.sinks, block_size))
