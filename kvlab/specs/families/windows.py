"""Layers that keep a window or a chunk, alone or between full layers, and layers that share another's cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvlab.specs.families.dense import Parts, all_full, full, head_dim, kv_heads
from kvlab.specs.families.fields import Fields
from kvlab.specs.parts import Attention, ChunkedLocal, Shared, SlidingWindow

# older configs and model code spell some layer types differently
_LEGACY = {
    "attention": "full_attention", "mamba": "linear_attention", "recurrent": "linear_attention",
    "deepseek_sparse_attention": "indexed_attention",
}  # fmt: skip


def layer_types(f: Fields, fallback: Sequence[str] | None = None) -> list[str]:
    """The type of each layer: `layer_types` of the config, else `fallback`.

    Raises:
        ValueError: neither is there, or the list has another length than num_hidden_layers.
    """
    kinds = f.listed("layer_types")
    kinds = kinds if kinds is not None else fallback
    if kinds is None:
        raise ValueError(f"{f.model_type} config: missing layer_types")
    if len(kinds) != f.num_layers:
        raise ValueError(
            f"{f.model_type} config: {len(kinds)} layer types for {f.num_layers} layers, must be one per layer"
        )
    return [_LEGACY.get(kind, kind) for kind in kinds]


def by_type(f: Fields, kinds: Sequence[str], build: Mapping[str, Callable[[Fields], Parts]]) -> list[Parts]:
    """The parts of each layer, by its type; layers of one type are equal.

    Raises:
        ValueError: a type that the family does not know.
    """
    unknown = sorted(set(kinds) - set(build))
    if unknown:
        raise ValueError(f"{f.model_type} config: layer type {unknown[0]!r} is not one of {', '.join(build)}")
    made = {kind: build[kind](f) for kind in dict.fromkeys(kinds)}
    return [made[kind] for kind in kinds]


def sliding(f: Fields) -> Parts:
    """Keys and values of the last sliding_window tokens."""
    return (SlidingWindow(kv_heads(f), head_dim(f), head_dim(f), f.formats.kv, window=f.need("sliding_window")),)


def chunked(f: Fields) -> Parts:
    """Keys and values of the current chunk of attention_chunk_size tokens."""
    return (ChunkedLocal(kv_heads(f), head_dim(f), head_dim(f), f.formats.kv, chunk=f.need("attention_chunk_size")),)


FULL_OR_SLIDING = {"full_attention": full, "sliding_attention": sliding}


def window_everywhere(f: Fields) -> list[Parts]:
    """Every layer sliding when sliding_window is set, else every layer full (mistral, mixtral, phi3, ...)."""
    return [sliding(f) if f.get("sliding_window") else full(f)] * f.num_layers


def every(period: int, other: str = "sliding_attention") -> Callable[[Fields], list[str]]:
    """Types when the config has no layer_types: layer i full when (i + 1) % period == 0, `other` elsewhere.

    A period stated by the config (sliding_window_pattern, full_attention_interval, ...) wins over `period`.
    """

    def kinds(f: Fields) -> list[str]:
        if f.listed("layer_types") is not None:
            return layer_types(f)
        n = f.need("layer_period") if f.get("layer_period") else period
        if not f.has("layer_period"):
            f.note(f"layer_types is not in the config: one layer in {n} full, as in transformers' {f.model_type} class")
        return [other if (i + 1) % n else "full_attention" for i in range(f.num_layers)]

    return kinds


def alternating(period: int) -> Callable[[Fields], list[Parts]]:
    """Full layers at every `period`-th place, sliding ones between; all full when sliding_window is null."""
    kinds = every(period)

    def build(f: Fields) -> list[Parts]:
        if f.has("sliding_window") and f.get("sliding_window") is None:
            return all_full(f)
        return by_type(f, kinds(f), FULL_OR_SLIDING)

    return build


def qwen_window(f: Fields) -> list[Parts]:
    """Full unless use_sliding_window; then the layers from max_window_layers on are sliding.

    The sliding_window that most Qwen configs carry has no effect while use_sliding_window is false.
    """
    if not f.get("use_sliding_window"):
        return all_full(f)
    kinds = None
    if f.get("max_window_layers") is not None:
        first = f.count("max_window_layers")
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(f.num_layers)]
    return by_type(f, layer_types(f, kinds), FULL_OR_SLIDING)


def switched_window(f: Fields) -> list[Parts]:
    """Full unless use_sliding_window; then as layer_types says (which must be there)."""
    return by_type(f, layer_types(f), FULL_OR_SLIDING) if f.get("use_sliding_window") else all_full(f)


def qwen_window_everywhere(f: Fields) -> list[Parts]:
    """Full unless use_sliding_window; then every layer sliding (qwen3_moe)."""
    return [sliding(f) if f.get("use_sliding_window") else full(f)] * f.num_layers


def llama4(f: Fields) -> list[Parts]:
    """Chunked where the layer uses rotary positions, full where it does not (every 4th, if unsaid)."""
    rope = f.listed("no_rope_layers")  # despite its name, 1 marks a layer with RoPE
    rope = rope or [int((i + 1) % f.need("no_rope_layer_interval") != 0) for i in range(f.num_layers)]
    local = "chunked_attention" if f.get("attention_chunk_size") else "full_attention"
    kinds = layer_types(f, [local if uses else "full_attention" for uses in rope])
    return by_type(f, kinds, {"full_attention": full, "chunked_attention": chunked})


def share_tail(f: Fields, kinds: Sequence[str], layers: list[Parts]) -> list[Parts]:
    """`layers`, the last num_kv_shared_layers replaced: each reads the last unshared layer of its own type.

    Raises:
        ValueError: a shared layer has no unshared layer of its type before it.
    """
    first = max(0, len(layers) - f.count("num_kv_shared_layers"))
    for i in range(first, len(layers)):
        source = next((j for j in range(first - 1, -1, -1) if kinds[j] == kinds[i]), None)
        if source is None:
            raise ValueError(
                f"{f.model_type} config: layer {i} shares the cache of a {kinds[i]} layer, but none is there"
            )
        layers[i] = (Shared(source),)
    return layers


def cross_layer(f: Fields) -> list[Parts]:
    """Of every cla_sharing_factor neighbouring layers the first is full, the others read its cache."""
    factor = f.need("cla_sharing_factor")
    return [(Shared(i - i % factor),) if i % factor else full(f) for i in range(f.num_layers)]


def gemma3n(f: Fields) -> list[Parts]:
    """Every 5th layer full, the rest sliding; a tail that shares."""
    kinds = every(5)(f)
    return share_tail(f, kinds, by_type(f, kinds, FULL_OR_SLIDING))


def gemma4(f: Fields) -> list[Parts]:
    """As gemma3n with period 6; full layers have their own head width and, with attention_k_eq_v, KV head count."""
    kinds = every(6)(f)
    kinds[-1] = "full_attention"
    return share_tail(f, kinds, by_type(f, kinds, {"full_attention": _global, "sliding_attention": sliding}))


def _global(f: Fields) -> Parts:
    heads = kv_heads(f)
    if f.get("attention_k_eq_v") and f.get("num_global_key_value_heads"):
        # one projection feeds both, but keys are rotated after it: two vectors are still cached
        heads = f.need("num_global_key_value_heads")
    return (Attention(heads, f.need("global_head_dim"), f.need("global_head_dim"), f.formats.kv),)
