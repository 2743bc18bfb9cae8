"""RWKV-4's layer: a running average in place of attention, and both halves mix each token with the one before it.

Names within a layer: `ln1`, `ln2`; `attention.{key,value,receptance,output}`, `attention.time_mix_*`,
`attention.time_decay`, `attention.time_first`; `feed_forward.{key,receptance,value}`, `feed_forward.time_mix_*`.

Source: RWKV (arXiv 2305.13048), section 3; transformers 5.24.0 modeling_rwkv.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.models.facts import NormFacts
from kvlab.models.modules.base import Place, StepContext, WholeContext
from kvlab.models.modules.norm import reference as norm
from kvlab.models.weights import Names, Scope
from kvlab.ops.conv1d import causal_conv1d
from kvlab.ops.rwkv import reference as average_reference
from kvlab.ops.rwkv import running_average

Shift = Callable[[Tensor, int], Tensor]
Average = Callable[[Tensor, Tensor, tuple[Tensor, Tensor]], Tensor]


@dataclass(frozen=True)
class RwkvLayerFacts:
    """One layer.

    Attributes:
        inner: channels of the running average. intermediate: of the feed-forward part.
        norm: of both halves.
    """

    inner: int
    intermediate: int
    norm: NormFacts

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """The layer's tensors."""
        mixes = [f"attention.time_mix_{n}" for n in ("key", "value", "receptance")]
        mixes += [f"feed_forward.time_mix_{n}" for n in ("key", "receptance")]
        norms = [f"{n}.{kind}" for n in ("ln1", "ln2") for kind in ("weight", "bias")]
        return {name: (hidden,) for name in (*norms, *mixes)} | {
            "attention.time_decay": (self.inner,), "attention.time_first": (self.inner,),
            "attention.key.weight": (self.inner, hidden), "attention.value.weight": (self.inner, hidden),
            "attention.receptance.weight": (self.inner, hidden), "attention.output.weight": (hidden, self.inner),
            "feed_forward.key.weight": (self.intermediate, hidden),
            "feed_forward.receptance.weight": (hidden, hidden),
            "feed_forward.value.weight": (hidden, self.intermediate),
        }  # fmt: skip


class RwkvLayer:
    """Call it on the stream [T, hidden]; keeps two inputs per channel, and a numerator, denominator and logarithm."""

    def __init__(self, facts: RwkvLayerFacts, source: Scope, hidden: int, index: int) -> None:
        self.facts, self.place, self.hidden = facts, Place(index), hidden
        self.weights = {name: source.take(name, *shape) for name, shape in facts.shapes(hidden).items()}
        # a convolution over two tokens that takes the earlier one as it is
        self.before = torch.tensor([1.0, 0.0], dtype=source.dtype, device=source.device).expand(hidden, 2)

    def __call__(self, stream: Tensor, step: StepContext) -> Tensor:
        views, batch = step.part(self.place)

        def shift(x: Tensor, half: int) -> Tensor:
            inputs = views["conv"][:, half * self.hidden : (half + 1) * self.hidden]
            return causal_conv1d(x, self.before, None, inputs, batch)

        def average(key: Tensor, value: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
            return running_average(key, value, weights, views["state"], batch)

        return _layer(self.facts, self.weights, stream, shift, average)


def layer_reference(facts: RwkvLayerFacts, weights: Names, stream: Tensor, whole: WholeContext) -> Tensor:
    """The layer over a whole sequence, every token's weight for every earlier one written out."""

    def shift(x: Tensor, half: int) -> Tensor:
        return torch.cat((torch.zeros_like(x[:1]), x[:-1]))

    def average(key: Tensor, value: Tensor, parts: tuple[Tensor, Tensor]) -> Tensor:
        return average_reference.scan((key, value), parts, key.new_zeros(3, key.shape[1]))[0]

    return _layer(facts, weights, stream, shift, average)


def _layer(f: RwkvLayerFacts, w: Mapping[str, Tensor], stream: Tensor, shift: Shift, average: Average) -> Tensor:
    def mixed(part: str, x: Tensor, before: Tensor, names: tuple[str, ...]) -> list[Tensor]:
        """Each projection of its own mix of the token and the one before it."""
        shares = [w[f"{part}.time_mix_{n}"] for n in names]
        return [(x * s + before * (1 - s)) @ w[f"{part}.{n}.weight"].T for n, s in zip(names, shares, strict=True)]

    x = norm(f.norm, w, "ln1", stream)
    key, value, gate = mixed("attention", x, shift(x, 0), ("key", "value", "receptance"))
    seen = average(key, value, (w["attention.time_decay"].exp(), w["attention.time_first"]))
    stream = stream + (gate.sigmoid() * seen) @ w["attention.output.weight"].T
    x = norm(f.norm, w, "ln2", stream)
    key, gate = mixed("feed_forward", x, shift(x, 1), ("key", "receptance"))
    return stream + gate.sigmoid() * (key.relu().square() @ w["feed_forward.value.weight"].T)
