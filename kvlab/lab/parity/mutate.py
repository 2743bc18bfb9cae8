"""The proof that parity can see: each fact of a family changed alone, after which parity must fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvlab.models.config import ModelConfig
from kvlab.models.decoder import Decoder
from kvlab.models.load import DTYPES, LoadedModel

State = dict[str, Tensor]
Mutant = tuple[ModelConfig, State]


def mutants(config: ModelConfig, state: State) -> Iterator[tuple[str, Mutant]]:
    """(what was changed, the config and weights after it) for every fact that this model has."""
    yield from _rotary(config, state)
    yield from _windows(config, state)
    yield "norm eps doubled", (replace(config, norm_eps=2 * config.norm_eps), state)
    yield "attention scale + 2 %", (replace(config, scale=1.02 * config.scale), state)
    yield "another activation", (replace(config, activation="gelu" if config.activation == "silu" else "silu"), state)
    if config.qk_norm:
        kept = {k: v for k, v in state.items() if "q_norm" not in k and "k_norm" not in k}
        yield "QK norm left out", (replace(config, qk_norm=False), kept)
    if not config.tie_embeddings:
        yield "head tied to the embedding", (config, state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    if config.num_kv_heads > 1:
        yield "KV heads in another order", (config, state | _rolled_heads(config, state))
    yield from _tensors(config, state)


def _rotary(config: ModelConfig, state: State) -> Iterator[tuple[str, Mutant]]:
    rope = config.rope

    def changed(**facts: float | str) -> Mutant:
        return replace(config, rope=replace(rope, **facts)), state  # type: ignore[arg-type]

    yield "rope theta + 10 %", changed(theta=1.1 * rope.theta)
    if rope.kind != "default":
        yield "rope scaling left out", changed(kind="default")
        yield "rope factor + 10 %", changed(factor=1.1 * rope.factor)
    if rope.kind == "llama3":
        yield "rope low_freq_factor + 10 %", changed(low_freq_factor=1.1 * rope.low_freq_factor)
        yield "rope high_freq_factor + 10 %", changed(high_freq_factor=1.1 * rope.high_freq_factor)
        yield (
            "rope original_max_position + 10 %",
            changed(original_max_position=round(1.1 * rope.original_max_position)),
        )
    if not all(config.rotated):
        yield "every layer rotated", (replace(config, rotated=(True,) * config.num_layers), state)
    yield (
        "first layer's rotation flipped",
        (replace(config, rotated=(not config.rotated[0], *config.rotated[1:])), state),
    )


def _windows(config: ModelConfig, state: State) -> Iterator[tuple[str, Mutant]]:
    def moved(by: Callable[[int], int]) -> Mutant:
        return replace(config, windows=tuple(by(w) if w else 0 for w in config.windows)), state

    if any(config.windows):
        yield "window + 1", moved(lambda w: w + 1)
        yield "window - 1", moved(lambda w: w - 1)
        yield "window left out", moved(lambda w: 10**6)


def _rolled_heads(config: ModelConfig, state: State) -> State:
    """Keys and values of every layer with their heads moved on by one."""
    names = [n for n in state if ".k_proj." in n or ".v_proj." in n]
    return {n: state[n].roll(config.head_dim, dims=0) for n in names}


def _tensors(config: ModelConfig, state: State) -> Iterator[tuple[str, Mutant]]:
    """Each vector of one layer by itself: a bias zeroed, a norm set to one.

    The layer is one that rotates: without rotation a key bias adds the same to every score and changes nothing.
    """
    layer = config.rotated.index(True)
    for name, tensor in state.items():
        if not (name.startswith(f"model.layers.{layer}.") or name == "model.norm.weight"):
            continue
        if name.endswith(".bias"):
            yield f"{name} zeroed", (config, state | {name: torch.zeros_like(tensor)})
        elif tensor.dim() == 1:
            yield f"{name} set to one", (config, state | {name: torch.ones_like(tensor)})


def mutated(model: LoadedModel, mutant: Mutant) -> LoadedModel:
    """`model` with the decoder of `mutant`; the pages stay as the unchanged spec has them."""
    config, state = mutant
    decoder = Decoder(config, DTYPES[model.dtype], model.device)
    # a changed window must not change which block table a layer reads
    decoder.layer_groups = model.decoder.layer_groups
    return replace(model, config=config, decoder=decoder.load(state.items()))
