"""A config made small enough to run in a second, with every mechanism still at work.

Widths, heads, vocabulary and layers shrink; so does every length (window, original_max_position), to where it
binds within the tested tokens. A ratio that a mechanism depends on (query heads per KV head, explicit head_dim
against hidden_size / heads, frequency bands of a rotary scaling) is kept.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.models.config import ModelConfig

TESTED_TOKENS = 41  # the longest sequence parity runs
HEAD_DIM = 16
WINDOW = 7
VOCAB = 131


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
    """`config` made small; all layers are kept with `all_layers`, else one period of their pattern and odd ends.

    Raises:
        ValueError: the engine does not run this architecture.
    """
    facts = ModelConfig.from_hf(config)
    kinds = list(zip([w > 0 for w in facts.windows], facts.rotated, strict=True))
    kept = tuple(range(len(kinds))) if all_layers else keep_layers(kinds)
    new = dict(config)
    new.update(_widths(config, facts))
    new.update(_layers(config, facts, kept))
    # inside the small vocabulary, and no padding row: it would be zero in the embedding
    new.update({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None})
    _rotary(new, facts)
    names = [*config, *(name for name in new if name not in config)]
    changes = tuple((n, config.get(n), new.get(n)) for n in names if new.get(n) != config.get(n))
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


def _widths(config: dict[str, Any], facts: ModelConfig) -> dict[str, Any]:
    """Heads in their ratio, a small head_dim, and a hidden size that is heads * head_dim only where it was."""
    per_kv = facts.num_query_heads // facts.num_kv_heads
    kv_heads = min(facts.num_kv_heads, 2 if per_kv > 1 else 4)
    heads = kv_heads * per_kv
    explicit = facts.head_dim * facts.num_query_heads != facts.hidden_size
    hidden = heads * (HEAD_DIM - 6 if explicit else HEAD_DIM)
    new = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": hidden + 2 * HEAD_DIM,
        "vocab_size": VOCAB,
    }
    return new | ({"head_dim": HEAD_DIM} if explicit or config.get("head_dim") else {})


def _layers(config: dict[str, Any], facts: ModelConfig, kept: tuple[int, ...]) -> dict[str, Any]:
    """The kept layers' share of every per-layer fact, written out in full."""
    new: dict[str, Any] = {"num_hidden_layers": len(kept)}
    if any(facts.windows):
        new["sliding_window"] = WINDOW
    if config.get("layer_types") or len(set(facts.windows)) > 1:
        new["layer_types"] = ["sliding_attention" if facts.windows[i] else "full_attention" for i in kept]
    if "max_window_layers" in config:
        new["max_window_layers"] = sum(facts.windows[i] == 0 for i in kept)
    if not all(facts.rotated):
        new["no_rope_layers"] = [int(facts.rotated[i]) for i in kept]
    return new


def _rotary(new: dict[str, Any], facts: ModelConfig) -> None:
    """The length that a rotary scaling refers to, moved so that each of its bands holds a frequency."""
    new["max_position_embeddings"] = 2 * TESTED_TOKENS
    if facts.rope.kind != "llama3":
        return
    # the second wavelength is blended, shorter ones are kept and longer ones stretched
    wavelength = 2 * math.pi * facts.rope.theta ** (2 / HEAD_DIM)
    original = round(wavelength * math.sqrt(facts.rope.low_freq_factor * facts.rope.high_freq_factor))
    name = "rope_parameters" if new.get("rope_parameters") else "rope_scaling"
    new[name] = new[name] | {"original_max_position_embeddings": original}
    new.pop("original_max_position_embeddings", None)
