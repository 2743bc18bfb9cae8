"""The decoder: one forward for every family, over a flat batch of tokens and a paged cache.

A batch is T rows of tokens of any number of sequences, prefill chunks and decodes mixed; an `AttentionBatch`
says which row belongs to which sequence and where its entries go. A step of decodes reads nothing back to the host,
whatever its layers keep, and tolerates padded rows (slot -1), so it can be captured as a CUDA graph. A step with prefill
chunks may read back: some operations go through chunks one by one.

Symbols: T rows, R rows whose logits are wanted, Hq query heads, Hkv KV heads, D head_dim.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.models.adapters import Deltas
from kvlab.models.facts import ModelConfig
from kvlab.models.layer import Layer
from kvlab.models.modules import LAYERS
from kvlab.models.modules.base import PageMap, Positions, StepContext, Views
from kvlab.models.modules.norm import Norm
from kvlab.models.plain_layer import PlainLayer, is_plain
from kvlab.models.plain_stack import PlainStack
from kvlab.models.weights import Scope, Source
from kvlab.ops.batch import AttentionBatch
from kvlab.ops.linear import linear
from kvlab.specs.model import ModelSpec


class Decoder:
    """A decoder-only model that keeps what it must remember in pages.

    Args:
        config: the facts it runs by.
        source: where its tensors come from.
        spec: what its layers cache.

    Attributes:
        weights: its source; `weights.named` has the tensors under their checkpoint names.
        dtype, device: of its weights and activations.
    """

    def __init__(self, config: ModelConfig, source: Source, spec: ModelSpec) -> None:
        self.config, self.weights = config, source
        self.dtype, self.device = source.dtype, source.device
        c, scope = config, source.scope("model")
        self.embedding = scope.take("embed_tokens.weight", c.vocab_size, c.hidden_size)
        places = c.embedding.positions
        self.position_table = scope.take("embed_positions.weight", places, c.hidden_size) if places else None
        self.embedding_norm = _norm(c.embedding.norm, scope, "embed_norm", c.hidden_size)
        self.stem = LAYERS[type(c.extra)][0](c.extra, scope, c) if c.extra is not None else None
        self.layers = [build_layer(facts, scope, c.hidden_size, i) for i, facts in enumerate(c.layers)]
        self._plain = PlainStack.of(self.layers)
        self.final_norm = _norm(c.head.norm, scope, "norm", c.hidden_size)
        self.head = self.embedding if c.head.tied else source.take("lm_head.weight", c.vocab_size, c.hidden_size)
        self.head_bias = source.take("lm_head.bias", c.vocab_size) if c.head.bias else None
        self._pages = PageMap(spec)
        self._positions = Positions(self.dtype, self.device, c.max_position)

    def for_length(self, max_len: int) -> Decoder:
        """This decoder for sequences of at most `max_len` tokens: the same weights, and rotary rules that depend on
        the length (longrope) chosen for that one.
        """
        other = copy.copy(self)
        other._positions = Positions(self.dtype, self.device, max_len)
        return other

    @torch.inference_mode()
    def forward(
        self, input_ids: Tensor, batches: Sequence[AttentionBatch], views: Views, rows: Tensor | None = None
    ) -> Tensor:
        """Logits [R, vocab] of the wanted rows; writes every row's entries into the cache.

        Args:
            input_ids: int64 [T]; padded rows may hold any valid id.
            batches: one per block table, in the order of `kvlab.specs.layout.group_parts`; all of the same T rows.
            views: of the cache, [layer][part].
            rows: int64 [R], the rows whose logits are wanted; None for all.
        """
        hidden = self.hidden_states(input_ids, batches, views)
        return self.logits(hidden if rows is None else hidden.index_select(0, rows))

    __call__ = forward

    @torch.inference_mode()
    def hidden_states(
        self, input_ids: Tensor, batches: Sequence[AttentionBatch], views: Views, deltas: Deltas | None = None
    ) -> Tensor:
        """What leaves the last layer, [T, hidden], before the final norm. `deltas`: adapters; the rest as in `forward`."""
        step = StepContext(input_ids, batches, views, self._pages, self._positions, deltas=deltas)
        stream = self._embed(input_ids, step)
        if self.stem is not None:
            stream = self.stem.enter(stream, step)
        with nullcontext() if deltas is None else deltas.active():
            for layer in [self._plain] if self._plain is not None else self.layers:
                stream = layer(stream, step)
        return stream if self.stem is None else self.stem.leave(stream, step)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocab] of `hidden` [R, hidden], final norm included."""
        head = self.config.head
        hidden = hidden if self.final_norm is None else self.final_norm(hidden)
        logits = linear(hidden, self.head, self.head_bias)
        logits = logits if head.scale == 1.0 else logits * head.scale
        return head.softcap * torch.tanh(logits / head.softcap) if head.softcap else logits

    def _embed(self, ids: Tensor, step: StepContext) -> Tensor:
        facts = self.config.embedding
        x = F.embedding(ids, self.embedding)
        x = x if facts.scale == 1.0 else x * torch.tensor(facts.scale, dtype=x.dtype)
        if self.position_table is not None:
            x = x + F.embedding(step.positions + facts.position_offset, self.position_table)
        return x if self.embedding_norm is None else self.embedding_norm(x)


def build_layer(facts: Any, scope: Scope, hidden: int, index: int) -> Any:
    """The layer that runs `facts`: called with (stream, StepContext) it returns the stream after it."""
    source = scope.scope(f"layers.{index}")
    if type(facts) in LAYERS:
        return LAYERS[type(facts)][0](facts, source, hidden, index)
    return (PlainLayer if is_plain(facts) else Layer)(facts, source, hidden, index)


def _norm(facts: Any, scope: Scope, name: str, width: int) -> Norm | None:
    return None if facts is None else Norm(facts, scope, name, width)
