"""From a Hugging Face config to the parts of every layer: `from_config`.

A family is a row of facts in `table`; the mechanisms it names are small builders, one file per sort:
`dense`, `windows`, `latent`, `recurrent`, `multimodal`. What a config does not say and its class does not
supply is an error that names the field, never a guess.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from kvlab.specs.families.fields import Fields, Formats
from kvlab.specs.families.multimodal import WRAPPED_DEFAULTS, WRAPPERS, text_part
from kvlab.specs.families.table import FAMILIES
from kvlab.specs.formats import get_format
from kvlab.specs.model import LayerSpec, ModelSpec


def from_config(
    config: Mapping[str, Any],
    *,
    name: str = "",
    kv_format: str = "bf16",
    state_format: str = "fp32",
    conv_format: str = "bf16",
    image_tokens: int = 0,
) -> ModelSpec:
    """The cache of the model that `config` describes.

    Args:
        config: a Hugging Face config.json as a dict; of a multimodal wrapper the text decoder is taken.
        name: for people; the config's own `_name_or_path` or model_type when empty.
        kv_format: storage format of keys, values, latents, entries and index keys.
        state_format: storage format of recurrent matrices.
        conv_format: storage format of convolution inputs and open compression buffers.
        image_tokens: tokens of an image encoder, for models with cross attention.

    Raises:
        ValueError: no or unknown model_type, a missing or impossible field, an unknown format, a format with scales
            for states.
    """
    if not isinstance(config, Mapping) or not isinstance(config.get("model_type"), str):
        raise ValueError("config: missing model_type")
    if image_tokens < 0:
        raise ValueError(f"image_tokens {image_tokens}: must not be negative")
    text, text_type = text_part(config)
    fields = fields_of(text, text_type, _formats(kv_format, state_format, conv_format), image_tokens)
    if text is not config:
        fields.defaults = {**fields.defaults, **WRAPPED_DEFAULTS.get(text_type, {})}
    layers = FAMILIES[text_type].layers(fields)
    return ModelSpec(
        name=name or str(config.get("_name_or_path") or config["model_type"]),
        model_type=config["model_type"],
        layers=tuple(LayerSpec(i, parts) for i, parts in enumerate(layers)),
        hidden_size=fields.need("hidden_size"),
        num_query_heads=fields.count("num_attention_heads"),
        vocab_size=fields.count("vocab_size"),
        max_position=max_position(fields),
        notes=tuple(fields.notes + _extra_notes(config, text)),
    )


def _formats(kv: str, state: str, conv: str) -> Formats:
    formats = Formats(get_format(kv), get_format(state), get_format(conv))
    for fmt in (formats.state, formats.conv):
        if fmt.scale_bytes:
            raise ValueError(f"dtype {fmt.name!r}: states are kept in a plain type, such as fp32 or bf16")
    return formats


def fields_of(text: Mapping[str, Any], model_type: str, formats: Formats, image_tokens: int = 0) -> Fields:
    """A reader of the text decoder's fields.

    Raises:
        ValueError: unknown model_type; the message names close ones.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = {*FAMILIES, *WRAPPERS}
        close = difflib.get_close_matches(str(model_type), known, 3, 0.7)
        hint = f"; close: {', '.join(close)}" if close else ""
        raise ValueError(
            f"model_type {model_type!r}: not a known architecture ({len(known)} are){hint}. Needed: how many KV heads "
            "of what width each layer caches, and which layers keep windows or states"
        )
    family = FAMILIES[model_type]
    return Fields(text, model_type, family.names, family.defaults, formats, image_tokens)


def max_position(f: Fields) -> int | None:
    """The longest position after rope scaling, None when unbounded or unstated.

    YaRN reaches factor x the original length; linear and dynamic scaling multiply what is stated. The other
    types (llama3, longrope, mrope) and Gemma 3 state the extended length already.
    Source: vLLM's derivation of max_model_len from rope scaling.
    """
    stated = f.get("max_position_embeddings")
    if not isinstance(stated, int) or stated <= 0:
        return None
    rope = f.get("rope_scaling") or f.get("rope_parameters")
    if not isinstance(rope, Mapping) or f.model_type == "gemma3_text":
        return stated
    kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor")
    original = rope.get("original_max_position_embeddings") or stated
    if not isinstance(factor, int | float) or not isinstance(original, int) or not 1 <= factor <= 10**6:
        return stated
    if kind == "yarn":
        return max(stated, int(factor * original))
    return int(stated * factor) if kind in ("linear", "dynamic") else stated


def _extra_notes(config: Mapping[str, Any], text: Mapping[str, Any]) -> list[str]:
    notes = []
    if text is not config or config["model_type"] in WRAPPERS:
        notes.append("sized by the text decoder; image, audio and video tokens take ordinary positions in it")
    if text.get("num_nextn_predict_layers") or text.get("mtp_num_hidden_layers") or text.get("num_mtp_modules"):
        notes.append("layers for multi-token prediction are not counted")
    return notes
