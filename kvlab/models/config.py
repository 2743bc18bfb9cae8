"""The decoder's own description of a model, read once from a Hugging Face config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvlab.models.families import Family, get_family, rotated_layers

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions: base, and the rule that stretches them.

    Attributes:
        kind: "default", "linear" or "llama3".
        theta: the base.
        factor: by how much positions are stretched (1.0: not).
        low_freq_factor, high_freq_factor, original_max_position: of llama3; wavelengths above
            original_max_position / low_freq_factor are stretched in full, those below
            original_max_position / high_freq_factor not at all.
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """All that the decoder needs to know. One value per layer where layers differ.

    Attributes:
        windows: tokens each layer's query sees, itself included; 0 means all.
        rotated: whether each layer rotates its queries and keys.
        scale: what scores are multiplied with before the softmax.
        max_position: longest sequence the model was made for, in tokens.
        eos_token_ids: tokens that end a text.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    rotated: tuple[bool, ...]
    rope: RopeConfig
    scale: float
    norm_eps: float
    activation: str
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    max_position: int
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.windows)

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """For each layer, which of the cache's block tables it reads: no window first, then windows ascending.

        The order is that of `kvlab.specs.layout.group_parts`.
        """
        order = sorted(set(self.windows))
        return tuple(order.index(window) for window in self.windows)

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelConfig:
        """The description of the model that `config`, a parsed config.json, stands for.

        Raises:
            ValueError: a family, rotary scaling or activation the engine does not run, or a missing field.
        """
        family = get_family(config.get("model_type"))
        if config.get("quantization_config"):
            raise ValueError("quantization_config: the engine loads unquantized weights only")
        c = family.defaults | config
        heads, layers = _positive(c, "num_attention_heads"), _positive(c, "num_hidden_layers")
        hidden = _positive(c, "hidden_size")
        head_dim = c.get("head_dim") or hidden // heads
        kv_heads = c.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ValueError(f"num_key_value_heads {kv_heads}: must divide the {heads} query heads")
        if c["hidden_act"] not in ACTIVATIONS:
            raise ValueError(f"hidden_act {c['hidden_act']!r}: the engine runs {', '.join(ACTIVATIONS)}")
        return cls(
            model_type=c["model_type"],
            vocab_size=_positive(c, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_positive(c, "intermediate_size"),
            num_query_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rotated=_per_layer("no_rope_layers", rotated_layers(c, layers), layers),
            windows=_per_layer("layer_types", family.windows(c, layers), layers),
            rope=_rope(c),
            scale=head_dim**-0.5,
            norm_eps=float(c["rms_norm_eps"]),
            activation=c["hidden_act"],
            qkv_bias=_flag(family, "qkv_bias", c),
            out_bias=_flag(family, "out_bias", c),
            mlp_bias=_flag(family, "mlp_bias", c),
            qk_norm=family.qk_norm,
            tie_embeddings=bool(c["tie_word_embeddings"]),
            max_position=_positive(c, "max_position_embeddings"),
            eos_token_ids=_token_ids(c.get("eos_token_id")),
        )


def _positive(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name} {value!r}: a config.json must hold a positive whole number here")
    return value


def _per_layer(name: str, values: tuple, layers: int) -> tuple:
    if len(values) != layers:
        raise ValueError(f"{name}: {len(values)} entries for {layers} layers")
    return values


def _flag(family: Family, name: str, config: dict[str, Any]) -> bool:
    fact = getattr(family, name)
    return bool(config[fact]) if isinstance(fact, str) else fact


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _rope(c: dict[str, Any]) -> RopeConfig:
    """The rotary rule of a config, in the old spelling (rope_theta, rope_scaling) or the new (rope_parameters)."""
    rule = c.get("rope_parameters") or c.get("rope_scaling") or {}
    kind = rule.get("rope_type", rule.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ValueError(f"rope_type {kind!r}: the engine runs {', '.join(ROPE_KINDS)}")
    partial = rule.get("partial_rotary_factor", c.get("partial_rotary_factor"))
    if partial not in (None, 1.0):
        raise ValueError(f"partial_rotary_factor {partial}: the engine rotates whole heads only")
    theta = float(rule.get("rope_theta", c["rope_theta"]))
    if kind == "default":
        return RopeConfig(theta=theta)
    if "factor" not in rule:
        raise ValueError(f"rope_scaling: {kind!r} needs a factor")
    if kind == "linear":
        return RopeConfig("linear", theta, float(rule["factor"]))
    original = c.get("original_max_position_embeddings") or rule.get(
        "original_max_position_embeddings", c["max_position_embeddings"]
    )
    return RopeConfig(
        "llama3",
        theta,
        float(rule["factor"]),
        float(rule["low_freq_factor"]),
        float(rule["high_freq_factor"]),
        int(original),
    )
