"""Zamba-2: a few blocks of attention and feed-forward whose weights many layers use, each with adapters of its own.

A block reads the residual stream and the embedding side by side. Its keys and values are those of the layer that uses
it: as many caches as uses, one set of weights.

Source: The Zamba2 Suite (arXiv 2411.15242), section 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.models.facts import AttentionFacts, MLPFacts, ModelConfig, NormFacts, fact
from kvlab.models.modules.activation import activation
from kvlab.models.modules.attention import visible
from kvlab.models.modules.base import Place, StepContext, WholeContext
from kvlab.models.modules.mamba2 import Mamba2, Mamba2Facts
from kvlab.models.modules.mamba2 import reference as mamba2_reference
from kvlab.models.modules.norm import Norm
from kvlab.models.modules.norm import reference as norm_reference
from kvlab.models.rope import rotate
from kvlab.models.weights import Names, Scope
from kvlab.ops.attention import paged_attention
from kvlab.ops.linear import linear
from kvlab.ops.write_kv import write_kv

KEY = "shared blocks"


@dataclass(frozen=True)
class SharedBlockFacts:
    """One shared block; its tensors lie within the layer `home`, the first that uses it.

    Attributes:
        attention: its heads read twice the hidden size. mlp: gated.
        norm: of the two streams side by side, and of what attention gives.
        uses: which of the model's uses of shared blocks are of this one.
        rank: of the adapters, a pair of matrices per use on what the feed-forward part reads, and on what attention
            reads where there are `attention_adapters`.
    """

    attention: AttentionFacts
    mlp: MLPFacts
    norm: NormFacts
    home: int
    uses: tuple[int, ...]
    rank: int
    attention_adapters: bool = fact("off", False)

    @property
    def rows(self) -> dict[str, int]:
        """Rows of query, key and value projection."""
        a = self.attention
        return {"q": a.num_query_heads * a.key_dim, "k": a.num_kv_heads * a.key_dim, "v": a.num_kv_heads * a.value_dim}


@dataclass(frozen=True)
class SharedBlocksFacts:
    """All shared blocks of a model."""

    blocks: tuple[SharedBlockFacts, ...]


@dataclass(frozen=True)
class HybridLayerFacts:
    """A layer that runs shared block `block`, as the model's use number `use`, and then its own mixer:

    stream + mamba(norm(stream + linear(block(stream, embedding))))
    """

    block: int
    use: int
    mamba: Mamba2Facts
    norm: NormFacts


class SharedBlocks:
    """Keeps the embedding for the layers of a step."""

    def __init__(self, facts: SharedBlocksFacts, scope: Scope, config: ModelConfig) -> None:
        self.blocks = [_Block(f, scope, config.hidden_size) for f in facts.blocks]

    def enter(self, stream: Tensor, step: StepContext) -> Tensor:
        """The stream itself."""
        step.memory[KEY] = (self.blocks, stream)
        return stream

    def leave(self, stream: Tensor, step: StepContext) -> Tensor:
        """The stream itself."""
        return stream


class _Block:
    def __init__(self, facts: SharedBlockFacts, scope: Scope, hidden: int) -> None:
        f, a = facts, facts.attention
        scope = scope.scope(f"layers.{f.home}.shared_transformer")
        inside, feed = scope.scope("self_attn"), scope.scope("feed_forward")
        self.facts, self.activate = f, activation(f.mlp.activation)
        self.norm = Norm(f.norm, scope, "input_layernorm", 2 * hidden)
        self.mlp_norm = Norm(f.norm, scope, "pre_ff_layernorm", hidden)
        self.qkv = inside.take_rows("qkv_proj.weight", {f"{n}_proj.weight": r for n, r in f.rows.items()}, 2 * hidden)
        self.out = inside.take("o_proj.weight", hidden, a.num_query_heads * a.value_dim)
        self.up = feed.take("gate_up_proj.weight", 2 * f.mlp.width, hidden)
        self.down = feed.take("down_proj.weight", hidden, f.mlp.width)

        def adapters(scope: Scope, name: str, columns: int, rows: int) -> dict[int, tuple[Tensor, Tensor]]:
            within = {use: scope.scope(f"{name}_adapter_list.{use}") for use in f.uses}
            return {
                u: (s.take("0.weight", f.rank, columns), s.take("1.weight", rows, f.rank)) for u, s in within.items()
            }

        self.up_adapters = adapters(feed, "gate_up_proj", hidden, 2 * f.mlp.width)
        rows = f.rows if f.attention_adapters else {}
        self.qkv_adapters = [adapters(inside, f"linear_{n}", 2 * hidden, r) for n, r in rows.items()]

    def __call__(self, x: Tensor, step: StepContext, place: Place, use: int) -> Tensor:
        """[T, hidden] of `x` [T, 2 * hidden]; keys and values go to the pages at `place`."""
        a = self.facts.attention
        x = self.norm(x)
        views, batch = step.part(place)
        pieces = list(linear(x, self.qkv).split(list(self.facts.rows.values()), dim=-1))
        for i, adapters in enumerate(self.qkv_adapters):
            pieces[i] = pieces[i] + _adapted(x, adapters[use])
        query, key, value = (p.unflatten(-1, (-1, a.key_dim)) for p in pieces)
        if a.rope is not None:
            query, key = (rotate(r, *step.angles(a.rope, a.key_dim), a.rope.interleaved) for r in (query, key))
        write_kv(key, value, views, batch.slot_mapping)
        seen = paged_attention(query, views, batch, scale=a.scale)
        x = self.mlp_norm(linear(seen.reshape(len(seen), -1), self.out))
        gate, up = (linear(x, self.up) + _adapted(x, self.up_adapters[use])).chunk(2, dim=-1)
        return linear(self.activate(gate) * up, self.down)


def _adapted(x: Tensor, adapter: tuple[Tensor, Tensor]) -> Tensor:
    return linear(linear(x, adapter[0]), adapter[1])


class HybridLayer:
    """The layer; called like any other. Its first part is the block's attention, its second the mixer's state."""

    def __init__(self, facts: HybridLayerFacts, source: Scope, hidden: int, index: int) -> None:
        self.facts, self.place = facts, Place(index)
        self.linear = source.take("linear.weight", hidden, hidden)
        self.norm = Norm(facts.norm, source, "mamba_decoder.input_layernorm", hidden)
        self.mamba = Mamba2(facts.mamba, source, hidden, Place(index, 1))

    def __call__(self, stream: Tensor, step: StepContext) -> Tensor:
        """The residual stream [T, hidden] after the layer."""
        blocks, embedding = step.memory[KEY]
        both = torch.cat((stream, embedding), dim=-1)
        added = linear(blocks[self.facts.block](both, step, self.place, self.facts.use), self.linear)
        return stream + self.mamba(self.norm(stream + added), step)


class ReferenceBlocks:
    """`SharedBlocks` for the plain forward."""

    def __init__(self, facts: SharedBlocksFacts, weights: Names, config: ModelConfig) -> None:
        self.kept = [(f, weights.scope(f"layers.{f.home}.shared_transformer")) for f in facts.blocks]

    def enter(self, stream: Tensor, whole: WholeContext) -> Tensor:
        """The stream itself."""
        whole.memory[KEY] = (self.kept, stream)
        return stream

    def leave(self, stream: Tensor, whole: WholeContext) -> Tensor:
        """The stream itself."""
        return stream


def layer_reference(facts: HybridLayerFacts, weights: Names, stream: Tensor, whole: WholeContext) -> Tensor:
    """The layer in plain torch over a whole sequence [T, hidden]."""
    blocks, embedding = whole.memory[KEY]
    f, w = blocks[facts.block]
    x = norm_reference(f.norm, w, "input_layernorm", torch.cat((stream, embedding), dim=-1))
    x = norm_reference(f.norm, w, "pre_ff_layernorm", _reference_attention(f, w, x, whole, facts.use))
    feed = w.scope("feed_forward")
    gate, up = (feed.linear("gate_up_proj", x) + _reference_adapted(feed, "gate_up_proj", facts.use, x)).chunk(
        2, dim=-1
    )
    x = weights.linear("linear", feed.linear("down_proj", activation(f.mlp.activation)(gate) * up))
    x = norm_reference(facts.norm, weights, "mamba_decoder.input_layernorm", stream + x)
    return stream + mamba2_reference(facts.mamba, weights, x, whole)


def _reference_attention(f: SharedBlockFacts, w: Names, x: Tensor, whole: WholeContext, use: int) -> Tensor:
    a, w = f.attention, w.scope("self_attn")
    rows = [w.linear(f"{n}_proj", x) for n in f.rows]
    if f.attention_adapters:
        rows = [r + _reference_adapted(w, f"linear_{n}", use, x) for n, r in zip(f.rows, rows, strict=True)]
    query, key, value = (r.unflatten(-1, (-1, a.key_dim)) for r in rows)
    if a.rope is not None:
        angles = whole.angles(a.rope, a.key_dim, x.dtype)
        query, key = (rotate(r, *angles, a.rope.interleaved) for r in (query, key))
    key, value = (r.repeat_interleave(query.shape[1] // r.shape[1], dim=1) for r in (key, value))
    scores = torch.einsum("thd,shd->hts", query, key) * a.scale
    weighted = scores.masked_fill(~visible(len(x)), float("-inf")).softmax(-1)
    return w.linear("o_proj", torch.einsum("hts,shd->thd", weighted, value).flatten(1))


def _reference_adapted(w: Names, name: str, use: int, x: Tensor) -> Tensor:
    return w.linear(f"{name}_adapter_list.{use}.1", w.linear(f"{name}_adapter_list.{use}.0", x))
