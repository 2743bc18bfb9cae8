"""Model families as rows of facts: what differs from one `model_type` to the next, and nothing else.

`model_config` turns a config.json into the facts that the decoder runs by, `renamed` a checkpoint's names into those
that the modules ask for (Llama's, wherever a mechanism is Llama's).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from kvlab.models.facts import ModelConfig
from kvlab.models.families import (
    classic,
    compressed,
    delta,
    dense,
    hybrids,
    latent,
    linear,
    linear_rwkv,
    mamba,
    mamba_hybrids,
    moe,
    shared,
    windows,
)
from kvlab.models.families.common import Cut, Family
from kvlab.models.families.reader import ConfigReader

FAMILIES: dict[str, Family] = {
    **dense.FAMILIES, **classic.FAMILIES, **windows.FAMILIES, **delta.FAMILIES, **moe.FAMILIES, **latent.FAMILIES,
    **compressed.FAMILIES, **linear.FAMILIES, **linear_rwkv.FAMILIES, **shared.FAMILIES, **mamba.FAMILIES,
    **mamba_hybrids.FAMILIES, **hybrids.FAMILIES,
}  # fmt: skip


def family_name(config: Mapping[str, Any]) -> str:
    """The row that runs `config`: that of its text part for a multimodal wrapper.

    Raises:
        ValueError: none does; the message names the type and lists those the engine runs.
    """
    from kvlab.specs.families.multimodal import text_part
    from kvlab.specs.weights.reader import family_of

    model_type = config.get("model_type")
    if isinstance(model_type, str):
        name = family_of(text_part(config)[1])
        if name in FAMILIES:
            return name
    raise ValueError(f"model_type {model_type!r}: the engine runs {', '.join(sorted(FAMILIES))}")


def reader(config: Mapping[str, Any]) -> ConfigReader:
    """The reader of `config` with its family's defaults."""
    return ConfigReader(config, FAMILIES[family_name(config)].defaults)


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """The facts of the model that `config`, a parsed config.json, stands for.

    Raises:
        ValueError: a family, rotary scaling or activation the engine does not run, or a missing field.
    """
    family = FAMILIES[family_name(config)]
    if config.get("quantization_config"):
        raise ValueError("quantization_config: the engine loads unquantized weights only")
    return family.build(ConfigReader(config, family.defaults))


TEXT_PART = re.compile(r"(?:model\.)?language_model\.(?:model\.)?(?!lm_head)")


def text_name(name: str) -> str | None:
    """The name that a multimodal checkpoint's tensor has in its text model; None for what belongs to other parts."""
    if TEXT_PART.match(name):
        return TEXT_PART.sub("model.", name, count=1)
    return "lm_head.weight" if name.endswith("lm_head.weight") else None


class Renamed(Mapping[str, Tensor]):
    """A checkpoint under the names that modules ask for; tensors are cut when they are asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        self._family, self._reader = FAMILIES[family_name(config)], reader(config)
        self._tensors = tensors
        self._places: dict[str, tuple[str, Cut | None]] = {}
        wrapped = any(TEXT_PART.match(name) for name in tensors)
        for stored in tensors:
            name = text_name(stored) if wrapped else stored
            if name is not None:
                self._place(name, stored)

    def _place(self, name: str, stored: str) -> None:
        if any(re.search(pattern, name) for pattern in self._family.ignored):
            return
        for pattern, targets in self._family.names:
            if match := re.fullmatch(pattern, name):
                self._places.update({match.expand(template): (stored, cut) for template, cut in targets})
                return
        self._places[name] = (stored, None)

    def __getitem__(self, name: str) -> Tensor:
        source, cut = self._places[name]
        tensor = self._tensors[source]
        return tensor if cut is None else cut(tensor, self._reader)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places


def renamed(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """`tensors` (checkpoint name -> tensor) under the names that modules ask for."""
    family = FAMILIES[family_name(config)]
    plain = not family.names and not family.ignored and not any(TEXT_PART.match(name) for name in tensors)
    return tensors if plain else Renamed(tensors, config)
