"""A model's weights: fused tensors for speed, and views of them under their checkpoint names.

Queries, keys and values are one matrix, gate and up another: fewer and larger products per layer. Each
checkpoint name is a view into a fused tensor, so loading copies straight to its place and nothing is stored twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.models.config import ModelConfig

# buffers that old checkpoints carry and that are computed here
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@dataclass(slots=True)
class LayerWeights:
    """The tensors of one layer; a missing bias or norm is None.

    Attributes:
        qkv: [(Hq + 2 Hkv) * D, hidden]: query heads, then key heads, then value heads.
        out: [hidden, Hq * D].
        gate_up: [2 * intermediate, hidden]: gate first.
        down: [hidden, intermediate].
        q_norm, k_norm: [D].
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class Weights:
    """All weights of a model and `named`, the checkpoint name of each of them.

    Attributes:
        embedding: [vocab, hidden]; head: [vocab, hidden], the same tensor when tied.
        final_norm: [hidden].
        layers: one `LayerWeights` per layer.
        named: checkpoint name -> tensor or view of a fused tensor.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        self._dtype, self._device = dtype, device
        self.named: dict[str, Tensor] = {}
        self.embedding = self._new("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [self._layer(f"model.layers.{i}.", config) for i in range(config.num_layers)]
        self.final_norm = self._new("model.norm.weight", config.hidden_size)
        self.tied = config.tie_embeddings
        self.head = self.embedding if self.tied else self._new("lm_head.weight", *self.embedding.shape)

    def _new(self, name: str, *shape: int) -> Tensor:
        self.named[name] = torch.empty(shape, dtype=self._dtype, device=self._device)
        return self.named[name]

    def _fused(self, prefix: str, parts: dict[str, int], suffix: str, *columns: int) -> Tensor:
        """One tensor whose row ranges are the tensors `prefix` + part + `suffix`, in order."""
        whole = torch.empty((sum(parts.values()), *columns), dtype=self._dtype, device=self._device)
        views = whole.split(list(parts.values()))
        self.named.update({f"{prefix}{part}{suffix}": view for part, view in zip(parts, views, strict=True)})
        return whole

    def _layer(self, prefix: str, c: ModelConfig) -> LayerWeights:
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        q_rows, kv_rows = c.num_query_heads * c.head_dim, c.num_kv_heads * c.head_dim
        qkv = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        gate_up = {"gate_proj": c.intermediate_size, "up_proj": c.intermediate_size}
        new, fused, hidden = self._new, self._fused, c.hidden_size
        return LayerWeights(
            input_norm=new(prefix + "input_layernorm.weight", hidden),
            qkv=fused(attention, qkv, ".weight", hidden),
            qkv_bias=fused(attention, qkv, ".bias") if c.qkv_bias else None,
            q_norm=new(attention + "q_norm.weight", c.head_dim) if c.qk_norm else None,
            k_norm=new(attention + "k_norm.weight", c.head_dim) if c.qk_norm else None,
            out=new(attention + "o_proj.weight", hidden, q_rows),
            out_bias=new(attention + "o_proj.bias", hidden) if c.out_bias else None,
            post_norm=new(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=fused(mlp, gate_up, ".weight", hidden),
            gate_up_bias=fused(mlp, gate_up, ".bias") if c.mlp_bias else None,
            down=new(mlp + "down_proj.weight", hidden, c.intermediate_size),
            down_bias=new(mlp + "down_proj.bias", hidden) if c.mlp_bias else None,
        )

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies every (checkpoint name, tensor) to its place.

        Raises:
            ValueError: a tensor that is missing, unknown, of another shape or not a plain float type.
        """
        missing = set(self.named)
        for name, tensor in tensors:
            if name.endswith(IGNORED_SUFFIXES) or (self.tied and name == "lm_head.weight"):
                continue
            if name not in self.named:
                raise ValueError(f"weight {name!r}: this architecture has no such tensor")
            place = self.named[name]
            if tensor.shape != place.shape:
                raise ValueError(f"weight {name!r}: shape {tuple(tensor.shape)}, expected {tuple(place.shape)}")
            if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(f"weight {name!r}: dtype {tensor.dtype}, expected fp32, bf16, fp16 or fp64")
            place.copy_(tensor)
            missing.discard(name)
        if missing:
            first = ", ".join(sorted(missing)[:3])
            raise ValueError(f"weights: {len(missing)} of {len(self.named)} tensors are missing, such as {first}")

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, tied embeddings once."""
        return sum(t.numel() * t.element_size() for t in self.named.values())
