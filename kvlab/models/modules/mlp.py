"""The feed-forward part, gated or plain."""

from __future__ import annotations

from torch import Tensor

from kvlab.models.facts import MLPFacts
from kvlab.models.modules.activation import activation
from kvlab.models.modules.base import Place, StepContext, WholeContext
from kvlab.models.weights import Names, Scope
from kvlab.ops.linear import linear


class MLP:
    """down(act(gate_scale * gate(x)) * up(x)), or down(act(up(x))) when not gated."""

    num_parts = 0

    def __init__(self, facts: MLPFacts, source: Scope, hidden: int, place: Place) -> None:
        f, scope = facts, source.scope(facts.prefix)
        self.limit = f.limit
        self.activate, self.gated, self.gate_scale = activation(f.activation), f.gated, f.gate_scale
        names = ("gate_proj", "up_proj") if f.gated else ("up_proj",)
        self.up = scope.take_rows("gate_up_proj.weight", {f"{n}.weight": f.width for n in names}, hidden)
        self.up_bias = scope.take_rows("gate_up_proj.bias", {f"{n}.bias": f.width for n in names}) if f.bias else None
        self.down = scope.take("down_proj.weight", hidden, f.width)
        self.down_bias = scope.take("down_proj.bias", hidden) if f.bias else None

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[T, hidden] of `x` [T, hidden]."""
        up = linear(x, self.up, self.up_bias)
        if self.gated:
            gate, up = up.chunk(2, dim=-1)
            gate = gate if self.gate_scale == 1.0 else gate * self.gate_scale
            gate, up = clipped(gate, up, self.limit)
            return linear(self.activate(gate) * up, self.down, self.down_bias)
        return linear(self.activate(up), self.down, self.down_bias)


def clipped(gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Gates cut off above `limit`, ups beyond +-limit; as they are where it is 0."""
    return (gate.clamp(max=limit), up.clamp(-limit, limit)) if limit else (gate, up)


def reference(facts: MLPFacts, weights: Names, x: Tensor, whole: WholeContext) -> Tensor:
    """The feed-forward part in plain torch."""
    w, act = weights.scope(facts.prefix), activation(facts.activation)
    up = w.linear("up_proj", x)
    if not facts.gated:
        return w.linear("down_proj", act(up))
    gate, up = clipped(w.linear("gate_proj", x) * facts.gate_scale, up, facts.limit)
    return w.linear("down_proj", act(gate) * up)
