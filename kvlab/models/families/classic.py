"""The decoders before Llama: layer norms, plain feed-forward parts, fused projections, learned positions or ALiBi.

Defaults are those of transformers' configuration classes. Source: transformers 5.24.0,
models/<family>/configuration_<family>.py and modeling_<family>.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from kvlab.models.facts import (
    AlibiFacts,
    AttentionFacts,
    Branch,
    EmbeddingFacts,
    HeadFacts,
    LayerFacts,
    MLPFacts,
    ModelConfig,
    NormFacts,
)
from kvlab.models.families.common import (
    Family,
    Rename,
    layer_norm,
    model,
    parallel_layer,
    pre_norm_layer,
)
from kvlab.models.families.reader import ConfigReader

SECOND = "post_attention_layernorm"


def plain_mlp(c: ConfigReader, act: str, *, bias: bool = True) -> MLPFacts:
    """A feed-forward part without a gate, four times as wide as the residual stream where the config does not say."""
    width = c.config_value("intermediate_size") or 4 * c.hidden_size
    return MLPFacts(width, c.activation(act), gated=False, bias=bias)


def heads(c: ConfigReader, kv_heads: int = 0, **facts: Any) -> AttentionFacts:
    """Attention of hidden_size / heads values a head; a KV head for every query head where not said otherwise."""
    query = c.positive("num_attention_heads")
    width = c.hidden_size // query
    usual = {"scale": width**-0.5, "key_dim": width, "value_dim": width}
    return AttentionFacts(query, kv_heads or query, **usual | facts)


def tied_head(c: ConfigReader, norm: NormFacts, **facts: Any) -> HeadFacts:
    """The head with its last norm, tied by the config."""
    return HeadFacts(norm, tied=bool(c.get("tie_word_embeddings")), **facts)


def _gpt2(c: ConfigReader) -> ModelConfig:
    c.refuse("add_cross_attention")
    norm, mlp = layer_norm(c, "layer_norm_epsilon"), plain_mlp(c, "activation_function")
    base = heads(c).scale if c.get("scale_attn_weights") else 1.0
    by_depth = c.flag("scale_attn_by_inverse_layer_idx")
    layers = [
        pre_norm_layer(heads(c, scale=base / (i + 1) if by_depth else base, qkv_bias=True, out_bias=True), mlp, norm)
        for i in range(c.num_layers)
    ]
    embedding = EmbeddingFacts(positions=c.positive("max_position_embeddings"))
    return model(c, layers, head=tied_head(c, norm), embedding=embedding)


def _gptj(c: ConfigReader) -> ModelConfig:
    norm, mlp = layer_norm(c, "layer_norm_epsilon"), plain_mlp(c, "activation_function")
    rope = c.rope(dim=c.get("rotary_dim") or 0, interleaved=True)
    layer = parallel_layer(heads(c, rope=rope), mlp, norm)
    return model(c, [layer] * c.num_layers, head=tied_head(c, norm, bias=True))


def _gpt_neox(c: ConfigReader) -> ModelConfig:
    norm, mlp, biased = layer_norm(c, "layer_norm_eps"), plain_mlp(c, "hidden_act"), c.flag("attention_bias")
    dim = 0 if c.get("rope_parameters") else int(heads(c).key_dim * c.get("rotary_pct"))
    rope = c.rope(dim=dim)
    if c.get("rotary_emb_base"):
        rope = replace(rope, theta=float(c.get("rotary_emb_base")))
    mixer = heads(c, rope=rope, qkv_bias=biased, out_bias=biased)
    parallel = c.get("use_parallel_residual")
    layer = parallel_layer(mixer, mlp, norm, SECOND) if parallel else pre_norm_layer(mixer, mlp, norm)
    return model(c, [layer] * c.num_layers, head=tied_head(c, norm))


def falcon_kv_heads(c: ConfigReader) -> int:
    """KV heads of a Falcon: grouped in the new form, one with `multi_query`, else one per query head."""
    query = c.positive("num_attention_heads")
    if c.get("new_decoder_architecture"):
        return c.get("num_kv_heads") or query
    return 1 if c.get("multi_query") else query


def _falcon(c: ConfigReader) -> ModelConfig:
    norm, biased = layer_norm(c, "layer_norm_epsilon"), c.flag("bias")
    mlp = plain_mlp(c, "activation", bias=biased)
    # the whole score is divided by the root of the width, ALiBi's part included
    alibi = AlibiFacts(factor=heads(c).scale) if c.get("alibi") else None
    rope = None if alibi else c.rope()
    mixer = heads(c, falcon_kv_heads(c), rope=rope, alibi=alibi, qkv_bias=biased, out_bias=biased)
    return model(c, [_falcon_layer(c, mixer, mlp, norm)] * c.num_layers, head=tied_head(c, norm))


def _falcon_layer(c: ConfigReader, mixer: Any, mlp: Any, norm: NormFacts) -> LayerFacts:
    norms = c.get("num_ln_in_parallel_attn") or 2
    if c.get("new_decoder_architecture") and norms == 2:
        return LayerFacts(((Branch(mixer, norm, "ln_attn"), Branch(mlp, norm, "ln_mlp")),))
    if c.get("new_decoder_architecture") or c.get("parallel_attn"):
        return parallel_layer(mixer, mlp, norm)
    return pre_norm_layer(mixer, mlp, norm)


def _bloom(c: ConfigReader) -> ModelConfig:
    c.refuse("apply_residual_connection_post_layernorm")
    norm = layer_norm(c, "layer_norm_epsilon")
    mlp = MLPFacts(4 * c.hidden_size, "gelu_pytorch_tanh", gated=False, bias=True)
    mixer = heads(c, alibi=AlibiFacts(), qkv_bias=True, out_bias=True)
    layer = pre_norm_layer(mixer, mlp, norm)
    return model(c, [layer] * c.num_layers, head=tied_head(c, norm), embedding=EmbeddingFacts(norm=norm))


# what transformers' class computes whatever a config says
_MPT_ONLY = {"qk_ln": False, "prefix_lm": False, "clip_qkv": None, "alibi": True, "alibi_bias_max": 8}


def _mpt(c: ConfigReader) -> ModelConfig:
    stated = c.get("attn_config") or {}
    for name, value in _MPT_ONLY.items():
        if stated.get(name, value) not in (value, None):
            raise ValueError(f"attn_config.{name} {stated[name]!r}: the engine runs MPT with {value!r}")
    norm = layer_norm(c, "layer_norm_epsilon", bias=False)
    mlp = MLPFacts(4 * c.hidden_size, "gelu", gated=False)
    scale = stated.get("softmax_scale") or heads(c).scale
    mixer = heads(c, alibi=AlibiFacts(), scale=float(scale))
    layers = [pre_norm_layer(mixer, mlp, norm)] * c.num_layers
    return model(c, layers, head=tied_head(c, norm), max_position=c.get("max_seq_len") or 2048)


def turned(matrix: Tensor, c: ConfigReader) -> Tensor:
    """A matrix stored as [in, out] (GPT-2's Conv1D), as [out, in]."""
    return matrix.T


def _cut(part: int) -> Any:
    """Cuts queries (0), keys (1) or values (2) out of rows that lie by KV head: its queries, its key, its value."""

    def cut(fused: Tensor, c: ConfigReader) -> Tensor:
        query = c.positive("num_attention_heads")
        kv = falcon_kv_heads(c) if c.family == "falcon" else query
        groups = fused.unflatten(0, (kv, query // kv + 2, -1))
        wanted = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])[part]
        return wanted.flatten(0, 2)

    return cut


def moved(pattern: str, target: str) -> Rename:
    """The rule for a tensor that only has another name."""
    return pattern, [(target, None)]


def _layers(prefix: str, names: dict[str, str]) -> list[Rename]:
    """Rules for the weights and biases of a layer: old name within the layer -> canonical name."""
    head = rf"(?:{prefix})(\d+)\."
    return [moved(head + old + r"\.(weight|bias)", rf"model.layers.\1.{new}.\2") for old, new in names.items()]


_GPT2_LAYER = r"(?:transformer\.)?h\.(\d+)\."
_GPT2_NAMES: list[Rename] = [
    (_GPT2_LAYER + r"attn\.c_attn\.weight", [(r"model.layers.\1.self_attn.qkv_proj.weight", turned)]),
    (_GPT2_LAYER + r"attn\.c_proj\.weight", [(r"model.layers.\1.self_attn.o_proj.weight", turned)]),
    (_GPT2_LAYER + r"mlp\.c_fc\.weight", [(r"model.layers.\1.mlp.up_proj.weight", turned)]),
    (_GPT2_LAYER + r"mlp\.c_proj\.weight", [(r"model.layers.\1.mlp.down_proj.weight", turned)]),
    moved(_GPT2_LAYER + r"attn\.c_attn\.bias", r"model.layers.\1.self_attn.qkv_proj.bias"),
    moved(r"(?:transformer\.)?wte\.weight", "model.embed_tokens.weight"),
    moved(r"(?:transformer\.)?wpe\.weight", "model.embed_positions.weight"),
    moved(r"(?:transformer\.)?ln_f\.(weight|bias)", r"model.norm.\1"),
    *_layers(
        r"transformer\.h\.|h\.",
        {
            r"ln_1": "input_layernorm", r"ln_2": SECOND, r"attn\.c_proj": "self_attn.o_proj",
            r"mlp\.c_fc": "mlp.up_proj", r"mlp\.c_proj": "mlp.down_proj",
        },
    ),
]  # fmt: skip
_MEGATRON = {r"mlp\.dense_h_to_4h": "mlp.up_proj", r"mlp\.dense_4h_to_h": "mlp.down_proj"}


def _megatron(prefix: str, attention_name: str, extra: dict[str, str]) -> list[Rename]:
    """Rules for layers with `query_key_value`, `dense` and `dense_h_to_4h`."""
    fused_parts = [(rf"model.layers.\1.self_attn.{p}_proj.\2", _cut(i)) for i, p in enumerate("qkv")]
    fused = rf"(?:{prefix})(\d+)\.{attention_name}\.query_key_value\.(weight|bias)"
    names = {rf"{attention_name}\.dense": "self_attn.o_proj"} | _MEGATRON | extra
    norms = {"input_layernorm": "input_layernorm", SECOND: SECOND}
    return [(fused, fused_parts), *_layers(prefix, names | norms)]


_COMMON: dict[str, Any] = {"rope_theta": 10_000.0, "layer_norm_epsilon": 1e-5, "layer_norm_eps": 1e-5}
_GPT = _COMMON | {"activation_function": "gelu_new"}

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        _gpt2,
        _GPT | {"max_position_embeddings": 1024, "scale_attn_weights": True, "tie_word_embeddings": True},
        names=_GPT2_NAMES,
        ignored=[r"\.attn\.(masked_)?bias$"],
    ),
    "gptj": Family(
        _gptj,
        _GPT | {"max_position_embeddings": 2048, "rotary_dim": 64, "tie_word_embeddings": False},
        names=[
            moved(r"transformer\.wte\.weight", "model.embed_tokens.weight"),
            moved(r"transformer\.ln_f\.(weight|bias)", r"model.norm.\1"),
            *_layers(
                r"transformer\.h\.",
                {
                    "ln_1": "input_layernorm",
                    r"attn\.q_proj": "self_attn.q_proj",
                    r"attn\.k_proj": "self_attn.k_proj",
                    r"attn\.v_proj": "self_attn.v_proj",
                    r"attn\.out_proj": "self_attn.o_proj",
                    r"mlp\.fc_in": "mlp.up_proj",
                    r"mlp\.fc_out": "mlp.down_proj",
                },
            ),
        ],
        ignored=[r"\.attn\.(masked_)?bias$"],
    ),
    "gpt_neox": Family(
        _gpt_neox,
        _COMMON
        | {
            "max_position_embeddings": 2048,
            "hidden_act": "gelu",
            "rotary_pct": 0.25,
            "attention_bias": True,
            "use_parallel_residual": True,
            "tie_word_embeddings": False,
        },
        names=[
            moved(r"gpt_neox\.embed_in\.weight", "model.embed_tokens.weight"),
            moved(r"embed_out\.weight", "lm_head.weight"),
            moved(r"gpt_neox\.final_layer_norm\.(weight|bias)", r"model.norm.\1"),
            *_megatron(r"gpt_neox\.layers\.", "attention", {}),
        ],
        ignored=[r"\.attention\.(masked_)?bias$", r"rotary_emb\.inv_freq$"],
    ),
    "falcon": Family(
        _falcon,
        _COMMON
        | {
            "max_position_embeddings": 2048,
            "activation": "gelu",
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
            "tie_word_embeddings": True,
        },
        names=[
            moved(r"transformer\.word_embeddings\.weight", "model.embed_tokens.weight"),
            moved(r"transformer\.ln_f\.(weight|bias)", r"model.norm.\1"),
            *_megatron(r"transformer\.h\.", "self_attention", {"ln_attn": "ln_attn", "ln_mlp": "ln_mlp"}),
        ],
    ),
    "bloom": Family(
        _bloom,
        _COMMON | {"max_position_embeddings": 2048, "tie_word_embeddings": True},
        names=[
            moved(r"(?:transformer\.)?word_embeddings\.weight", "model.embed_tokens.weight"),
            moved(r"(?:transformer\.)?word_embeddings_layernorm\.(weight|bias)", r"model.embed_norm.\1"),
            moved(r"(?:transformer\.)?ln_f\.(weight|bias)", r"model.norm.\1"),
            *_megatron(r"transformer\.h\.|h\.", "self_attention", {}),
        ],
    ),
    "mpt": Family(
        _mpt,
        _COMMON | {"tie_word_embeddings": True},
        names=[
            moved(r"transformer\.wte\.weight", "model.embed_tokens.weight"),
            moved(r"transformer\.norm_f\.(weight|bias)", r"model.norm.\1"),
            *_layers(
                r"transformer\.blocks\.",
                {
                    "norm_1": "input_layernorm",
                    "norm_2": SECOND,
                    r"attn\.Wqkv": "self_attn.qkv_proj",
                    r"attn\.out_proj": "self_attn.o_proj",
                    r"ffn\.up_proj": "mlp.up_proj",
                    r"ffn\.down_proj": "mlp.down_proj",
                },
            ),
        ],
    ),
}
