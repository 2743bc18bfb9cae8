"""The decoder: one forward for every family, over a flat batch of tokens and a paged cache.

A batch is T rows of tokens of any number of sequences, prefill chunks and decodes mixed; an `AttentionBatch`
says which row belongs to which sequence and where its keys and values go. The forward reads nothing back to the
host and tolerates padded rows (slot -1), so a step can be captured as a CUDA graph.

Symbols: T rows, R rows whose logits are wanted, Hq query heads, Hkv KV heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.models.config import ModelConfig
from kvlab.models.rope import inverse_frequencies, rope_tables
from kvlab.models.weights import LayerWeights, Weights
from kvlab.ops.attention import paged_attention
from kvlab.ops.batch import AttentionBatch
from kvlab.ops.linear import linear
from kvlab.ops.mlp import MLPWeights, mlp
from kvlab.ops.norm import rms_norm
from kvlab.ops.qkv import QKVWeights, qkv
from kvlab.ops.views import PageViews
from kvlab.ops.write_kv import write_kv


def activate(name: str, x: Tensor) -> Tensor:
    """The activation called `name` of `x`, for those without an operation of their own."""
    if name == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if name == "gelu_pytorch_tanh" else "none")


class Decoder:
    """A decoder-only transformer that keeps its keys and values in pages.

    Attributes:
        config: the facts it runs by.
        weights: its tensors; `weights.named` has them under their checkpoint names.
        dtype, device: of its weights and activations.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        self.config = config
        self.dtype, self.device = dtype, torch.device(device)
        self.weights = Weights(config, dtype, self.device)
        self.layer_groups = config.layer_groups
        self._frequencies = inverse_frequencies(config.rope, config.head_dim, dtype).to(self.device)
        self._qkv = [_qkv_weights(config, layer) for layer in self.weights.layers]
        self._mlp = [_mlp_weights(config, layer) for layer in self.weights.layers]

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> Decoder:
        """This decoder with the given (checkpoint name, tensor) pairs copied in.

        Raises:
            ValueError: a tensor that is missing, unknown or of another shape.
        """
        self.weights.load(tensors)
        return self

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        batches: Sequence[AttentionBatch],
        views: Sequence[PageViews],
        rows: Tensor | None = None,
    ) -> Tensor:
        """Logits [R, vocab] of the wanted rows; writes every row's keys and values into the cache.

        Args:
            input_ids: int64 [T]; padded rows may hold any valid id.
            batches: one per block table, in the order of `config.layer_groups`; all of the same T rows.
            views: the cache of each layer.
            rows: int64 [R], the rows whose logits are wanted; None for all.
        """
        hidden = self.hidden_states(input_ids, batches, views)
        return self.logits(hidden if rows is None else hidden.index_select(0, rows))

    __call__ = forward

    @torch.inference_mode()
    def hidden_states(self, input_ids: Tensor, batches: Sequence[AttentionBatch], views: Sequence[PageViews]) -> Tensor:
        """What leaves the last layer, [T, hidden], before the final norm. Arguments as in `forward`."""
        config = self.config
        hidden = F.embedding(input_ids, self.weights.embedding)
        # one row of angles for each token, so that no table bounds the positions
        cos, sin = rope_tables(batches[0].positions, self._frequencies, self.dtype)
        angles = (cos, sin, torch.arange(len(input_ids), device=self.device))
        for i, layer in enumerate(self.weights.layers):
            batch = batches[self.layer_groups[i]]
            query, key, value = self._project(i, hidden, angles)
            write_kv(key, value, views[i], batch.slot_mapping)
            mixed = paged_attention(query, views[i], batch, scale=config.scale, window=config.windows[i])
            hidden = linear(mixed.reshape(len(mixed), -1), layer.out, layer.out_bias, residual=hidden)
            hidden = self._feed_forward(i, hidden)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocab] of `hidden` [R, hidden], final norm included."""
        return linear(rms_norm(hidden, self.weights.final_norm, self.config.norm_eps), self.weights.head)

    def _project(self, index: int, hidden: Tensor, angles: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Query [T, Hq, D], key and value [T, Hkv, D] of a layer, normed and rotated as the family has it."""
        w = self._qkv[index]
        if self.config.rotated[index]:
            return qkv(hidden, w, *angles)
        rows = linear(rms_norm(hidden, w.norm, w.eps), w.weight, w.bias).view(len(hidden), -1, w.head_dim)
        query, key, value = rows.split((w.num_heads, w.num_kv_heads, w.num_kv_heads), dim=1)
        if w.q_norm is not None and w.k_norm is not None:
            query, key = rms_norm(query, w.q_norm, w.eps), rms_norm(key, w.k_norm, w.eps)
        return query, key, value

    def _feed_forward(self, index: int, hidden: Tensor) -> Tensor:
        """`hidden` [T, hidden] plus the layer's gated feed-forward of its norm."""
        w = self._mlp[index]
        if self.config.activation == "silu":
            return mlp(hidden, w)
        gate, up = linear(rms_norm(hidden, w.norm, w.eps), w.gate_up, w.gate_up_bias).chunk(2, dim=-1)
        return linear(activate(self.config.activation, gate) * up, w.down, w.down_bias, residual=hidden)


def _qkv_weights(c: ModelConfig, layer: LayerWeights) -> QKVWeights:
    sizes = {"num_heads": c.num_query_heads, "num_kv_heads": c.num_kv_heads, "head_dim": c.head_dim}
    norms = {"q_norm": layer.q_norm, "k_norm": layer.k_norm, "eps": c.norm_eps}
    return QKVWeights(layer.input_norm, layer.qkv, layer.qkv_bias, **norms, **sizes)


def _mlp_weights(c: ModelConfig, layer: LayerWeights) -> MLPWeights:
    return MLPWeights(layer.post_norm, layer.gate_up, layer.down, c.norm_eps, layer.gate_up_bias, layer.down_bias)
