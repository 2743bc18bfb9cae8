"""The parameter count against transformers: every family small, and every shared config at full size, on meta."""

import json
import math
import os
import re
from pathlib import Path

import pytest

from kvlab.specs.weights import count
from kvlab.specs.weights.families import FAMILIES, PUBLISHED

pytest.importorskip("transformers")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SHARED = Path(__file__).parents[3] / "shared" / "configs"
ENCODER = re.compile(r"vision|visual|audio|projector|embed_tokens_extend|image_newline")


def oracle(config: dict) -> dict[str, tuple[int, ...]]:
    """Name and shape of every distinct parameter of the text model in `config`, as transformers builds it on meta."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = {k: v for k, v in config.items() if k not in ("quantization_config", "auto_map")}
    if config["model_type"] == "kimi_k2":
        config["model_type"] = "deepseek_v3"
    if config["model_type"] == "llava" and "text_config" not in config:
        config["model_type"] = "llama"
    whole = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    text, errors = whole.get_text_config(decoder=True), []
    with torch.device("meta"):
        for part, auto in (
            (text, AutoModelForCausalLM),
            (whole, AutoModelForCausalLM),
            (whole, AutoModelForImageTextToText),
        ):
            try:
                model = auto.from_config(part, dtype=torch.bfloat16)
                # named_parameters gives a tied tensor once
                return {n: tuple(p.shape) for n, p in model.named_parameters() if not ENCODER.search(n)}
            except ValueError as error:
                errors.append(str(error)[:200])
    raise AssertionError(errors)


def size(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


# no two numbers alike, so that no two mistakes cancel
BASE = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 82, "num_hidden_layers": 5, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BASE_SIZES = [name for name in BASE if ("_size" in name and name != "vocab_size") or name.startswith(("num_", "max_"))]
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 22}
DEEPSEEK = {
    "kv_lora_rank": 20, "q_lora_rank": 28, "qk_nope_head_dim": 10, "qk_rope_head_dim": 4, "v_head_dim": 14,
    "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 22,
    "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1,
}  # fmt: skip
INDEX = {"index_head_dim": 8, "index_n_heads": 3, "index_topk": 4}
MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 10, "mamba_d_conv": 3,
    "mamba_expand": 2,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3, "head_dim": 16, "full_attention_interval": 3,
}  # fmt: skip
GPT = {"n_embd": 48, "n_layer": 5, "n_head": 6, "n_positions": 64, "hidden_size": None, "num_key_value_heads": None,
       "num_hidden_layers": None, "num_attention_heads": None, "intermediate_size": None,
       "max_position_embeddings": None, "rotary_dim": 4}  # fmt: skip
V4 = {
    "head_dim": 16, "q_lora_rank": 28, "o_lora_rank": 12, "o_groups": 3, "hc_mult": 3, "num_key_value_heads": 1,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 22,
    "intermediate_size": None, **INDEX,
}  # fmt: skip
GEMMA_INPUTS = {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 91, "head_dim": 16}
NO_FFN = {"intermediate_size": None, "num_key_value_heads": None}
PHI_ROPE = {"original_max_position_embeddings": 64}

CASES: dict[str, list[dict]] = {
    "llama": [{}, {"attention_bias": True, "mlp_bias": True, "head_dim": 10}, {"tie_word_embeddings": True},
              {"num_key_value_heads": None}],
    "granite": [{}, {"attention_bias": True}], "helium": [{"head_dim": 8}], "smollm3": [{"mlp_bias": True}],
    "exaone": [{"num_layers": 4, "num_hidden_layers": None}], "internlm3": [{"head_dim": 10}],
    "mistral": [{}, {"head_dim": 10}], "ministral3": [{"head_dim": 10}],
    "phi3": [PHI_ROPE], "arcee": [{}, {"mlp_bias": True}],
    "qwen2": [{}, {"tie_word_embeddings": True}], "qwen3": [{"head_dim": 10}, {"attention_bias": True}],
    "seed_oss": [{"head_dim": 10}, {"attention_out_bias": True}], "ernie4_5": [{"use_bias": True, "head_dim": 10}],
    "gemma": [{"head_dim": 10}], "gemma2": [{"head_dim": 10}], "gemma3_text": [{"head_dim": 10}],
    "olmo": [{}], "olmo2": [{}], "olmo3": [{"attention_bias": True}], "exaone4": [{"head_dim": 10}],
    "glm": [{"head_dim": 10}], "glm4": [{"head_dim": 10, "attention_bias": False}],
    "apertus": [{"attention_bias": True}],
    "cohere": [{}, {"use_qk_norm": True, "attention_bias": True}], "cohere2": [{}],
    "mpt": [{"d_model": 48, "n_heads": 6, "n_layers": 5, "expansion_ratio": 4, "hidden_size": None,
             "num_hidden_layers": None, "num_attention_heads": None, "num_key_value_heads": None,
             "intermediate_size": None}],
    "nemotron": [{}, {"attention_bias": True, "mlp_bias": True, "head_dim": 10}],
    "starcoder2": [{}, {"use_bias": False}],
    "stablelm": [{}, {"use_qkv_bias": True, "qk_layernorm": True, "num_key_value_heads": 3},
                 {"use_parallel_residual": True}],
    "phi": [{}, {"qk_layernorm": True}],
    "persimmon": [{"qk_layernorm": False, "num_key_value_heads": None}, {"num_key_value_heads": None}],
    "gpt2": [GPT, {**GPT, "n_inner": 70}], "gpt_bigcode": [GPT, {**GPT, "multi_query": False}],
    "gptj": [GPT], "codegen": [{**GPT, "n_head": 8}],
    "gpt_neox": [{"num_key_value_heads": None}, {"attention_bias": False, "num_key_value_heads": None}],
    "bloom": [{"n_layer": 5, "n_head": 6, "num_key_value_heads": None, "intermediate_size": None}],
    "falcon": [
        {**NO_FFN, **more} for more in (
            {"multi_query": True}, {"multi_query": False, "bias": True}, {"parallel_attn": False, "alibi": True},
            {"new_decoder_architecture": True, "num_kv_heads": 3},
            {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 70})
    ],
    "opt": [{"ffn_dim": 82, "intermediate_size": None, "num_key_value_heads": None, "word_embed_proj_dim": width,
             **more} for width, more in ((48, {}), (20, {"do_layer_norm_before": False, "enable_bias": False}),
                                         (20, {"layer_norm_elementwise_affine": False}))],
    "mixtral": [{"num_local_experts": 7, "num_experts_per_tok": 3}],
    "qwen2_moe": [{**EXPERTS, "shared_expert_intermediate_size": 26},
                  {**EXPERTS, "shared_expert_intermediate_size": 26, "decoder_sparse_step": 2, "qkv_bias": False}],
    "qwen3_moe": [{**EXPERTS, "head_dim": 10}, {**EXPERTS, "mlp_only_layers": [1, 3]}],
    "olmoe": [{"num_experts": 7, "num_experts_per_tok": 3}],
    "phimoe": [{"num_local_experts": 7, "num_experts_per_tok": 3, "attention_bias": True, "lm_head_bias": True},
               {"num_local_experts": 7, "num_experts_per_tok": 3}],
    "gpt_oss": [{"num_local_experts": 7, "num_experts_per_tok": 3, "head_dim": 10}],
    "minimax_m2": [{"num_local_experts": 7, "num_experts_per_tok": 3, "head_dim": 10}],
    "glm4_moe": [{**DEEPSEEK, "head_dim": 10, "use_qk_norm": True, "attention_bias": True}, DEEPSEEK],
    "ernie4_5_moe": [{"moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 22, "moe_num_shared_experts": 2,
                      "moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 2}],
    "afmoe": [{**EXPERTS, "num_dense_layers": 2, "num_shared_experts": 1, "head_dim": 10}],
    "dbrx": [{"d_model": 48, "n_heads": 6, "n_layers": 5, "max_seq_len": 64, **dict.fromkeys(BASE_SIZES),
              "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
              "ffn_config": {"ffn_hidden_size": 22, "moe_num_experts": 7, "moe_top_k": 3, "hidden_size": 48}}],
    "granitemoe": [{"num_local_experts": 7, "num_experts_per_tok": 3}],
    "granitemoeshared": [{"num_local_experts": 7, "num_experts_per_tok": 3, "shared_intermediate_size": 26}],
    "llama4_text": [{"num_local_experts": 7, "intermediate_size_mlp": 90, "interleave_moe_layer_step": 2,
                     "head_dim": 10, "attention_bias": True}],
    "deepseek_v2": [DEEPSEEK, {**DEEPSEEK, "q_lora_rank": None, "mlp_bias": True, "attention_bias": True}],
    "deepseek_v3": [DEEPSEEK, {**DEEPSEEK, "q_lora_rank": None}],
    "deepseek_v32": [{**DEEPSEEK, **INDEX}],
    "glm_moe_dsa": [{**DEEPSEEK, **INDEX}, {**DEEPSEEK, **INDEX, "index_topk_freq": 2},
                    {**DEEPSEEK, **INDEX, "index_topk_pattern": "FSSFS"}],
    "glm4_moe_lite": [{**DEEPSEEK, "first_k_dense_replace": 1}],
    "minicpm3": [{k: v for k, v in DEEPSEEK.items() if "_dim" in k or "rank" in k}],
    "deepseek_v4": [{**V4, "compress_ratios": [0, 4, 128, 4, 128]}, V4],
    "mamba": [{"state_size": 10, "conv_kernel": 3, "expand": 2, "intermediate_size": None, "use_bias": True}],
    "falcon_mamba": [{"state_size": 10, "conv_kernel": 3, "expand": 2}],
    "mamba2": [{"state_size": 10, "conv_kernel": 3, "expand": 2, "num_heads": 8, "head_dim": 12, "n_groups": 2,
                "intermediate_size": None, "use_bias": bias} for bias in (False, True)],
    "zamba2": [{"mamba_d_state": 10, "mamba_d_conv": 3, "mamba_expand": 2, "n_mamba_heads": 8, "mamba_ngroups": 2,
                "num_mem_blocks": 2, "adapter_rank": 5, "num_key_value_heads": 6, **more,
                "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid"]}
               for more in ({}, {"use_shared_attention_adapter": True, "add_bias_linear": True})],
    "jamba": [{"num_experts": 7, "num_experts_per_tok": 3, "mamba_d_state": 10, "mamba_d_conv": 3, "mamba_expand": 2,
               "mamba_dt_rank": rank, "attn_layer_period": 3, "attn_layer_offset": 1, "use_mamba_kernels": False}
              for rank in ("auto", 5)],
    "bamba": [{**MAMBA2, "attn_layer_indices": [1, 4], "mlp_bias": True}],
    "falcon_h1": [{**MAMBA2, "head_dim": 10, "mamba_d_ssm": 96, "mamba_rms_norm": norm, "projectors_bias": not norm}
                  for norm in (True, False)],
    "granitemoehybrid": [
        {**MAMBA2, "num_local_experts": experts, "num_experts_per_tok": 3, "shared_intermediate_size": 26,
         "layer_types": ["mamba", "attention", "mamba", "mamba", "attention"]} for experts in (7, 0)
    ],
    "nemotron_h": [
        {"hybrid_override_pattern": "ME*-M", "mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2,
         "ssm_state_size": 10, "conv_kernel": 3, "head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 2,
         "moe_intermediate_size": 22, "moe_shared_expert_intermediate_size": 26, "mlp_bias": latent is None,
         "moe_latent_size": latent, "n_group": 1, "topk_group": 1} for latent in (None, 18)
    ],
    "qwen3_next": [{**DELTA, **EXPERTS, "shared_expert_intermediate_size": 26}],
    "qwen3_5_text": [{**DELTA}], "qwen3_5_moe_text": [{**DELTA, **EXPERTS, "shared_expert_intermediate_size": 26}],
    "kimi_linear": [{**DEEPSEEK, "num_key_value_heads": 6, "num_local_experts": 8, "n_routed_experts": None,
                     "linear_attn_config": {"kda_layers": [1, 2, 4], "full_attn_layers": [3, 5], "num_heads": 3,
                                            "head_dim": 10, "short_conv_kernel_size": 3}}],
    "lfm2": [{"full_attn_idxs": [1, 3], "conv_L_cache": 3, "block_multiple_of": 16, "conv_bias": True},
             {"layer_types": ["conv", "full_attention"] * 2 + ["conv"], "block_auto_adjust_ff_dim": False}],
    "lfm2_moe": [{**EXPERTS, "num_dense_layers": 2, "layer_types": ["conv", "full_attention"] * 2 + ["conv"]}],
    "minimax": [{"num_local_experts": 7, "num_experts_per_tok": 3, "head_dim": 10}],
    "recurrent_gemma": [{"lru_width": 36, "conv1d_width": 3, "head_dim": 8}],
    "rwkv": [{"attention_hidden_size": 36, "context_length": 64}, {"intermediate_size": None}],
    "gemma3n_text": [{**GEMMA_INPUTS, "num_kv_shared_layers": 2, "intermediate_size": [82, 82, 90, 90, 82],
                      "laurel_rank": 5, "altup_num_inputs": 3, "activation_sparsity_pattern": None,
                      "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]}],
    "gemma4_text": [
        {**GEMMA_INPUTS, "global_head_dim": 20, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
         "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]},
        {**GEMMA_INPUTS, **EXPERTS, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "top_k_experts": 3,
         "attention_k_eq_v": True, "num_global_key_value_heads": 3, "num_kv_shared_layers": 0},
    ],
}  # fmt: skip
FLAT = [(family, i) for family, variants in CASES.items() for i in range(len(variants))]


@pytest.mark.parametrize(("model_type", "variant"), FLAT, ids=[f"{family}-{i}" for family, i in FLAT])
def test_a_small_model_has_as_many_parameters_as_its_class(model_type, variant):
    config = {**BASE, "model_type": model_type, **CASES[model_type][variant]}
    config = {k: v for k, v in config.items() if v is not None or k in ("q_lora_rank",)}
    shapes = oracle(config)
    got = count(config)
    assert got.total == size(shapes), sorted(shapes.items())[:40]
    routed = {n: s for n, s in shapes.items() if re.search(r"experts\.((gate_up|up|down)_proj|mlp\.[vw]\d)", n)}
    assert got.total - got.shared == size({n: s for n, s in routed.items() if "shared" not in n})
    heads = {n: s for n, s in shapes.items() if re.search(r"(^lm_head|^head)\.weight", n)}
    assert got.tied == (not heads)
    assert got.lm_head == (size(heads) if heads else got.lm_head)


WRAPPED = {
    "qwen2_vl": {}, "qwen2_5_vl": {}, "qwen3_vl": {"head_dim": 10}, "qwen3_vl_moe": {**EXPERTS, "head_dim": 10},
    "glm4v": {}, "glm4v_moe": DEEPSEEK, "gemma3": {"head_dim": 10}, "llava": {}, "mistral3": {},
    "mllama": {"cross_attention_layers": [1, 3]},
}  # fmt: skip


@pytest.mark.parametrize("model_type", WRAPPED)
def test_a_wrapper_is_counted_by_its_text_part(model_type):
    inner = {"llava": "llama", "mistral3": "mistral", "mllama": "mllama_text_model"}.get(
        model_type, f"{model_type}_text"
    )
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]}}
    text = {**BASE, **WRAPPED[model_type], **(rope if "v" in model_type[3:] else {}), "model_type": inner}
    text["tie_word_embeddings"] = False
    config = {"model_type": model_type, "tie_word_embeddings": False, "text_config": text, "vision_config": {}}
    assert count(config).total == size(oracle(config))
    assert "encoders are not included" in " ".join(count(config).notes)


def test_every_family_of_transformers_has_a_small_model_here():
    tried = {t.removesuffix("_model").removesuffix("_text") for t in (*CASES, *WRAPPED)}
    assert set(FAMILIES) - set(PUBLISHED) - tried == {"ministral", "phi4_multimodal"}


def shared_configs() -> list[Path]:
    return sorted(SHARED.glob("*__*.json"))


# transformers has no such class
NO_CLASS = ("minimax_m1", "qwen", "chatglm", "baichuan", "deepseek_vl_v2", "phi3small", "nemotron-nas", "xverse")


@pytest.mark.slow
@pytest.mark.skipif(not shared_configs(), reason="../shared/configs is not there")
@pytest.mark.parametrize("path", shared_configs() or [None], ids=lambda path: path.stem if path else "none")
def test_a_published_model_has_as_many_parameters_as_its_class(path):
    config = json.loads(path.read_text())
    if config["model_type"] in NO_CLASS:
        assert count(config).total > 0
        pytest.skip(f"transformers has no class for {config['model_type']}")
    assert count(config).total == size(oracle(config))
