"""Reads a model's facts from its config.json under the names transformers uses inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlab.specs.families.multimodal import text_part
from kvlab.specs.weights.class_defaults import DEFAULTS

# the name used here -> the other names published files use for the same fact
ALIASES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "multi_query_group_num", "kv_n_heads"),
    "vocab_size": ("padded_vocab_size",),
    "max_position_embeddings": ("n_positions",),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "ff_intermediate_size", "block_ff_dim"),
    "head_dim": ("kv_channels",),
    "tie_word_embeddings": ("tie_embedding",),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "experts_per_token", "top_k_experts", "moe_k", "moe_top_k"),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts"),
    "n_groups": ("mamba_n_groups", "mamba_ngroups"),
    "state_size": ("mamba_d_state", "ssm_state_size"),
    "conv_kernel": ("mamba_d_conv", "conv_L_cache"),
    "expand": ("mamba_expand",),
    "mamba_heads": ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads"),
    "mamba_head_width": ("mamba_head_dim", "mamba_d_head"),
    "conv_bias": ("use_conv_bias", "mamba_conv_bias"),
    "mamba_bias": ("use_bias", "mamba_proj_bias", "add_bias_linear"),
    "time_step_rank": ("mamba_dt_rank",),
    "layer_types": ("layers_block_type", "attn_type_list"),
}
# families with the structure of another
SAME_AS = {
    "kimi_k2": "deepseek_v3", "qwen2_5_vl": "qwen2_vl", "minimax_m1": "minimax", "minimax_text_01": "minimax",
    "phi4mm": "phi4_multimodal",
}  # fmt: skip


class Reader:
    """One model's facts: what its file says, else what transformers' class assumes (remembered in `assumed`)."""

    def __init__(self, config: Mapping[str, Any], family: str, wrapped: bool) -> None:
        self.config, self.family, self.wrapped = config, family, wrapped
        self.defaults = DEFAULTS.get(family, {})
        self.assumed: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        """The fact, or None when neither the file nor the class gives it. A null in the file is None."""
        names = (name, *ALIASES.get(name, ()))
        for key in names:
            if self.config.get(key) is not None:
                return self.config[key]
        if any(key in self.config for key in names):
            return None
        value = next((self.defaults[key] for key in names if key in self.defaults), None)
        if isinstance(value, int) and not isinstance(value, bool):
            self.assumed[name] = value
        return value

    def __getitem__(self, name: str) -> Any:
        """The fact.

        Raises:
            ValueError: it is missing; hidden size and depth must stand in the file itself unless it is a wrapper.
        """
        value = self.get(name)
        if name in ("hidden_size", "num_hidden_layers") and name in self.assumed and not self.wrapped:
            value = None
        if value is None:
            raise ValueError(f"{name} None: must be in the config of model_type {self.family!r} to count parameters")
        return value

    def flag(self, fact: bool | str) -> bool:
        """`fact` itself, or the config field it names (missing is False)."""
        return bool(self.get(fact)) if isinstance(fact, str) else fact

    def head_dim(self) -> int:
        """Width of a head: stated, assumed by the class, or hidden size over heads."""
        return self.get("head_dim") or self["hidden_size"] // self["num_attention_heads"]

    def kv_heads(self) -> int:
        """Key/value heads; as many as query heads when not stated."""
        return self.get("num_key_value_heads") or self["num_attention_heads"]

    def depth(self) -> int:
        """Number of layers; Nemotron-H's is the length of its pattern, whatever num_hidden_layers says."""
        pattern = self.layer_types() or self.get("hybrid_override_pattern")
        return len(pattern) if self.family == "nemotron_h" and pattern else self["num_hidden_layers"]

    def layer_types(self) -> list[Any] | None:
        """One entry per layer, or None when the file has no list."""
        return self.get("layer_types")


def reader_of(config: Mapping[str, Any]) -> Reader:
    """A reader of the text model in `config`, which may wrap it.

    Raises:
        ValueError: no model_type, or a wrapper without a text part.
    """
    if not isinstance(config.get("model_type"), str):
        raise ValueError(f"model_type {config.get('model_type')!r}: must be a string in the config")
    text, model_type = text_part(config)
    # a wrapper's own word on tying counts where its text part is silent
    outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    # DBRX states heads and experts one level down
    nested = {**text["attn_config"], **text["ffn_config"]} if model_type == "dbrx" else {}
    return Reader(
        {**outer, **nested, **text, "model_type": model_type}, family_of(model_type), wrapped=text is not config
    )


def family_of(model_type: str) -> str:
    """The family whose structure `model_type` has: "gemma3_text" and "gemma3" are "gemma3"."""
    name = model_type.removesuffix("_model").removesuffix("_text")
    return SAME_AS.get(name, name)
