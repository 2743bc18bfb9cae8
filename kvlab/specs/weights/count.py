"""The parameter count of a model from its config.json, by arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlab.specs.weights.families import FAMILIES, PUBLISHED, Family, lm_head
from kvlab.specs.weights.reader import Reader, reader_of
from kvlab.specs.weights.result import WeightCount

_ENCODERS = ("vision_config", "audio_config", "projector_config", "visual", "mm_vision_tower")


def count(config: Mapping[str, Any]) -> WeightCount:
    """The parameters of the text model that `config` describes: those of transformers' class, tied tables once.

    Not counted: encoders of multimodal wrappers, multi-token prediction heads, buffers.

    Raises:
        ValueError: an unknown model_type, or a field the count needs and neither the config nor the class gives.
    """
    f = reader_of(config)
    family = FAMILIES.get(f.family)
    if family is None:
        raise ValueError(f"parameter count of model_type {f.config['model_type']}: not known")
    _refuse_lookalikes(f)
    layers, experts, per_expert, moe_layers = _layers(f, family)
    hidden, width = f["hidden_size"], f.get("word_embed_proj_dim") or f["hidden_size"]
    rows, row = family.tables(f)
    table, tied = (f["vocab_size"] + family.token_rows) * width, f.flag("tie_word_embeddings")
    matrix, bias = lm_head(f, family, width)
    outside = family.outside(f) + hidden * family.norm_width * family.final_norm + bias
    return WeightCount(
        total=layers + experts * per_expert * moe_layers + table + rows * row + outside + (0 if tied else matrix),
        embedding=table + rows * row,
        embedding_row=width + row,
        lm_head=matrix,
        tied=tied,
        per_expert=per_expert,
        num_experts=experts,
        experts_per_token=f["num_experts_per_tok"] if experts else 0,
        moe_layers=moe_layers,
        reread=family.reread(f),
        notes=_notes(config, f),
    )


def _layers(f: Reader, family: Family) -> tuple[int, int, int, int]:
    """(parameters outside the routed experts, experts per layer, parameters of one, layers that route)."""
    shared, routed = 0, []
    for layer in range(f.depth()):
        ffn = family.ffn(f, layer)
        norms = family.norms * family.norm_width * f["hidden_size"]
        shared += family.mixer(f, layer) + ffn.shared + (family.layer_norms(f, layer) if family.layer_norms else norms)
        if ffn.experts:
            routed.append((ffn.experts, ffn.expert))
    assert len(set(routed)) <= 1, "every routing layer of a family has the same experts"
    experts, per_expert = routed[0] if routed else (0, 0)
    return shared, experts, per_expert, len(routed)


def _refuse_lookalikes(f: Reader) -> None:
    if f.family == "xverse" and f.get("num_experts"):
        raise ValueError("parameter count of model_type xverse with experts: not known")
    if f.family == "chatglm" and f.get("num_key_value_heads") is None:
        raise ValueError("parameter count of model_type chatglm without multi_query_group_num: not known")


def _notes(config: Mapping[str, Any], f: Reader) -> tuple[str, ...]:
    notes = []
    if f.assumed:
        facts = ", ".join(f"{name} {value}" for name, value in sorted(f.assumed.items()))
        notes.append(f"not in the config, transformers' class default used: {facts}")
    if f.wrapped or any(config.get(key) for key in _ENCODERS):
        notes.append("text part only: weights of vision or audio encoders are not included")
    predict = f.get("num_nextn_predict_layers") or f.get("mtp_num_hidden_layers") or f.get("num_mtp_modules")
    if predict:
        notes.append(f"{predict} multi-token prediction layer(s) not included")
    if f.family in PUBLISHED or f.config["model_type"].startswith("minimax_m1"):
        notes.append(f"model_type {f.config['model_type']} is not in transformers: counted from its published code")
    return tuple(notes)
