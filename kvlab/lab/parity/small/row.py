"""The row of a family, and the sizes that all rows use."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.models.facts import ModelConfig

TESTED_TOKENS = 41  # the longest sequence parity runs
HEAD_DIM = 16
WINDOW = 7
VOCAB = 131

Changes = dict[str, Any]


def layer_kinds(config: dict[str, Any], facts: ModelConfig) -> Sequence[Hashable]:
    """What sets the layers of a model apart: all their facts."""
    return list(facts.layers)


@dataclass(frozen=True)
class Small:
    """How a family is made small.

    Attributes:
        widths: (config, facts) -> new values of the fields that are the same for all layers.
        layers: (config, facts, kept layers) -> new values of the fields that say what each layer is.
        kinds: (config, facts) -> one value per layer, equal where layers are of the same kind.
    """

    widths: Callable[[dict[str, Any], ModelConfig], Changes]
    layers: Callable[[dict[str, Any], ModelConfig, tuple[int, ...]], Changes]
    kinds: Callable[[dict[str, Any], ModelConfig], Sequence[Hashable]] = layer_kinds
