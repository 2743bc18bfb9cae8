"""How far sequences can be taken back, and which states are kept on the way.

Keys and values are taken back by forgetting them. A recurrent state holds every token it has seen, so an earlier one
must have been kept: a copy of the state's page, made when the sequence had exactly that many tokens. From the newest
copy that is old enough the tokens up to the wanted length are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RollbackPolicy:
    """What is kept for stepping back. By default nothing is: windows give pages back at once, no state is copied.

    Attributes:
        tokens: a step back of up to this many tokens is always possible; pages behind windows stay that much longer.
        checkpoint_tokens: the state is copied whenever a sequence reaches a multiple of this; 0: never.
        checkpoint_prompt: the state is copied before the prompt's last token, where another answer to it starts: that
            token is always computed again, to pick what follows it.
        checkpoints_kept: the newest copies that stay; 0: all.
        before_drafts: the state is copied before drafted tokens are computed, for the length of a step.

    Raises:
        ValueError: a negative number, or fewer copies than `tokens` needs.
    """

    tokens: int = 0
    checkpoint_tokens: int = 0
    checkpoint_prompt: bool = False
    checkpoints_kept: int = 0
    before_drafts: bool = False

    def __post_init__(self) -> None:
        for name in ("tokens", "checkpoint_tokens", "checkpoints_kept"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)}: must be 0 or positive")
        if self.tokens and self.checkpoint_tokens and self.checkpoints_kept:
            # the prompt's copy may push out one that a step back needs
            least = -(-self.tokens // self.checkpoint_tokens) + 1 + self.checkpoint_prompt
            if self.checkpoints_kept < least:
                raise ValueError(
                    f"checkpoints_kept {self.checkpoints_kept}: steps back of {self.tokens} tokens over states copied "
                    f"every {self.checkpoint_tokens} tokens need {least}"
                )

    def check(self, states: Sequence[str]) -> None:
        """Refuses steps back over states of which no copies are made.

        Args:
            states: where a model has them, for the message: "group state", "layer 0".

        Raises:
            ValueError: there are some, and nothing to step back to.
        """
        if states and self.tokens and not self.checkpoint_tokens:
            raise ValueError(
                f"rollback: tokens {self.tokens} needs checkpoint_tokens, the states of {states[0]} step back to "
                "copies alone"
            )

    @property
    def slack(self) -> int:
        """Tokens by which windows give pages back later: a step back may begin to compute at an earlier copy."""
        return self.tokens + max(0, self.checkpoint_tokens - 1) if self.tokens else 0

    def at(self, tokens: int, prompt: int) -> bool:
        """Whether the state is copied when a sequence with `prompt` prompt tokens has `tokens`."""
        every = self.checkpoint_tokens
        return tokens > 0 and bool((every and tokens % every == 0) or (self.checkpoint_prompt and tokens == prompt - 1))

    def next_after(self, tokens: int, prompt: int) -> int | None:
        """The first length above `tokens` at which the state is copied; None when there is none."""
        every = self.checkpoint_tokens
        found = [(tokens // every + 1) * every] if every else []
        if self.checkpoint_prompt and tokens < prompt - 1:
            found.append(prompt - 1)
        return min(found, default=None)

    def most(self, tokens: int) -> int:
        """The most copies a sequence holds at once on its way to `tokens` tokens."""
        count = tokens // self.checkpoint_tokens if self.checkpoint_tokens else 0
        count += self.checkpoint_prompt and tokens > 1
        return (min(count, self.checkpoints_kept) if self.checkpoints_kept else count) + self.before_drafts


NOTHING_KEPT = RollbackPolicy()
"""The default: no step back that needs anything but forgetting entries that are still held."""
