"""What a group's pages are for: tokens that stay, or only those of the step that is being computed.

A window keeps few tokens, but a step of many tokens writes all of them before the older ones can go. With a tiny window
and a large step nearly all its pages are there for that moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.specs.layout import Group
from kvlab.specs.pages import cdiv, dead_pages, most_pages, table_pages

WARN_ABOVE = 0.5


@dataclass(frozen=True)
class Reserve:
    """Pages of one group for one sequence.

    Attributes:
        group: its name.
        most_pages: at the fullest moment of a step.
        kept_pages: the most that stay between steps.
        page_bytes: of one page over the group's layers.
    """

    group: str
    most_pages: int
    kept_pages: int
    page_bytes: int

    @property
    def share(self) -> float:
        """Part of the group's bytes that only tokens in flight need."""
        return (self.most_pages - self.kept_pages) / self.most_pages if self.most_pages else 0.0

    @property
    def warning(self) -> str:
        """A sentence when more than half of the bytes are for tokens in flight, else ""."""
        if self.share <= WARN_ABOVE:
            return ""
        reserve = (self.most_pages - self.kept_pages) * self.page_bytes
        return (
            f"group {self.group}: {self.share:.0%} of its bytes, {reserve:,} a sequence, are for tokens in flight; "
            f"a smaller max_batched_tokens needs less"
        )


def in_flight_reserve(groups: Sequence[Group], tokens: int, in_flight: int) -> list[Reserve]:
    """The pages of each paged group for a sequence of `tokens` tokens, at most `in_flight` of them in one step."""
    found = []
    for group in groups:
        rule, size = group.retention, group.block_size
        if rule.rule in ("encoder", "none"):
            continue
        most = most_pages(rule, size, tokens, in_flight)
        kept = table_pages(rule, size, tokens) - len(dead_pages(rule, size, tokens))
        if rule.rule in ("window", "chunk"):
            # wherever the window starts inside a page
            kept = max(kept, min(most, cdiv(rule.size - 2, size) + 1 + cdiv(rule.sinks, size)))
        found.append(Reserve(group.name, most, kept, group.block_bytes))
    return found
