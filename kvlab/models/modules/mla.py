"""Multi-head latent attention: per token one latent and one rotary key in the pages, whatever the number of heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.models.facts import NormFacts, RopeFacts, fact
from kvlab.models.modules.base import Place, StepContext, WholeContext
from kvlab.models.modules.norm import Norm
from kvlab.models.modules.norm import reference as norm_reference
from kvlab.models.rope import rotate
from kvlab.models.weights import Names, Scope
from kvlab.ops.linear import linear
from kvlab.ops.mla_attention import mla_attention
from kvlab.ops.write_rows import write_rows


@dataclass(frozen=True)
class LatentAttentionFacts:
    """Attention whose keys and values are expanded from one latent per token.

    Attributes:
        plain_dim, rope_dim: values of a query's and key's head that do not rotate, and that do; rotary keys are one
            per token, shared by all heads.
        latent_dim: values of a latent. query_rank: of the queries' latent, 0 where queries come from the stream.
        scale: factor on scores before the softmax, the stretched positions' share included.
        rope: None where nothing rotates.
        norm: of latents. bias: whether the projections into the latents, and out, have one.
        prefix: name of the module's tensors within the layer.
    """

    num_heads: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    latent_dim: int
    query_rank: int = 0
    scale: float = fact("scale", 1.0)
    rope: RopeFacts | None = fact("off", None)  # noqa: RUF009
    norm: NormFacts = NormFacts()  # noqa: RUF009
    bias: bool = False
    prefix: str = "self_attn"

    @property
    def key_dim(self) -> int:
        """Values of a head of queries and keys."""
        return self.plain_dim + self.rope_dim


class LatentAttention:
    """Queries of the step's tokens over the latents in pages.

    Attributes:
        up: [H, plain_dim + value_dim, latent_dim], from a latent to each head's key and value.
    """

    num_parts = 1

    def __init__(self, facts: LatentAttentionFacts, source: Scope, hidden: int, place: Place) -> None:
        f, scope = facts, source.scope(facts.prefix)
        self.facts, self.place = f, place
        into = {"kv_a_proj_with_mqa": f.latent_dim + f.rope_dim}
        first = {"q_a_proj": f.query_rank} if f.query_rank else {"q_proj": f.num_heads * f.key_dim}
        self.rows = [*first.values(), *into.values()]
        names = first | into
        self.down = scope.take_rows("fused_a_proj.weight", {f"{n}.weight": r for n, r in names.items()}, hidden)
        biased = {f"{n}.bias": r for n, r in names.items() if n != "q_proj"} if f.bias else {}
        self.down_bias = {n: scope.take(n, r) for n, r in biased.items()}
        self.q_norm = Norm(f.norm, scope, "q_a_layernorm", f.query_rank) if f.query_rank else None
        rank = (f.num_heads * f.key_dim, f.query_rank)
        self.q_up = scope.take("q_b_proj.weight", *rank) if f.query_rank else None
        self.latent_norm = Norm(f.norm, scope, "kv_a_layernorm", f.latent_dim)
        up = scope.take("kv_b_proj.weight", f.num_heads * (f.plain_dim + f.value_dim), f.latent_dim)
        self.up = up.unflatten(0, (f.num_heads, -1))
        self.out = scope.take("o_proj.weight", hidden, f.num_heads * f.value_dim)
        self.out_bias = scope.take("o_proj.bias", hidden) if f.bias else None

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[T, hidden] of `x` [T, hidden], the normed residual stream."""
        views, batch = step.part(self.place)
        query, latent, rope, _ = self.project(x, step)
        write_rows({"latent": latent, "rope": rope}, views, batch.slot_mapping)
        return self.finish(mla_attention(query, self.up, views, batch, scale=self.facts.scale))

    def finish(self, seen: Tensor) -> Tensor:
        """[T, hidden] of the heads' values [T, H, value_dim]."""
        return linear(seen.flatten(1), self.out, self.out_bias)

    def project(self, x: Tensor, step: StepContext) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query [T, H, key_dim], latent [T, latent_dim], rotary key [T, rope_dim], and the queries' latent
        [T, query_rank] (`x` itself where there is none)."""
        f = self.facts
        first, into = linear(x, self.down).split(self.rows, dim=-1)
        into = self._biased(into, "kv_a_proj_with_mqa")
        query = residual = x
        if self.q_norm is None or self.q_up is None:
            query = first
        else:
            residual = self.q_norm(self._biased(first, "q_a_proj").contiguous())
            query = linear(residual, self.q_up)
        query = query.unflatten(-1, (f.num_heads, f.key_dim))
        latent, rope = into.split((f.latent_dim, f.rope_dim), dim=-1)
        if f.rope is not None:
            angles = step.angles(f.rope, f.rope_dim)
            query, rope = turn(query, angles, f.rope), rotate(rope[:, None], *angles, f.rope.interleaved)[:, 0]
        return query, self.latent_norm(latent.contiguous()), rope, residual

    def _biased(self, rows: Tensor, name: str) -> Tensor:
        bias = self.down_bias.get(f"{name}.bias")
        return rows if bias is None else rows + bias


def turn(heads: Tensor, angles: tuple[Tensor, Tensor], rope: RopeFacts) -> Tensor:
    """`heads` [T, H, D] with their last values turned, as many as there are angles."""
    plain, last = heads.split((heads.shape[-1] - 2 * angles[0].shape[-1], 2 * angles[0].shape[-1]), dim=-1)
    return torch.cat((plain, rotate(last, *angles, rope.interleaved)), dim=-1)


def reference_heads(
    facts: LatentAttentionFacts, weights: Names, x: Tensor, whole: WholeContext
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query and key [T, H, key_dim], value [T, H, value_dim], and the queries' latent, in plain torch."""
    f, w = facts, weights.scope(facts.prefix)
    residual = norm_reference(f.norm, w, "q_a_layernorm", w.linear("q_a_proj", x)) if f.query_rank else x
    query = w.linear("q_b_proj" if f.query_rank else "q_proj", residual).unflatten(-1, (f.num_heads, f.key_dim))
    latent, rope = w.linear("kv_a_proj_with_mqa", x).split((f.latent_dim, f.rope_dim), dim=-1)
    latent, rope = norm_reference(f.norm, w, "kv_a_layernorm", latent), rope[:, None]
    if f.rope is not None:
        angles = whole.angles(f.rope, f.rope_dim, x.dtype)
        query, rope = turn(query, angles, f.rope), rotate(rope, *angles, f.rope.interleaved)
    expanded = w.linear("kv_b_proj", latent).unflatten(-1, (f.num_heads, -1))
    key, value = expanded.split((f.plain_dim, f.value_dim), dim=-1)
    return query, torch.cat((key, rope.expand(-1, f.num_heads, -1)), dim=-1), value, residual


def reference(facts: LatentAttentionFacts, weights: Names, x: Tensor, whole: WholeContext) -> Tensor:
    """Every token's query against every earlier key, all heads written out; in plain torch."""
    query, key, value, _ = reference_heads(facts, weights, x, whole)
    seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    return reference_attend(facts, weights, (query, key, value), seen)


def reference_attend(
    facts: LatentAttentionFacts, weights: Names, heads: tuple[Tensor, Tensor, Tensor], seen: Tensor
) -> Tensor:
    """[T, hidden] of query, key and value over the keys that `seen` [T, T] shows."""
    query, key, value = heads
    scores = torch.einsum("thd,shd->hts", query, key) * facts.scale
    weighted = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    out = torch.einsum("hts,shd->thd", weighted, value).flatten(1)
    return weights.scope(facts.prefix).linear("o_proj", out)
