"""Hyper-connections: the residual stream as several streams that each module reads from and writes to in its own mix.

Source: manifold-constrained hyper-connections (DeepSeek-V4 report, section 2.2); transformers 5.24.0
modeling_deepseek_v4.py, DeepseekV4HyperConnection and DeepseekV4HyperHead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.models import modules
from kvlab.models.facts import ModelConfig, NormFacts, fact
from kvlab.models.modules.base import Place, StepContext, WholeContext
from kvlab.models.modules.norm import Norm
from kvlab.models.modules.norm import reference as norm_reference
from kvlab.models.weights import Names, Scope


@dataclass(frozen=True)
class HyperFacts:
    """Several residual streams.

    Attributes:
        streams: how many. iterations: of normalising rows and columns of the matrix that mixes them.
        floor: added to weights and sums. eps: of the norm before the weights are computed.
    """

    streams: int = 1
    iterations: int = fact("other", 1)
    floor: float = fact("twice", 1e-6)
    eps: float = fact("twice", 1e-6)


@dataclass(frozen=True)
class HyperLayerFacts:
    """A layer of two modules, each between hyper-connections."""

    mixer: Any
    feed_forward: Any
    norm: NormFacts
    hyper: HyperFacts


class Connection:
    """The weights with which one module reads from the streams and writes to them."""

    def __init__(self, facts: HyperFacts, scope: Scope, hidden: int) -> None:
        self.facts, rows = facts, (2 + facts.streams) * facts.streams
        self.matrix = scope.take("fn", rows, facts.streams * hidden)
        self.base, self.scale = scope.take("base", rows), scope.take("scale", 3)

    def __call__(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(what the module reads [T, hidden], how it is written back [T, N], how the streams mix [T, N, N])."""
        wide = torch.promote_types(streams.dtype, torch.float32)
        tensors = (self.matrix, self.base, self.scale)
        read, back, mix = _weights(self.facts, streams.to(wide), tuple(t.to(wide) for t in tensors))
        inner = (read[..., None] * streams).sum(1).to(streams.dtype)
        return inner, back.to(streams.dtype), mix.to(streams.dtype)


def _weights(f: HyperFacts, streams: Tensor, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """(read [T, N], back [T, N], mix [T, N, N]) from the streams [T, N, hidden] and (matrix, base, scale)."""
    matrix, base, scale = tensors
    n = f.streams
    flat = streams.flatten(1)
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + f.eps)
    read, back, mix = F.linear(flat, matrix).split((n, n, n * n), dim=-1)
    read_base, back_base, mix_base = base.split((n, n, n * n))
    read = torch.sigmoid(read * scale[0] + read_base) + f.floor
    back = 2 * torch.sigmoid(back * scale[1] + back_base)
    mix = (mix * scale[2] + mix_base).unflatten(-1, (n, n)).softmax(-1) + f.floor
    # towards a matrix whose rows and columns sum to one: columns, then rows and columns in turn
    mix = mix / (mix.sum(-2, keepdim=True) + f.floor)
    for _ in range(f.iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + f.floor)
        mix = mix / (mix.sum(-2, keepdim=True) + f.floor)
    return read, back, mix


class HyperLayer:
    """Call it on the streams [T, N, hidden] and the step; it returns the streams after the layer."""

    def __init__(self, facts: HyperLayerFacts, source: Scope, hidden: int, index: int) -> None:
        f = facts
        self.mixer = modules.build(f.mixer, source, hidden, Place(index, 0))
        self.feed_forward = modules.build(f.feed_forward, source, hidden, Place(index, 0))
        self.norms = [Norm(f.norm, source, name, hidden) for name in ("input_layernorm", "post_attention_layernorm")]
        self.connections = [Connection(f.hyper, source.scope(name), hidden) for name in ("attn_hc", "ffn_hc")]

    def __call__(self, streams: Tensor, step: StepContext) -> Tensor:
        runs = (self.mixer, self.feed_forward)
        for run, norm, connection in zip(runs, self.norms, self.connections, strict=True):
            inner, back, mix = connection(streams)
            out = run(norm(inner), step)
            streams = back[..., None] * out[:, None] + mix.transpose(1, 2) @ streams
        return streams


class Streams:
    """Before the first layer the embedding becomes N equal streams; after the last they become one again."""

    def __init__(self, facts: HyperFacts, scope: Scope, config: ModelConfig) -> None:
        self.facts, inner, n = facts, scope.scope("hc_head"), facts.streams
        self.matrix = inner.take("hc_fn", n, n * config.hidden_size)
        self.base, self.scale = inner.take("hc_base", n), inner.take("hc_scale", 1)

    def enter(self, stream: Tensor, step: StepContext) -> Tensor:
        """[T, N, hidden] of the embedding [T, hidden]."""
        return stream[:, None].expand(-1, self.facts.streams, -1).contiguous()

    def leave(self, streams: Tensor, step: StepContext) -> Tensor:
        """[T, hidden]."""
        wide = torch.promote_types(streams.dtype, torch.float32)
        tensors = tuple(t.to(wide) for t in (self.matrix, self.base, self.scale))
        return _join(self.facts, streams.to(wide), tensors).to(streams.dtype)


def _join(f: HyperFacts, streams: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
    matrix, base, scale = tensors
    flat = streams.flatten(1)
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + f.eps)
    weights = torch.sigmoid(F.linear(flat, matrix) * scale + base) + f.floor
    return (weights[..., None] * streams).sum(1)


def reference(facts: HyperLayerFacts, weights: Names, streams: Tensor, whole: WholeContext) -> Tensor:
    """The layer in plain torch, stream by stream, over a whole sequence [T, N, hidden]."""
    f, n = facts, facts.hyper.streams
    for module, norm, name in (
        (f.mixer, "input_layernorm", "attn_hc"),
        (f.feed_forward, "post_attention_layernorm", "ffn_hc"),
    ):
        w = weights.scope(name)
        read, back, mix = _weights(f.hyper, streams, (w["fn"], w["base"], w["scale"]))
        inner = sum(read[:, i, None] * streams[:, i] for i in range(n))
        out = modules.reference(module, weights, norm_reference(f.norm, weights, norm, inner), whole)
        mixed = [
            back[:, i, None] * out + sum(mix[:, j, i, None] * streams[:, j] for j in range(n)) for i in range(n)
        ]  # fmt: skip
        streams = torch.stack(mixed, dim=1)
    return streams


class ReferenceStreams:
    """`Streams` in plain torch."""

    def __init__(self, facts: HyperFacts, weights: Names, config: ModelConfig) -> None:
        self.facts, self.weights = facts, weights.scope("hc_head")

    def enter(self, stream: Tensor, whole: WholeContext) -> Tensor:
        """[T, N, hidden] of the embedding [T, hidden]."""
        return torch.stack([stream] * self.facts.streams, dim=1)

    def leave(self, streams: Tensor, whole: WholeContext) -> Tensor:
        """[T, hidden]."""
        return _join(self.facts, streams, tuple(self.weights[n] for n in ("hc_fn", "hc_base", "hc_scale")))
