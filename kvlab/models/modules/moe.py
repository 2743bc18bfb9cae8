"""The feed-forward part as a mixture of experts: each token runs through a few of many, chosen by a router.

What a layer caches does not depend on it: routing touches neither pages nor tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.models.facts import MLPFacts, fact
from kvlab.models.modules import mlp
from kvlab.models.modules.activation import activation
from kvlab.models.modules.base import Place, StepContext, WholeContext
from kvlab.models.modules.router import Router, RouterFacts
from kvlab.models.modules.router import reference as router_reference
from kvlab.models.weights import Names, Scope
from kvlab.ops.linear import linear

# a decode step copies the experts of this many bytes at a time next to each other
GATHERED_BYTES = 2**28


@dataclass(frozen=True)
class MoEFacts:
    """Experts, their router, and an expert that every token runs through.

    Canonical names within `prefix`: the router's (see `RouterFacts`); `experts.gate_up_proj` [E, 2 * width, in] (gate
    first; `experts.up_proj` [E, width, in] when not gated) and `experts.down_proj` [E, in, width], or per expert
    `experts.N.gate_proj.weight` and so on; their biases `experts.gate_up_proj_bias` and `experts.down_proj_bias`;
    `latent_in.weight` [latent, hidden] and `latent_out.weight`; the shared expert under its own prefix, its gate
    `shared_expert_gate.weight` [1, hidden].

    Attributes:
        router: how experts are chosen and weighted.
        width: of one expert.
        activation, gated, bias: as in `MLPFacts`.
        limit: gates are cut off above it, ups beyond +-limit; 0 means neither. slope: gates become
            activation(slope * gate) / slope. up_offset: added to the ups (gpt-oss).
        latent: width that experts read and write, projected from and to the residual stream; 0 means its own.
        shared: an expert for all tokens, None for none; its prefix is below that of the mixture.
        shared_gate: whether a sigmoid gate scales what the shared expert gives.
    """

    router: RouterFacts
    width: int
    activation: str = fact("activation", "silu")
    gated: bool = True
    bias: bool = False
    limit: float = fact("scale", 0.0)
    slope: float = fact("scale if set", 1.0)
    up_offset: float = fact("off", 0.0)
    latent: int = 0
    shared: MLPFacts | None = None
    shared_gate: bool = fact("off", False)
    prefix: str = "mlp"


class MoE:
    """The mixture; call it on [T, hidden].

    Attributes:
        up: [E, 2 * width, in], or [E, width, in] when not gated. down: [E, in, width].
    """

    num_parts = 0

    def __init__(self, facts: MoEFacts, source: Scope, hidden: int, place: Place) -> None:
        f, scope = facts, source.scope(facts.prefix)
        self.facts, experts = f, f.router.num_experts
        self.router = Router(f.router, scope, hidden)
        inner = f.latent or hidden
        name = "gate_up_proj" if f.gated else "up_proj"
        parts = ("gate_proj", "up_proj") if f.gated else ("up_proj",)
        up_rows = len(parts) * f.width
        inside = scope.scope("experts")
        self.up = inside.take_stack(name, _per_expert(experts, parts), up_rows, inner)
        self.down = inside.take_stack("down_proj", _per_expert(experts, ("down_proj",)), inner, f.width)
        self.up_bias = inside.take(f"{name}_bias", experts, up_rows) if f.bias else None
        self.down_bias = inside.take("down_proj_bias", experts, inner) if f.bias else None
        self.latent_in = scope.take("latent_in.weight", f.latent, hidden) if f.latent else None
        self.latent_out = scope.take("latent_out.weight", hidden, f.latent) if f.latent else None
        self.shared = mlp.MLP(f.shared, scope, hidden, place) if f.shared else None
        self.shared_gate = scope.take("shared_expert_gate.weight", 1, hidden) if f.shared_gate else None

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[T, hidden] of `x` [T, hidden]. A step of decodes alone reads nothing back to the host."""
        weights, chosen = self.route(x, step)
        inner = x if self.latent_in is None else linear(x, self.latent_in)
        tokens, top_k = chosen.shape
        rows = inner.repeat_interleave(top_k, dim=0)
        if self.facts.router.on_input:
            rows = (rows * weights.flatten()[:, None]).to(x.dtype)
        run = self._gathered if step.batches[0].max_query_len <= 1 else self._sorted
        out = run(rows, chosen.flatten()).unflatten(0, (tokens, top_k))
        # in one fixed order, whatever else is in the batch
        out = (out if self.facts.router.on_input else out * weights[..., None]).sum(1).to(x.dtype)
        out = out if self.latent_out is None else linear(out, self.latent_out)
        if self.shared is None:
            return out
        shared = self.shared(x, step)
        return out + (shared if self.shared_gate is None else linear(x, self.shared_gate).sigmoid() * shared)

    def route(self, x: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
        """Weights [T, top_k] and the experts they belong to, int64 [T, top_k]."""
        return self.router(x)

    def _gathered(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Each row through its expert's weights, copied for it: nothing waits for the router's choice."""
        at_once = max(1, GATHERED_BYTES // (self.up[0].nbytes + self.down[0].nbytes))
        pieces = []
        for x, e in zip(rows.split(at_once), experts.split(at_once), strict=True):
            up = torch.bmm(self.up[e], x[..., None])[..., 0]
            up = up if self.up_bias is None else up + self.up_bias[e]
            down = torch.bmm(self.down[e], glu(self.facts, up)[..., None])[..., 0]
            pieces.append(down if self.down_bias is None else down + self.down_bias[e])
        return torch.cat(pieces)

    def _sorted(self, rows: Tensor, experts: Tensor) -> Tensor:
        """The rows of each expert together, so that its weights are read once; counts are read back to the host."""
        order = experts.argsort(stable=True)
        out = torch.empty_like(rows)
        start = 0
        for e, count in enumerate(experts.bincount(minlength=len(self.up)).tolist()):
            if count:
                mine = order[start : start + count]
                up = linear(rows[mine], self.up[e], None if self.up_bias is None else self.up_bias[e])
                bias = None if self.down_bias is None else self.down_bias[e]
                out[mine] = linear(glu(self.facts, up), self.down[e], bias)
                start += count
        return out


def _per_expert(experts: int, parts: tuple[str, ...]) -> list[list[str]]:
    return [[f"{e}.{name}.weight" for name in parts] for e in range(experts)]


def glu(f: MoEFacts, up: Tensor) -> Tensor:
    """What an expert's second matrix reads, [..., width], of what its first gives."""
    act = activation(f.activation)
    if not f.gated:
        return act(up)
    gate, up = up.chunk(2, dim=-1)
    if f.limit:
        gate, up = gate.clamp(max=f.limit), up.clamp(-f.limit, f.limit)
    gate = act(gate) if f.slope == 1.0 else act(f.slope * gate) / f.slope
    return gate * (up + f.up_offset if f.up_offset else up)


def reference(facts: MoEFacts, weights: Names, x: Tensor, whole: WholeContext) -> Tensor:
    """The mixture token by token and expert by expert, in plain torch."""
    w = weights.scope(facts.prefix)
    return reference_with(facts, w, x, whole, lambda t: router_reference(facts.router, w, x[t]))


def reference_with(
    f: MoEFacts, w: Names, x: Tensor, whole: WholeContext, route: Callable[[int], list[tuple[int, Tensor]]]
) -> Tensor:
    """As `reference`, with `route` giving each token's experts and weights; `w` are the mixture's names."""
    inner = w.linear("latent_in", x) if f.latent else x
    rows = []
    for t, token in enumerate(inner):
        total = torch.zeros_like(token)
        for expert, weight in route(t):
            given = token * weight if f.router.on_input else token
            out = _reference_expert(f, w, expert, given)
            total = total + (out if f.router.on_input else out * weight)
        rows.append(total)
    out = torch.stack(rows)
    out = w.linear("latent_out", out) if f.latent else out
    if f.shared is None:
        return out
    shared = mlp.reference(f.shared, w, x, whole)
    return out + (torch.sigmoid(w.linear("shared_expert_gate", x)) * shared if f.shared_gate else shared)


def _reference_expert(f: MoEFacts, w: Names, expert: int, x: Tensor) -> Tensor:
    name = "gate_up_proj" if f.gated else "up_proj"
    up = w[f"experts.{name}"][expert] @ x
    up = up + w[f"experts.{name}_bias"][expert] if f.bias else up
    out = w["experts.down_proj"][expert] @ glu(f, up)
    return out + w["experts.down_proj_bias"][expert] if f.bias else out
