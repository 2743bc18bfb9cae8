"""One tiny random model of every kind of cache, in fp64, and its tokens from a forward that knows no cache.

The reference recomputes the whole sequence for every token with the plain mathematics of `kvlab.models.reference`:
no pages, no batches, no operation of the engine.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch

from kvlab.engine import SamplingParams
from kvlab.engine.sampler import RowParams, sample
from kvlab.lab.parity.shrink import shrink
from kvlab.models.adapters import PROJECTIONS
from kvlab.models.load import LoadedModel, empty_model
from kvlab.models.reference import reference_forward

BASE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 32_000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "rope_theta": 100.0, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
ALTERNATING = ["sliding_attention", "full_attention"] * 2

KINDS: dict[str, dict[str, Any]] = {
    "full": {"model_type": "llama"},
    "latent": {
        "model_type": "deepseek_v2", "kv_lora_rank": 128, "q_lora_rank": None, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "v_head_dim": 64, "first_k_dense_replace": 1, "moe_intermediate_size": 128,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
    },
    "windows": {"model_type": "gemma2", "sliding_window": 128, "head_dim": 96, "query_pre_attn_scalar": 96},
    "sinks": EXPERTS | {
        "model_type": "gpt_oss", "sliding_window": 128, "head_dim": 64, "layer_types": ALTERNATING,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    },
    "chunks": EXPERTS | {
        "model_type": "llama4_text", "attention_chunk_size": 128, "interleave_moe_layer_step": 2, "head_dim": 64,
        "intermediate_size_mlp": 1024,
    },
    "delta": {
        "model_type": "qwen3_next", "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
    },
    "indexed": {
        "model_type": "deepseek_v32", "kv_lora_rank": 128, "q_lora_rank": 192, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "v_head_dim": 64, "index_head_dim": 64, "index_n_heads": 32, "index_topk": 128,
        "first_k_dense_replace": 4, "moe_intermediate_size": 128, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
    },
    "kda": {
        "model_type": "kimi_linear", "num_key_value_heads": 8, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "v_head_dim": 64, "num_expert_group": 1, "num_shared_experts": 1, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 128, "num_hidden_layers": 3,
        "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2], "num_heads": 4, "head_dim": 64,
                               "short_conv_kernel_size": 4},
    },
    "convolutions": {"model_type": "lfm2", "conv_L_cache": 3, "layer_types": ["conv", "full_attention"] * 2},
    "compressed": {
        "model_type": "deepseek_v4", "num_key_value_heads": 1, "head_dim": 64, "qk_rope_head_dim": 32,
        "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 64, "index_head_dim": 48, "index_n_heads": 32,
        "index_topk": 64, "sliding_window": 128, "compress_ratios": [0, 128, 4, 4, 0], "compress_rope_theta": 160.0,
        "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "num_hash_layers": 1, "n_routed_experts": 8,
        "n_shared_experts": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 128, "swiglu_limit": 10.0,
        "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "routed_scaling_factor": 2.5,
        "norm_topk_prob": True, "hidden_act": "silu",
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 256},
    },
    "parallel": {
        "model_type": "falcon_h1", "head_dim": 64, "mamba_rms_norm": True, "mamba_n_groups": 2, "mamba_n_heads": 16,
        "num_hidden_layers": 2,
    },
    "shared": {
        "model_type": "gemma3n_text", "head_dim": 64, "num_hidden_layers": 6, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "sliding_window": 128,
        "vocab_size_per_layer_input": 32_000, "hidden_size_per_layer_input": 32, "altup_num_inputs": 4,
        "altup_active_idx": 0, "laurel_rank": 16, "intermediate_size": [1024] * 6,
        "activation_sparsity_pattern": [0.9] * 2 + [0.0] * 4, "final_logit_softcapping": 30.0,
        "rope_local_base_freq": 50.0,
    },
    "states": {
        "model_type": "mamba2", "num_heads": 16, "head_dim": 64, "n_groups": 2, "state_size": 64, "expand": 2,
        "conv_kernel": 4, "chunk_size": 64, "layer_norm_epsilon": 1e-5,
    },
    "linear": {"model_type": "kvlab_linear"},
    "averages": {"model_type": "rwkv", "attention_hidden_size": 512, "context_length": 4096, "num_hidden_layers": 2},
    "shared blocks": {
        "model_type": "zamba2", "num_hidden_layers": 6, "num_key_value_heads": 8, "num_mem_blocks": 2,
        "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid", "mamba"], "use_mem_rope": True,
        "use_shared_attention_adapter": True, "n_mamba_heads": 16, "mamba_ngroups": 2,
    },
    "neighbours": {"model_type": "kvlab_cla"},
    "hybrid": EXPERTS | {
        "model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 2, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_experts": 8, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_dt_rank": 32,
    },
}  # fmt: skip

ADAPTED = ("full", "windows", "chunks", "latent", "indexed", "delta", "kda", "parallel", "states", "hybrid",
           "convolutions", "neighbours")  # fmt: skip
"""Kinds whose every projection takes an adapter."""


class Kind:
    """A model of one kind; `tokens` are what any schedule must give."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.config = shrink(BASE | KINDS[name]).config
        self.model: LoadedModel = empty_model(self.config, "fp64", torch.device("cpu"), name)
        fill(self.model)
        self._known: dict[tuple, list[int]] = {}

    @property
    def vocab(self) -> int:
        """Token ids are below this."""
        return self.model.config.vocab_size

    def tokens(self, prompt: list[int], params: SamplingParams, adapted: bool = False) -> list[int]:
        """The `max_tokens` tokens after `prompt`, each from a forward over everything before it."""
        key = (tuple(prompt), params, adapted)
        if key not in self._known:
            ids = list(prompt)
            for _ in range(params.max_tokens):
                logits = self.logits(ids, adapted)[-1:]
                rows = RowParams.of([params], [params.seed or 0], [len(ids)], logits)
                ids.append(int(sample(logits, rows)))
            self._known[key] = ids[len(prompt) :]
        return self._known[key]

    @torch.inference_mode()
    def logits(self, ids: list[int], adapted: bool = False) -> torch.Tensor:
        """[T, vocab] of a whole sequence, with `adapter` in the weights or without."""
        weights = self.adapter[1] if adapted else self.model.decoder.weights.named
        return reference_forward(self.model.config, weights, torch.tensor(ids))

    @cached_property
    def adapter(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """An adapter for every tensor that one can change, and all weights with it in them."""
        return every_projection(self.model, 5)


def every_projection(model: LoadedModel, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """An adapter of rank 2 for every tensor of the model that one can change, and all weights with it in them."""
    rng, found, weights = torch.Generator().manual_seed(seed), {}, dict(model.decoder.weights.named)
    for name, weight in model.decoder.weights.named.items():
        place = name.removesuffix(".weight")
        if ".layers." in name and place.rpartition(".")[2] in PROJECTIONS and weight.dim() == 2:
            a, b = (torch.randn(n, rng_n, generator=rng, dtype=torch.float64) for n, rng_n in
                    ((2, weight.shape[1]), (weight.shape[0], 2)))  # fmt: skip
            b *= 0.3 * float(weight.std())
            found |= {f"base_model.{place}.lora_A.weight": a, f"base_model.{place}.lora_B.weight": b}
            weights[name] = weight + b @ a
    return found, weights


@torch.no_grad()
def fill(model: LoadedModel, seed: int = 0) -> None:
    """Weights under which attention is sharp, states remember some tokens, and every bias and norm counts."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(model.decoder.weights.named.items()):
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        if not tensor.is_floating_point():
            # the experts of each token id
            tensor.copy_(torch.randint(8, tensor.shape, generator=generator))
        elif "embed_tokens" in name:
            tensor.copy_(noise)
        elif name.endswith("A_log"):
            tensor.copy_(0.5 * noise - 2)
        elif name.endswith(("bias", "sinks")):
            tensor.copy_(noise * 0.5)
        elif tensor.dim() == 1:
            tensor.copy_(1 + 0.3 * noise)
        else:
            tensor.copy_(noise * 1.8 / math.sqrt(tensor.shape[-1]))


_MADE: dict[str, Kind] = {}


def kind(name: str) -> Kind:
    """The model of that kind, made once."""
    if name not in _MADE:
        _MADE[name] = Kind(name)
    return _MADE[name]
