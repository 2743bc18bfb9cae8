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
from kvlab.models.rope import inverse_frequencies, rope_tables, rotate
from kvlab.models.weights import LayerWeights, Weights
from kvlab.ops.attention import paged_attention
from kvlab.ops.batch import AttentionBatch
from kvlab.ops.linear import linear
from kvlab.ops.views import PageViews
from kvlab.ops.write_kv import write_kv


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [..., n] over its root mean square, times `weight` [n]; at least float32 inside, `x`'s dtype outside."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def activate(name: str, x: Tensor) -> Tensor:
    """The activation called `name` of `x`."""
    if name == "silu":
        return F.silu(x)
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
        self._frequencies = inverse_frequencies(config.rope, config.head_dim).to(self.device)

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
    def hidden_states(
        self, input_ids: Tensor, batches: Sequence[AttentionBatch], views: Sequence[PageViews]
    ) -> Tensor:
        """What leaves the last layer, [T, hidden], before the final norm. Arguments as in `forward`."""
        config = self.config
        hidden = F.embedding(input_ids, self.weights.embedding)
        cos, sin = rope_tables(batches[0].positions, self._frequencies, self.dtype)
        for i, layer in enumerate(self.weights.layers):
            normed = rms_norm(hidden, layer.input_norm, config.norm_eps)
            query, key, value = self._project(i, layer, normed, cos, sin)
            batch = batches[self.layer_groups[i]]
            write_kv(key, value, views[i], batch.slot_mapping)
            mixed = paged_attention(query, views[i], batch, scale=config.scale, window=config.windows[i])
            hidden = hidden + linear(mixed.reshape(len(mixed), -1), layer.out, layer.out_bias)
            hidden = hidden + self._mlp(layer, rms_norm(hidden, layer.post_norm, config.norm_eps))
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocab] of `hidden` [R, hidden], final norm included."""
        return linear(rms_norm(hidden, self.weights.final_norm, self.config.norm_eps), self.weights.head)

    def _project(
        self, index: int, layer: LayerWeights, normed: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query [T, Hq, D], key and value [T, Hkv, D], normed and rotated as the family has it."""
        config = self.config
        heads, kv_heads = config.num_query_heads, config.num_kv_heads
        qkv = linear(normed, layer.qkv, layer.qkv_bias).view(len(normed), heads + 2 * kv_heads, config.head_dim)
        turned, value = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.q_norm is not None:
            query = rms_norm(turned[:, :heads], layer.q_norm, config.norm_eps)
            key = rms_norm(turned[:, heads:], layer.k_norm, config.norm_eps)
            turned = torch.cat((query, key), dim=1)
        if config.rotated[index]:
            turned = rotate(turned, cos, sin)
        return turned[:, :heads], turned[:, heads:], value

    def _mlp(self, layer: LayerWeights, normed: Tensor) -> Tensor:
        gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return linear(activate(self.config.activation, gate) * up, layer.down, layer.down_bias)
