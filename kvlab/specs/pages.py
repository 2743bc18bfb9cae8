"""How many pages a sequence holds under a retention rule: one answer for planner, allocator and widget.

A block table is positional: entry i covers tokens i * block_size .. (i + 1) * block_size - 1, whether its page is
still held or was given back. `dead_pages` says which entries no later query can read. Two rules differ. Of one entry
per r tokens ("stride") a page holds block_size / r, and is taken when the first of them is complete; nothing of it
dies. A state has no entries: its table is one page wide, taken with the sequence's first token.
"""

from __future__ import annotations

from kvlab.specs.parts import Retention

PAGED_RULES = ("all", "window", "chunk", "stride", "state")


def cdiv(a: int, b: int) -> int:
    """`a / b` rounded up."""
    return -(-a // b)


def table_pages(rule: Retention, block_size: int, tokens: int) -> int:
    """Entries of the block table that gives the first `tokens` tokens a place, given back or not.

    Raises:
        ValueError: a rule whose pages follow no sequence ("encoder", "none").
    """
    if rule.rule in ("all", "window", "chunk"):
        return cdiv(tokens, block_size)
    if rule.rule == "stride":
        return cdiv(tokens // rule.size, block_size // rule.size)
    if rule.rule == "state":
        return min(tokens, 1)
    raise ValueError(f"retention {rule.rule!r}: must be one of {', '.join(PAGED_RULES)} to have a block table")


def dead_pages(rule: Retention, block_size: int, computed: int) -> range:
    """Table entries that hold nothing a query at position `computed` or later reads.

    `computed` is the number of tokens that are certain: in the cache, verified, with no step in flight. A page that
    also holds a live token is alive.

    Raises:
        ValueError: a rule without a block table.
    """
    if rule.rule not in PAGED_RULES:
        raise ValueError(f"retention {rule.rule!r}: must be one of {', '.join(PAGED_RULES)} to have a block table")
    if rule.rule == "window":
        first_live = max(0, computed - rule.size + 1)
    elif rule.rule == "chunk":
        first_live = computed // rule.size * rule.size
    else:
        return range(0)
    return range(cdiv(rule.sinks, block_size), first_live // block_size)


def most_pages(rule: Retention, block_size: int, tokens: int, in_flight: int) -> int:
    """The most pages one sequence holds at once on its way to `tokens` tokens, at most `in_flight` new ones a step.

    A window keeps window - 1 older tokens while the step's tokens are written, and this run of tokens may start
    anywhere inside a page.
    """
    every = table_pages(rule, block_size, tokens)
    if rule.rule not in ("window", "chunk") or not tokens:
        return every
    span = min(rule.size - 1 + in_flight, tokens)
    return min(every, cdiv(span - 1, block_size) + 1 + cdiv(rule.sinks, block_size))
