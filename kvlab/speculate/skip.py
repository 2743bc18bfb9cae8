"""A draft model for nothing: some layers of the model itself, with its embedding, final norm and output matrix.

Source: Zhang et al. 2024, Draft & Verify; Elhoushi et al. 2024, LayerSkip (which trains models for it).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from kvlab.models.load import LoadedModel
from kvlab.models.modules.base import PageMap
from kvlab.models.plain_stack import PlainStack
from kvlab.specs.parts import Shared


def skip_layers(model: LoadedModel, keep: Sequence[int]) -> LoadedModel:
    """`model` with the layers `keep` alone: the same tensors, and a cache of those layers only.

    Raises:
        ValueError: no layer, one that is not there, an order that is not the model's, or a layer that reads the cache
            of one left out.
    """
    count = len(model.spec.layers)
    if not keep or list(keep) != sorted(set(keep)) or not 0 <= keep[0] <= keep[-1] < count:
        raise ValueError(f"keep {list(keep)}: must be layers from 0 to {count - 1} in the model's order")
    layers = tuple(model.spec.layers[i] for i in keep)
    for layer in layers:
        for part in layer.parts:
            if isinstance(part, Shared) and part.source not in keep:
                raise ValueError(f"keep {list(keep)}: layer {layer.index} reads the cache of layer {part.source}")
    spec = replace(model.spec, name=f"{model.name}, {len(keep)} of {count} layers", layers=layers)
    decoder = copy.copy(model.decoder)
    decoder.layers = [model.decoder.layers[i] for i in keep]
    decoder._plain = PlainStack.of(decoder.layers)
    decoder._pages = PageMap(spec)
    return replace(model, spec=spec, decoder=decoder, name=spec.name)


def spread(count: int, kept: int) -> list[int]:
    """`kept` of `count` layers, the first and the last of them and the rest evenly between.

    Raises:
        ValueError: fewer than 2 layers, or more than there are.
    """
    if not 2 <= kept <= count:
        raise ValueError(f"kept {kept}: must be from 2 to the model's {count} layers")
    return [round(i * (count - 1) / (kept - 1)) for i in range(kept)]
