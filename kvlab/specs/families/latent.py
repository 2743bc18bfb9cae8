"""Latent, indexed and compressed attention: DeepSeek's line and its relatives."""

from __future__ import annotations

from kvlab.specs.families.dense import Parts, all_full
from kvlab.specs.families.fields import Fields
from kvlab.specs.parts import CompressedEntries, IndexKeys, MLALatent, OpenBuffer, SharedKV, StateArray


def latent(f: Fields) -> Parts:
    """One latent of kv_lora_rank and one rotary key of qk_rope_head_dim per token."""
    return (MLALatent(f.need("kv_lora_rank"), f.need("qk_rope_head_dim"), f.formats.kv),)


def all_latent(f: Fields) -> list[Parts]:
    """Every layer MLA; ordinary heads when the config turns MLA off (use_mla false, kv_lora_rank null)."""
    off = f.get("use_mla") is False or (f.has("kv_lora_rank") and f.get("kv_lora_rank") is None)
    return all_full(f) if off else [latent(f)] * f.num_layers


def all_latent_indexed(f: Fields) -> list[Parts]:
    """MLA, with index keys in the layers whose indexer is "full"; a "shared" one reads the last full layer's choice.

    Raises:
        ValueError: indexer_types has another length than num_hidden_layers.
    """
    kinds = f.listed("indexer_types") or _indexer_types(f)
    if len(kinds) != f.num_layers:
        raise ValueError(f"{f.model_type} config: indexer_types has {len(kinds)} entries, must be {f.num_layers}")
    indexed = (*latent(f), IndexKeys(f.need("index_head_dim"), f.formats.kv))
    return [indexed if kind == "full" else latent(f) for kind in kinds]


def _indexer_types(f: Fields) -> list[str]:
    """The schedule when it is not spelled out: letters F and S, or one full layer in index_topk_freq.

    Source: transformers 5.24 GlmMoeDsaConfig.
    """
    pattern = f.get("index_topk_pattern")
    if pattern is not None:
        return [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    period, offset = max(f.get("index_topk_freq") or 1, 1), f.get("index_skip_topk_offset")
    offset = 2 if offset is None else offset
    return ["full" if max(i - offset + 1, 0) % period == 0 else "shared" for i in range(f.num_layers)]


def deepseek_v4(f: Fields) -> list[Parts]:
    """A window in every layer, beside it nothing more, CSA (entries and index keys) or HCA (entries)."""
    kinds = compressions(f)
    width, kv = f.need("head_dim"), f.formats.kv
    window = SharedKV(width, f.need("sliding_window"), kv)
    layers: list[Parts] = []
    for kind, ratio in kinds:
        if kind == "sliding_attention":
            layers.append((window,))
        elif kind == "heavily_compressed_attention":
            buffer = OpenBuffer(_open(f, "open_", width, ratio), ratio)
            layers.append((window, CompressedEntries(ratio, width, kv), buffer))
        else:
            index = f.need("index_head_dim")
            arrays = (*_overlapping(f, "", width, ratio), *_overlapping(f, "index_", index, ratio))
            keys = IndexKeys(index, kv, ratio=ratio)
            layers.append((window, CompressedEntries(ratio, width, kv), keys, OpenBuffer(arrays, ratio)))
    return layers


# published files give a ratio per layer, transformers' own a type per layer and a ratio per type
V4_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def compressions(f: Fields) -> list[tuple[str, int]]:
    """(type, tokens per entry) of each layer, from layer_types and compress_rates or from compress_ratios.

    Raises:
        ValueError: neither list there, one too short, an unknown type, ratio or rate.
    """
    usual = {kind: ratio for ratio, kind in V4_TYPES.items()}
    rates = usual | (f.get("compress_rates") or {})
    types = f.listed("layer_types")
    if types is not None:
        unknown = sorted({str(kind) for kind in types} - set(usual))
        if unknown or len(types) < f.num_layers:
            raise ValueError(
                f"{f.model_type} config: layer_types must hold {f.num_layers} of {', '.join(usual)}"
                + (f", not {unknown[0]}" if unknown else "")
            )
    else:
        ratios = f.listed("compress_ratios")
        # one entry more than layers: the last belongs to the multi-token-prediction layer
        if ratios is None or len(ratios) < f.num_layers:
            raise ValueError(f"{f.model_type} config: compress_ratios must be a list of at least {f.num_layers} ratios")
        unknown_ratios = sorted(set(ratios) - set(V4_TYPES))
        if unknown_ratios:
            raise ValueError(f"{f.model_type} config: compress_ratios has {unknown_ratios[0]}, must be 0, 4 or 128")
        types = [V4_TYPES[ratio] for ratio in ratios]
    found = [(kind, rates[kind]) for kind in types[: f.num_layers]]
    for kind, rate in found:
        if kind != "sliding_attention" and (not isinstance(rate, int) or rate < 2):
            raise ValueError(f"{f.model_type} config: compress_rates has {rate!r} for {kind}, must be 2 or more tokens")
    return found


def _open(f: Fields, prefix: str, width: int, ratio: int) -> tuple[StateArray, ...]:
    """Values and gates of the tokens that wait for their window to close: at most ratio - 1 of them."""
    return tuple(StateArray(prefix + name, ((1, width),), ratio - 1, f.formats.conv) for name in ("kv", "gate"))


def _overlapping(f: Fields, prefix: str, width: int, ratio: int) -> tuple[StateArray, ...]:
    """As `_open` for two interleaved series, and the first series of the window just closed.

    Source: transformers 5.24 DeepseekV4CSACache (buffer_kv, buffer_gate of 2 x width; overlap_kv, overlap_gate).
    """
    overlap = tuple(
        StateArray(f"{prefix}overlap_{name}", ((1, width),), ratio, f.formats.conv) for name in ("kv", "gate")
    )
    return (*_open(f, f"{prefix}open_", 2 * width, ratio), *overlap)
