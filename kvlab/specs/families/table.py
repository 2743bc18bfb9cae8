"""The families: for each `model_type` how its layers are built, how it names its fields, and its class's defaults.

Defaults are those of transformers 5.24's config class, given only for fields that published configs leave out.
Sources of the layer rules: transformers 5.24 `models/<family>/configuration_<family>.py`; for the types that it
does not have (qwen, chatglm, baichuan, internlm2, phi3small, nemotron-nas, xverse, minimax_m1) the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlab.specs.families import dense, latent, linear, multimodal, recurrent, windows
from kvlab.specs.families.dense import Parts
from kvlab.specs.families.fields import Fields

Names = Mapping[str, str | tuple[str, ...]]


@dataclass(frozen=True)
class Family:
    """A row of facts.

    Attributes:
        layers: builds the parts of every layer from the fields.
        names: usual field name -> the family's.
        defaults: values for fields that a config may leave out.
    """

    layers: Callable[[Fields], list[Parts]]
    names: Names = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {}


def _add(
    model_types: str, layers: Callable[[Fields], list[Parts]], names: Names | None = None, **defaults: Any
) -> None:
    for model_type in model_types.split():
        FAMILIES[model_type] = Family(layers, names or {}, defaults)


# every key and value kept
_LAYERS = {"num_hidden_layers": "num_layers"}
_add(
    "apertus arcee cohere granite granitemoe granitemoeshared internlm2 llama nemotron olmo olmo2 olmoe phi",
    dense.all_full, num_key_value_heads=None,
)  # fmt: skip
_add("exaone glm4_moe phi3small stablelm", dense.all_full, _LAYERS)
_add("ernie4_5 glm glm4 internlm3 minimax_m2 seed_oss", dense.all_full, head_dim=128)
_add("ernie4_5_moe glm4v_text glm4v_moe_text", dense.all_full)
_add("baichuan gpt_neox internlm opt persimmon xverse", dense.multi_head)
_add("gemma", dense.all_full, head_dim=256, num_key_value_heads=16, vocab_size=256000)
_add("qwen", dense.multi_head, {"head_dim": "kv_channels"})
_GPT = {
    "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}  # fmt: skip
_add("gpt2 gptj codegen", dense.multi_head, _GPT)
_add("gpt_bigcode", dense.multi_query_flag, _GPT, multi_query=True)
_add("bloom", dense.multi_head, {**_GPT, "hidden_size": "n_embed"})
_add(
    "falcon",
    dense.falcon,
    {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "num_kv_heads": "n_head_kv"},
    multi_query=True, max_position_embeddings=2048,
)  # fmt: skip
_MOSAIC = {
    "hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers",
    "num_key_value_heads": "attn_config.kv_n_heads", "attn_type": "attn_config.attn_type",
    "max_position_embeddings": "max_seq_len",
}  # fmt: skip
_add("mpt", dense.mpt, _MOSAIC, attn_type="multihead_attention")
_add("dbrx", dense.all_full, _MOSAIC)
_add(
    "chatglm",
    dense.chatglm,
    {
        "head_dim": "kv_channels", "num_key_value_heads": "multi_query_group_num", "num_hidden_layers": "num_layers",
        "vocab_size": "padded_vocab_size", "max_position_embeddings": "seq_length",
    },
)  # fmt: skip
_add("nemotron-nas", dense.nemotron_nas)

# windows, chunks, shared tails
_add("mistral", windows.window_everywhere, sliding_window=4096, num_key_value_heads=8)
_add("mixtral", windows.window_everywhere, num_key_value_heads=8)
_add("ministral3", windows.window_everywhere, num_key_value_heads=8, head_dim=128)
_add("phi3", windows.window_everywhere, num_key_value_heads=None)
_add("phi4mm phi4_multimodal phimoe starcoder2", windows.window_everywhere)
_add("qwen2 qwen2_vl_text qwen2_5_vl_text", windows.qwen_window)
_add("qwen3 qwen3_vl_text", windows.qwen_window, head_dim=128)
_add("qwen2_moe smollm3", windows.switched_window)
_add("qwen3_moe qwen3_vl_moe_text", windows.qwen_window_everywhere)
_PATTERN = {"layer_period": ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")}
_add(
    "gemma2", windows.alternating(2), _PATTERN,
    sliding_window=4096, head_dim=256, num_key_value_heads=4, vocab_size=256000, max_position_embeddings=8192,
)  # fmt: skip
_add(
    "gemma3_text", windows.alternating(6), _PATTERN,
    sliding_window=4096, head_dim=256, num_attention_heads=8, num_key_value_heads=4, vocab_size=262208,
    max_position_embeddings=131072,
)  # fmt: skip
_add("cohere2", windows.alternating(4), _PATTERN, sliding_window=4096, num_key_value_heads=None, vocab_size=256000)
_add("olmo3", windows.alternating(4), _PATTERN, sliding_window=4096, num_key_value_heads=None)
_add("exaone4", windows.alternating(4), _PATTERN, sliding_window=4096)
_add("gpt_oss", windows.alternating(2), _PATTERN, sliding_window=128, head_dim=64)
_add("afmoe", windows.alternating(4), _PATTERN, sliding_window=1024, head_dim=128, num_key_value_heads=None)
_add("gemma3n_text", windows.gemma3n, _PATTERN, head_dim=256, num_kv_shared_layers=15, vocab_size=262400)
_add("gemma4_text", windows.gemma4, _PATTERN, head_dim=256, num_kv_shared_layers=0, global_head_dim=512)
_add(
    "llama4_text", windows.llama4, attention_chunk_size=8192, no_rope_layer_interval=4, head_dim=128,
    num_key_value_heads=8,
)  # fmt: skip
_add("mllama_text_model", multimodal.mllama)

# latents, indexed and compressed attention
_add("deepseek_v2", latent.all_latent, num_key_value_heads=None)
_add("deepseek_v3 glm4_moe_lite kimi_k2 minicpm3", latent.all_latent)
_add("deepseek_v32 glm_moe_dsa", latent.all_latent_indexed)
_add("deepseek_v4", latent.deepseek_v4)

# recurrent states, alone and in hybrids
_MAMBA = {
    "mamba_inner_size": "intermediate_size", "mamba_expand": "expand", "mamba_d_state": "state_size",
    "mamba_d_conv": "conv_kernel",
}  # fmt: skip
_add(
    "mamba falcon_mamba", recurrent.every_layer(recurrent.mamba1), _MAMBA,
    mamba_expand=2, mamba_d_conv=4, mamba_d_state=16,
)  # fmt: skip
_add(
    "mamba2",
    recurrent.every_layer(recurrent.mamba2),
    {
        "mamba_n_heads": "num_heads", "mamba_d_head": "head_dim", "mamba_n_groups": "n_groups",
        "mamba_expand": "expand", "mamba_d_state": "state_size", "mamba_d_conv": "conv_kernel",
    },
    mamba_d_conv=4, mamba_expand=2, mamba_d_state=128, mamba_n_groups=8, mamba_n_heads=128, mamba_d_head=64,
)  # fmt: skip
_add("rwkv", recurrent.every_layer(recurrent.rwkv4), {"max_position_embeddings": "context_length"})
_BLOCKS = {"layer_types": "layers_block_type"}
_add("jamba", recurrent.jamba, _BLOCKS, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2)
_MAMBA2 = {"mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2}
_HEADS2 = {"mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_d_state": 256}
_add("bamba", recurrent.bamba, _BLOCKS, **_MAMBA2, **_HEADS2)
_add("granitemoehybrid", recurrent.granite_hybrid, _BLOCKS, num_key_value_heads=None, **_MAMBA2, **_HEADS2)
_add("falcon_h1", recurrent.falcon_h1, {"mamba_inner_size": "mamba_d_ssm"}, mamba_inner_size=1024, **_MAMBA2, **_HEADS2)
_add(
    "zamba2",
    recurrent.zamba2,
    {
        **_BLOCKS, "mamba_n_heads": "n_mamba_heads", "mamba_d_head": "mamba_headdim", "mamba_n_groups": "mamba_ngroups",
        "mamba_d_state": "state_size", "mamba_d_conv": "conv_dimension", "mamba_expand": "expansion_factor",
    },
    mamba_d_state=64, num_key_value_heads=None, **_MAMBA2,
)  # fmt: skip
_add(
    "nemotron_h",
    recurrent.nemotron_h,
    {
        "mamba_n_heads": "mamba_num_heads", "mamba_d_head": "mamba_head_dim", "mamba_n_groups": "n_groups",
        "mamba_d_state": "ssm_state_size", "mamba_d_conv": "conv_kernel", "head_dim": "attention_head_dim",
    },
    head_dim=128, mamba_d_conv=4, mamba_d_state=128, mamba_n_groups=8, mamba_n_heads=128, mamba_d_head=64,
)  # fmt: skip
_DELTA = {"layer_period": "full_attention_interval"}
_add("qwen3_next qwen3_5_text qwen3_5_moe_text", recurrent.delta_hybrid, _DELTA, head_dim=256)
_LINEAR = "linear_attn_config."
_add(
    "kimi_linear",
    recurrent.kimi_linear,
    {
        "full_attn_layers": _LINEAR + "full_attn_layers", "kda_layers": _LINEAR + "kda_layers",
        "linear_num_heads": _LINEAR + "num_heads", "linear_head_dim": _LINEAR + "head_dim",
        "linear_conv_kernel_dim": _LINEAR + "short_conv_kernel_size", "max_position_embeddings": "model_max_length",
    },
)  # fmt: skip
_add("lfm2 lfm2_moe", recurrent.lfm2, conv_L_cache=3)
# configs of this project
_add("kvlab_cla", windows.cross_layer, cla_sharing_factor=2)
_add("kvlab_linear", linear.linear_attention)
_add("kvlab_hybrid", recurrent.native_hybrid, **_MAMBA2)
_add("kvlab_hymba", recurrent.hymba, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2)
_add("kvlab_retnet", linear.retnet)
_add("minimax minimax_m1 minimax_text_01", recurrent.minimax)
_add(
    "recurrent_gemma", recurrent.recurrent_gemma, {"sliding_window": "attention_window_size"},
    conv1d_width=4, sliding_window=2048, num_key_value_heads=None, block_types=["recurrent", "recurrent", "attention"],
)  # fmt: skip
