"""The proof that parity can see: each fact of a model changed alone, after which parity must fail.

Facts say themselves how they may be changed (`kvlab.models.facts.fact`), so a new mechanism is covered by writing down
its facts. One change is made wherever its fact occurs: the window of every layer, the eps of every norm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvlab.models.decoder import Decoder
from kvlab.models.facts import AttentionFacts, ModelConfig
from kvlab.models.load import DTYPES, LoadedModel
from kvlab.models.weights import Source

State = dict[str, Tensor]
Mutant = tuple[ModelConfig, State]
FAR = 10**6


def mutants(config: ModelConfig, state: State) -> Iterator[tuple[str, Mutant]]:
    """(what was changed, the config and weights after it) for every fact that this model has.

    Args:
        state: tensors under the names that modules ask for.
    """
    for label, change in _changes(config):
        yield label, (change, state)
    yield from _rotations(config, state)
    if not config.head.tied:
        yield "head tied to the embedding", (config, state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    if (table := state.get("model.embed_positions.weight")) is not None:
        yield "positions moved by one", (config, state | {"model.embed_positions.weight": table.roll(1, dims=0)})
    if rolled := _rolled_heads(config, state):
        yield "KV heads in another order", (config, state | rolled)
    yield from _tensors(config, state)


def _changes(config: ModelConfig) -> Iterator[tuple[str, ModelConfig]]:
    """(label, changed config) for every change that alters at least one record of `config`."""
    seen = set()
    for record in _records(config):
        kind = type(record)
        for field in dataclasses.fields(record):
            for label, _ in _alternatives(field, getattr(record, field.name)):
                name = f"{kind.__name__.removesuffix('Facts')}.{field.name} {label}"
                if name not in seen:
                    seen.add(name)
                    yield name, _everywhere(config, kind, field, label)


def _alternatives(field: dataclasses.Field, value: Any) -> Iterator[tuple[str, Any]]:
    """(label, changed value) for a field of that value; nothing where the fact is not in use."""
    how = field.metadata.get("mutate", "keep")
    if how == "scale" or (how == "scale if set" and value != field.default):
        if value:
            yield "+ 10 %", round(1.1 * value) if isinstance(value, int) else 1.1 * value
    elif how == "eightfold" and value:
        # what counts is its logarithm, rounded to a whole number of pairs by YaRN
        yield "times 8", 8 * value
    elif how == "each scaled" and value:
        yield "+ 10 %", tuple(1.1 * x for x in value)
    elif how == "twice":
        yield "doubled", 2 * value
    elif how == "length" and value:
        yield "+ 1", value + 1
        yield "- 1", value - 1
        yield "left out", FAR
    elif how == "off" and value != field.default:
        yield "left out", field.default
    elif how == "flip":
        yield "flipped", not value
    elif how == "activation" and value:
        yield "changed", "gelu" if value == "silu" else "silu"
    elif how == "other" and value:
        yield "+ 1", value + 1
    elif how == "halved or doubled":
        # a divisor that stays one
        yield "changed", value // 2 if value % 2 == 0 else 2 * value
    elif how.startswith("one of "):
        yield "changed", next(v for v in how.removeprefix("one of ").split(", ") if v != value)


def _records(value: Any) -> Iterator[Any]:
    """Every facts record inside `value`, itself first."""
    if dataclasses.is_dataclass(value):
        yield value
        for field in dataclasses.fields(value):
            yield from _records(getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from _records(item)


def _everywhere(value: Any, kind: type, field: dataclasses.Field, label: str) -> Any:
    """`value` with that change made in every record of type `kind` where it applies."""
    if isinstance(value, tuple):
        return tuple(_everywhere(item, kind, field, label) for item in value)
    if not dataclasses.is_dataclass(value):
        return value
    inner = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    new = {name: _everywhere(item, kind, field, label) for name, item in inner.items()}
    if type(value) is kind:
        new[field.name] = dict(_alternatives(field, inner[field.name])).get(label, inner[field.name])
    return replace(value, **new)  # type: ignore[type-var]


def _attention_layers(config: ModelConfig) -> list[tuple[int, AttentionFacts]]:
    return [(i, r) for i, layer in enumerate(config.layers) for r in _records(layer) if isinstance(r, AttentionFacts)]


def _rotations(config: ModelConfig, state: State) -> Iterator[tuple[str, Mutant]]:
    """The first layer's rotation flipped, and every layer rotated where some are not."""
    attention = _attention_layers(config)
    rope = next((a.rope for _, a in attention if a.rope), None)
    if rope is None:
        return

    def with_ropes(chosen: Callable[[int, AttentionFacts], Any]) -> ModelConfig:
        changed = [
            _replace_record(layer, AttentionFacts, lambda a, i=i: replace(a, rope=chosen(i, a)))
            for i, layer in enumerate(config.layers)
        ]
        return replace(config, layers=tuple(changed))

    first = attention[0][0]
    flipped = with_ropes(lambda i, a: a.rope if i != first else (None if a.rope else rope))
    yield "first layer's rotation flipped", (flipped, state)
    if any(a.rope is None for _, a in attention):
        yield "every layer rotated", (with_ropes(lambda i, a: a.rope or rope), state)


def _replace_record(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple):
        return tuple(_replace_record(item, kind, change) for item in value)
    if not dataclasses.is_dataclass(value):
        return value
    if isinstance(value, kind):
        return change(value)
    new = {f.name: _replace_record(getattr(value, f.name), kind, change) for f in dataclasses.fields(value)}
    return replace(value, **new)  # type: ignore[type-var]


def _rolled_heads(config: ModelConfig, state: State) -> State:
    """Keys and values of every layer with their heads moved on by one; nothing where no layer has two KV heads."""
    rolled = {}
    for i, a in _attention_layers(config):
        for name, width in (("k_proj", a.key_dim), ("v_proj", a.value_dim)):
            key = f"model.layers.{i}.{a.prefix}.{name}.weight"
            if a.num_kv_heads > 1 and key in state:
                rolled[key] = state[key].roll(width, dims=0)
    return rolled


def _tensors(config: ModelConfig, state: State) -> Iterator[tuple[str, Mutant]]:
    """Each vector of one layer of each kind by itself: a bias zeroed, any other set to one, and the last norm's.

    Without rotation a key bias adds the same to every score and changes nothing: such a one is left out.
    """
    firsts = {layer: i for i, layer in reversed(list(enumerate(config.layers)))}
    unrotated = {i for i, a in _attention_layers(config) if a.rope is None}
    wanted = tuple(f"model.layers.{i}." for i in sorted(firsts.values()))
    for name, tensor in state.items():
        if not name.startswith((*wanted, "model.norm.", "model.embed_norm.")):
            continue
        blind = name.endswith("k_proj.bias") and int(name.split(".")[2]) in unrotated
        if name.endswith("bias") and not blind:
            yield f"{name} zeroed", (config, state | {name: torch.zeros_like(tensor)})
        elif tensor.dim() == 1 and not blind:
            yield f"{name} set to one", (config, state | {name: torch.ones_like(tensor)})


def mutated(model: LoadedModel, mutant: Mutant) -> LoadedModel:
    """`model` with the decoder of `mutant`; the pages stay as the unchanged spec has them."""
    config, state = mutant
    decoder = Decoder(config, Source(state, DTYPES[model.dtype], model.device), model.spec)
    return replace(model, config=config, decoder=decoder)
