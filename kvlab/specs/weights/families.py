"""One row of facts per family: mixer, feed-forward part, norms, and what stands outside the layers.

Source: transformers 5.24, models/<model_type>/modeling_<model_type>.py. The rows under "published structure" are not
in transformers; they follow the code published with the models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvlab.specs.weights import hybrids, special, states
from kvlab.specs.weights.blocks import (
    Fact,
    Ffn,
    FfnRule,
    Mixer,
    after_dense_layers,
    after_first_dense,
    attention,
    ernie_routes,
    linear,
    mla,
    mla_with_index,
    mlp,
    mlp_size,
    moe,
    sparse_step,
)
from kvlab.specs.weights.reader import Reader


@dataclass(frozen=True)
class Family:
    """Facts of a family.

    Attributes:
        mixer, ffn: parameters of one layer's parts.
        norms: norms over the hidden size in one layer.
        norm_width: parameters of one such norm in hidden sizes: 1 a gain, 2 gain and bias, 0 neither.
        layer_norms: replaces norms * norm_width where layers differ.
        final_norm: whether one more norm follows the last layer.
        head_bias: bias of the output matrix.
        tables: further tables read by row, as (rows, width).
        token_rows: rows the token table has beyond the vocabulary.
        outside: further parameters outside the layers.
        reread: see WeightCount.
    """

    mixer: Mixer
    ffn: FfnRule
    norms: int = 2
    norm_width: int = 1
    layer_norms: Mixer | None = None
    final_norm: bool = True
    head_bias: Fact = False
    tables: Callable[[Reader], tuple[int, int]] = lambda f: (0, 0)
    token_rows: int = 0
    outside: Callable[[Reader], int] = lambda f: 0
    reread: Callable[[Reader], int] = lambda f: 0


def _positions(extra: int = 0) -> Callable[[Reader], tuple[int, int]]:
    return lambda f: (f["max_position_embeddings"] + extra, f["hidden_size"])


def _stablelm_norms(f: Reader, layer: int) -> int:
    return 2 * f["hidden_size"] * (1 if f.flag("use_parallel_residual") else 2)


def _qwen1_ffn(f: Reader, layer: int) -> Ffn:
    # intermediate_size counts the gate and the up projection together
    return Ffn(mlp_size(f, f["intermediate_size"] // 2))


def _phi3small_ffn(f: Reader, layer: int) -> Ffn:
    return Ffn(mlp_size(f, f["intermediate_size"], bias=True))


_LLAMA = Family(attention("attention_bias"), mlp(bias="mlp_bias"))
_PLAIN = Family(attention(), mlp())
_QWEN2 = Family(attention(True, out_bias=False), mlp())
_GPTJ = Family(attention(), mlp(gated=False, bias=True), norms=1, norm_width=2, head_bias=True)
_GATED_ATTENTION = attention("attention_bias", qk_norm="head", gate=True)
_DELTA = hybrids.alternating(
    states.gated_delta_net, _GATED_ATTENTION, "full_attention_interval", hybrids.attention_every(4)
)
_WIDTH_NORM = attention("attention_bias", qk_norm="width")
_HEAD_NORM = attention("attention_bias", qk_norm="head")
_PER_LAYER = {"norms": 4, "tables": special.per_layer_table}

FAMILIES: dict[str, Family] = {
    # dense, one gain per norm
    "llama": _LLAMA, "granite": _LLAMA, "helium": _LLAMA, "smollm3": _LLAMA, "exaone": _LLAMA, "internlm3": _LLAMA,
    "mistral": _PLAIN, "ministral": _PLAIN, "ministral3": _PLAIN, "phi3": _PLAIN, "phi4_multimodal": _PLAIN,
    "arcee": Family(attention("attention_bias"), mlp(gated=False, bias="mlp_bias")),
    "qwen2": _QWEN2, "qwen2_vl": _QWEN2,
    "qwen3": Family(_HEAD_NORM, mlp()), "qwen3_vl": Family(_HEAD_NORM, mlp()),
    "seed_oss": Family(attention("attention_bias", "attention_out_bias"), mlp(bias="mlp_bias")),
    "ernie4_5": Family(attention("use_bias"), mlp(bias="use_bias")),
    "gemma": Family(attention("attention_bias"), mlp()),
    "gemma2": Family(attention("attention_bias"), mlp(), norms=4),
    "gemma3": Family(_HEAD_NORM, mlp(), norms=4),
    "olmo": Family(attention("attention_bias"), mlp(), norm_width=0, final_norm=False),
    "olmo2": Family(_WIDTH_NORM, mlp()), "olmo3": Family(_WIDTH_NORM, mlp()),
    "exaone4": Family(attention(qk_norm="head"), mlp()),
    "glm": Family(attention("attention_bias", out_bias=False), mlp()),
    "glm4": Family(attention("attention_bias", out_bias=False), mlp(), norms=4),
    "glm4v": Family(attention(True, out_bias=False), mlp(), norms=4),
    "apertus": Family(_HEAD_NORM, special.apertus_ffn),
    "cohere": Family(attention("attention_bias", qk_norm="width", qk_norm_if="use_qk_norm"), mlp(), norms=1),
    "cohere2": Family(attention("attention_bias"), mlp(), norms=1),
    "mpt": Family(attention(), mlp(gated=False)),
    "mllama": Family(special.mllama_mixer, mlp(), token_rows=8),
    # dense, gain and bias in every norm
    "nemotron": Family(attention("attention_bias"), mlp(False, "mlp_bias"), norm_width=2),
    "starcoder2": Family(attention("use_bias"), mlp(False, "use_bias"), norm_width=2),
    "stablelm": Family(
        attention("use_qkv_bias", False, "width", "qk_layernorm"), mlp(), norm_width=2, layer_norms=_stablelm_norms
    ),
    "phi": Family(
        attention(True, True, "head+bias", "qk_layernorm"), mlp(False, True), norms=1, norm_width=2, head_bias=True
    ),
    "persimmon": Family(attention(True, True, "head+bias", "qk_layernorm"), mlp(False, True), norm_width=2),
    "gpt2": Family(attention(True), mlp(False, True), norm_width=2, tables=_positions()),
    "gpt_bigcode": Family(special.gpt_bigcode_mixer, mlp(False, True), norm_width=2, tables=_positions()),
    "gptj": _GPTJ, "codegen": _GPTJ,
    "gpt_neox": Family(attention("attention_bias"), mlp(False, True), norm_width=2),
    "bloom": Family(attention(True), mlp(False, True), norm_width=2, outside=lambda f: 2 * f["hidden_size"]),
    "falcon": Family(special.falcon_mixer, mlp(False, "bias"), norm_width=2, layer_norms=special.falcon_norms),
    "opt": Family(
        attention("enable_bias"), mlp(False, "enable_bias"), layer_norms=lambda f, layer: 2 * special.opt_norm(f),
        final_norm=False, outside=special.opt_outside, tables=_positions(2),
    ),
    # routed experts
    "mixtral": Family(attention(), moe(width="intermediate_size")),
    "qwen2_moe": Family(attention("qkv_bias", False), moe(sparse_step, shared="gated")),
    "qwen3_moe": Family(_HEAD_NORM, moe(sparse_step)), "qwen3_vl_moe": Family(_HEAD_NORM, moe(sparse_step)),
    "olmoe": Family(_WIDTH_NORM, moe(width="intermediate_size")),
    "phimoe": Family(
        attention("attention_bias"), moe(width="intermediate_size"), norm_width=2, head_bias="lm_head_bias"
    ),
    "gpt_oss": Family(
        attention("attention_bias", sinks=True), moe(width="intermediate_size", router_bias=True, expert_bias=True)
    ),
    "minimax_m2": Family(attention(qk_norm="width"), moe(width="intermediate_size")),
    "glm4_moe": Family(
        attention("attention_bias", False, "head", "use_qk_norm"), moe(after_first_dense, shared="count")
    ),
    "glm4v_moe": Family(attention("attention_bias", False), moe(after_first_dense, shared="count")),
    "ernie4_5_moe": Family(
        attention("use_bias"), moe(ernie_routes, shared="count", router_bias=True, mlp_bias="use_bias")
    ),
    "afmoe": Family(special.afmoe_mixer, moe(after_dense_layers, shared="count", router_bias=True), norms=4),
    "dbrx": Family(attention(), moe(width="ffn_hidden_size")),
    "granitemoe": Family(attention("attention_bias"), moe(width="intermediate_size")),
    "granitemoeshared": Family(attention("attention_bias"), moe(width="intermediate_size", shared="width")),
    "llama4": Family(attention("attention_bias"), hybrids.llama4_ffn),
    # latent attention
    "deepseek_v2": Family(
        special.deepseek_v2_mixer, moe(after_first_dense, shared="count", mlp_bias="mlp_bias")
    ),
    "deepseek_v3": Family(mla, moe(after_first_dense, shared="count")),
    "deepseek_v32": Family(mla_with_index, moe(after_first_dense, shared="count")),
    "glm_moe_dsa": Family(mla_with_index, moe(after_first_dense, shared="count")),
    "glm4_moe_lite": Family(mla, moe(after_first_dense, shared="count")),
    "minicpm3": Family(mla, mlp()),
    "deepseek_v4": Family(
        special.deepseek_v4_mixer, special.deepseek_v4_ffn, outside=special.deepseek_v4_outside
    ),
    # states, alone or between attention layers
    "mamba": Family(states.mamba1(), lambda f, layer: Ffn(0), norms=1),
    "falcon_mamba": Family(states.mamba1(), lambda f, layer: Ffn(0), norms=1),
    "mamba2": Family(states.mamba2_expanded, lambda f, layer: Ffn(0), norms=1),
    "zamba2": Family(
        states.mamba2_expanded, lambda f, layer: Ffn(0), norms=1, outside=special.zamba2_outside,
        reread=special.zamba2_reread,
    ),
    "jamba": Family(hybrids.jamba_mixer, moe(hybrids.jamba_routes, width="intermediate_size")),
    "bamba": Family(hybrids.bamba_mixer, mlp(bias="mlp_bias")),
    "falcon_h1": Family(hybrids.falcon_h1_mixer, mlp(bias="mlp_bias")),
    "granitemoehybrid": Family(
        hybrids.alternating(states.mamba2_expanded, attention("attention_bias")), hybrids.granite_hybrid_ffn
    ),
    "nemotron_h": Family(hybrids.nemotron_h_mixer, hybrids.nemotron_h_ffn, norms=1),
    "qwen3_next": Family(_DELTA, moe(sparse_step, shared="gated")),
    "qwen3_5": Family(_DELTA, mlp()),
    "qwen3_5_moe": Family(_DELTA, moe(shared="gated")),
    "kimi_linear": Family(hybrids.kimi_linear_mixer, moe(after_first_dense, shared="count")),
    "lfm2": Family(hybrids.lfm2_mixer, hybrids.lfm2_ffn),
    "lfm2_moe": Family(hybrids.lfm2_mixer, moe(after_dense_layers)),
    "minimax": Family(
        hybrids.alternating(states.lightning, attention(), default=[True, False]), moe(width="intermediate_size")
    ),
    "recurrent_gemma": Family(hybrids.recurrent_gemma_mixer, hybrids.recurrent_gemma_ffn),
    # one more LayerNorm stands before the first layer
    "rwkv": Family(
        states.rwkv_time_mix, states.rwkv_channel_mix, norm_width=2, outside=lambda f: 2 * f["hidden_size"]
    ),
    # inputs of their own for every layer
    "gemma3n": Family(special.gemma3n_mixer, special.gemma3n_ffn, outside=special.gemma3n_outside, **_PER_LAYER),
    "gemma4": Family(special.gemma4_mixer, special.gemma4_ffn, outside=special.per_layer_outside, **_PER_LAYER),
    # published structure, not in transformers
    "baichuan": _PLAIN, "xverse": _PLAIN,
    "internlm": Family(attention("bias"), mlp()), "internlm2": Family(attention("bias"), mlp()),
    "qwen": Family(attention(True, out_bias=False), _qwen1_ffn),
    "chatglm": Family(attention("add_qkv_bias", "add_bias_linear"), mlp(bias="add_bias_linear")),
    "phi3small": Family(attention(True), _phi3small_ffn, norm_width=2),
    "nemotron-nas": Family(hybrids.decilm_mixer, hybrids.decilm_ffn, layer_norms=hybrids.decilm_norms),
}  # fmt: skip

# families whose structure comes from published code
PUBLISHED = ("internlm", "internlm2", "baichuan", "xverse", "qwen", "chatglm", "phi3small", "nemotron-nas")


def lm_head(f: Reader, family: Family, width: int) -> tuple[int, int]:
    """(matrix, bias) of the output projection over `width` channels."""
    return linear(width, f["vocab_size"]), f["vocab_size"] * f.flag(family.head_bias)
