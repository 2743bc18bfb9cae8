"""A config made small enough to run in a second, with every mechanism still at work.

How a family is made small is its row in `kvlab.lab.parity.small`; here is what all share: which layers are kept.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.lab.parity.small import small
from kvlab.lab.parity.small.row import HEAD_DIM, TESTED_TOKENS, VOCAB, WINDOW
from kvlab.models.facts import ModelConfig
from kvlab.specs.families.multimodal import text_part

__all__ = ["HEAD_DIM", "TESTED_TOKENS", "VOCAB", "WINDOW", "Shrunk", "keep_layers", "shrink"]


@dataclass(frozen=True)
class Shrunk:
    """A small config and how it came to be.

    Attributes:
        config: like a config.json.
        changes: (field, old value, new value), in the order of the fields.
        kept_layers: indices of the layers that were kept.
    """

    config: dict[str, Any]
    changes: tuple[tuple[str, Any, Any], ...]
    kept_layers: tuple[int, ...]


def shrink(config: dict[str, Any], *, all_layers: bool = False) -> Shrunk:
    """`config` (of a wrapper its text part) made small; all layers are kept with `all_layers`, else one period of
    their pattern and odd ends.

    Raises:
        ValueError: the engine does not run this architecture.
    """
    # how a published checkpoint is stored says nothing about what the layers compute
    config = {name: value for name, value in config.items() if name != "quantization_config"}
    facts, row = ModelConfig.from_hf(config), small(config)
    text, model_type = text_part(config)
    config = {**text, "model_type": model_type}
    kinds = list(row.kinds(config, facts))
    kept = tuple(range(len(kinds))) if all_layers else keep_layers(kinds)
    # inside the small vocabulary, and no padding row: it would be zero in the embedding
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    new = config | row.widths(config, facts) | row.layers(config, facts, kept) | tokens
    changes = tuple((n, config.get(n), new.get(n)) for n in new if new.get(n) != config.get(n))
    return Shrunk(new, changes, kept)


def keep_layers(kinds: Sequence[Hashable]) -> tuple[int, ...]:
    """Indices of the layers that show the whole pattern of `kinds`, at least two where there are two.

    Either one period and the odd layers before and after the periodic stretch, or at most two layers of each run
    of equal kinds; whichever is shorter.
    """
    n = len(kinds)
    candidates = [tuple(range(n)), _run_ends(kinds)]
    for period in range(1, n // 2 + 1):
        for head in range(n - 2 * period + 1):
            end = head + period
            while end < n and kinds[end] == kinds[end - period]:
                end += 1
            # whole periods only: what is left over at the end is odd
            end -= (end - head) % period
            if end - head >= 2 * period:
                candidates.append((*range(head + period), *range(end, n)))
    best = min(candidates, key=len)
    return best if len(best) > 1 or n == 1 else (0, 1)


def _run_ends(kinds: Sequence[Hashable]) -> tuple[int, ...]:
    return tuple(i for i in range(len(kinds)) if i < 2 or not kinds[i] == kinds[i - 1] == kinds[i - 2])
