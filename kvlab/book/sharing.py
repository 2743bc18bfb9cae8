"""A model with the caches of its layers redirected: what cross-layer sharing does to one that was not trained for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import Shared


def share_spec(spec: ModelSpec, every: int = 2) -> ModelSpec:
    """The cache of `spec` when only each `every`th layer, from the first on, owns one and the others read the last owner's.

    Raises:
        ValueError: every is under 1.
    """
    if every < 1:
        raise ValueError(f"every {every}: must be at least 1")
    layers = (x if x.index % every == 0 else LayerSpec(x.index, (Shared(_owner(x.index, every)),)) for x in spec.layers)
    return replace(spec, layers=tuple(layers))


def share_layers(model: Any, every: int = 2) -> Any:
    """`model`, a LoadedModel of plain attention layers, with caches shared as in `share_spec`; the weights are its own.

    Raises:
        ValueError: as `share_spec`.
    """
    from kvlab.models.decoder import Decoder
    from kvlab.models.facts import AttentionFacts
    from kvlab.models.weights import Source

    def redirected(facts: Any, layer: int) -> Any:
        if layer % every and isinstance(facts, AttentionFacts):
            return replace(facts, source=_owner(layer, every))
        return facts

    spec = share_spec(model.spec, every)
    layers = tuple(
        replace(
            x, steps=tuple(tuple(replace(b, module=redirected(b.module, i)) for b in step) for step in x.steps)
        )
        for i, x in enumerate(model.config.layers)
    )  # fmt: skip
    config = replace(model.config, layers=layers)
    source = Source(dict(model.decoder.weights.named), model.decoder.dtype, model.device, copy=False)
    return replace(model, spec=spec, config=config, decoder=Decoder(config, source, spec))


def _owner(layer: int, every: int) -> int:
    return layer - layer % every
