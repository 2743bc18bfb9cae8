"""Where transformers differs from itself or from kvlab, and which of them parity follows."""

from __future__ import annotations

from typing import Any

from kvlab.lab.parity.plain import NATIVE, NOTE
from kvlab.models.facts import AttentionFacts, ModelConfig

LONGROPE = (
    "longrope: transformers chooses short or long divisors anew in every call, by that call's longest position, so that "
    "cached keys end up rotated differently from new ones; kvlab chooses once, by the longest sequence it may run. "
    "Followed: transformers' prefill of sequences that are longer than the original length"
)
PHIMOE = (
    "phimoe: transformers turns by the short divisors of longrope at every length, and takes only the factor on cosines "
    "and sines by length; followed"
)
FALCON = (
    "falcon with ALiBi: transformers' eager attention adds ALiBi to the mask and to the scores; its sdpa attention, "
    "which adds it once, is followed. Its slopes times distance are rounded to bf16, which loses nothing here, but for "
    "head counts that are no power of two, or beyond 256 tokens"
)


def notes(config: dict[str, Any], facts: ModelConfig) -> tuple[str, ...]:
    """The notes that belong to a model, in a fixed order; most have none."""
    ropes = [a.rope for layer in facts.layers for a in _attention(layer) if a.rope]
    found = [LONGROPE] if any(rope.divisors != rope.short_divisors for rope in ropes) else []
    found += [PHIMOE] if config["model_type"] == "phimoe" else []
    found += [FALCON] if config["model_type"] == "falcon" and config.get("alibi") else []
    found += [NOTE] if config["model_type"].startswith(NATIVE) else []
    return tuple(found)


def _attention(layer: Any) -> list[AttentionFacts]:
    return [b.module for b in getattr(layer, "branches", ()) if isinstance(b.module, AttentionFacts)]
