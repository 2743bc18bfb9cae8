"""Reading a config.json for the engine: what the file says, else what the family's class supplies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvlab.models.facts import RopeFacts
from kvlab.models.modules.activation import activation
from kvlab.specs.weights.reader import ALIASES, Reader, reader_of

_OLD_KINDS = {"su": "longrope"}
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")


class ConfigReader:
    """The facts of one model's (text) config under transformers' usual names.

    Attributes:
        config: the text part of the file. family: the name of its row.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._reader: Reader = reader_of(config)
        self.config, self.family = self._reader.config, self._reader.family
        self._defaults = defaults

    def get(self, name: str, default: Any = None) -> Any:
        """The value: the file's, else the row's default, else that of transformers' class, else `default`.

        A null in the file is None.
        """
        if name not in self.config and name in self._defaults:
            stated = self._reader.get(name) if self._stated(name) else None
            return self._defaults[name] if stated is None else stated
        value = self._reader.get(name)
        return default if value is None and not self._stated(name) else value

    def _stated(self, name: str) -> bool:
        return any(key in self.config for key in (name, *ALIASES.get(name, ())))

    def config_value(self, name: str) -> Any:
        """What the file itself says of `name`, under any of its spellings; None where it says nothing."""
        return self._reader.get(name) if self._stated(name) else None

    def positive(self, name: str) -> int:
        """The positive whole number `name`.

        Raises:
            ValueError: missing, or something else.
        """
        value = self.get(name)
        # width and depth must stand in the file itself, unless it wraps a text model
        if name in ("hidden_size", "num_hidden_layers") and not (self._reader.wrapped or self._stated(name)):
            value = None
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ValueError(f"{name} {value!r}: a config.json must hold a positive whole number here")
        return value

    def flag(self, fact: bool | str) -> bool:
        """`fact` itself, or the truth of the field it names."""
        return bool(self.get(fact)) if isinstance(fact, str) else fact

    def refuse(self, name: str) -> None:
        """Refuses a config that sets the switch `name`: the engine does not run what it turns on.

        Raises:
            ValueError: it is set.
        """
        if self.get(name):
            raise ValueError(f"{name} {self.get(name)!r}: the engine runs {self.family!r} models without it")

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.positive("num_hidden_layers")

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.positive("hidden_size")

    def heads(self) -> tuple[int, int, int]:
        """(query heads, KV heads, values per head).

        Raises:
            ValueError: KV heads that do not divide the query heads.
        """
        query = self.positive("num_attention_heads")
        kv = self.get("num_key_value_heads") or query
        if query % kv:
            raise ValueError(f"num_key_value_heads {kv}: must divide the {query} query heads")
        return query, kv, self.get("head_dim") or self.hidden_size // query

    def activation(self, name: str = "hidden_act") -> str:
        """The name of the activation in field `name`.

        Raises:
            ValueError: one the engine does not run.
        """
        activation(str(self.get(name)))
        return str(self.get(name))

    def per_layer(self, name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """`values`, one per layer.

        Raises:
            ValueError: another number of them.
        """
        if len(values) != self.num_layers:
            raise ValueError(f"{name}: {len(values)} entries for {self.num_layers} layers")
        return values

    def token_ids(self, name: str = "eos_token_id") -> tuple[int, ...]:
        """One id, several or none."""
        value = self.get(name)
        return () if value is None else tuple(value) if isinstance(value, list) else (value,)

    def rope(self, section: str | None = None, *, dim: int = 0, interleaved: bool = False) -> RopeFacts:
        """The rotary rule, in the old spelling (rope_theta, rope_scaling) or the new (rope_parameters).

        Args:
            section: of rope_parameters, where layers of different types have rules of their own.
            dim: values of a head that turn, 0 for what the config says (partial_rotary_factor), else all.

        Raises:
            ValueError: a kind the engine does not run, or a rule without its factor.
        """
        rule = self.get("rope_parameters") or self.get("rope_scaling") or {}
        rule = rule.get(section, rule) if section else rule
        kind = rule.get("rope_type", rule.get("type", "default"))
        kind = _OLD_KINDS.get(kind, kind)
        if kind not in ROPE_KINDS:
            raise ValueError(f"rope_type {kind!r}: the engine runs {', '.join(ROPE_KINDS)}")
        share = rule.get("partial_rotary_factor", self.get("partial_rotary_factor"))
        if not dim and share not in (None, 1.0):
            dim = int(self.heads()[2] * share)
        theta = float(rule.get("rope_theta", self.get("rope_theta", 10_000.0)))
        common = {"theta": theta, "dim": dim, "interleaved": interleaved}
        if kind == "default":
            return RopeFacts(**common)
        if kind != "longrope" and "factor" not in rule:
            raise ValueError(f"rope_scaling: {kind!r} needs a factor")
        return _SCALED[kind](self, rule, common)

    def original_max_position(self, rule: Mapping[str, Any]) -> int:
        """The length the model was trained at before its positions were stretched, in tokens."""
        inner = rule.get("original_max_position_embeddings")
        return int(self.get("original_max_position_embeddings") or inner or self.positive("max_position_embeddings"))


def _linear(c: ConfigReader, rule: Mapping[str, Any], common: dict[str, Any]) -> RopeFacts:
    return RopeFacts("linear", factor=float(rule["factor"]), **common)


def _llama3(c: ConfigReader, rule: Mapping[str, Any], common: dict[str, Any]) -> RopeFacts:
    bands = {name: float(rule[name]) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    return RopeFacts("llama3", original_max_position=c.original_max_position(rule), **bands, **common)


def _yarn(c: ConfigReader, rule: Mapping[str, Any], common: dict[str, Any]) -> RopeFacts:
    original = c.original_max_position(rule)
    factor = float(rule["factor"] or c.positive("max_position_embeddings") / original)
    attention = rule.get("attention_factor")
    if attention is None:
        all_dims = rule.get("mscale_all_dim") if rule.get("mscale") else None
        attention = (
            _magnitude(factor, rule["mscale"]) / _magnitude(factor, all_dims) if all_dims else _magnitude(factor)
        )
    return RopeFacts(
        "yarn", factor=factor, original_max_position=original, attention_factor=float(attention),
        beta_fast=float(rule.get("beta_fast") or 32), beta_slow=float(rule.get("beta_slow") or 1),
        truncate=bool(rule.get("truncate", True)), **common,
    )  # fmt: skip


def _magnitude(factor: float, weight: float = 1.0) -> float:
    """By how much YaRN lengthens queries and keys, so that attention over more tokens stays as sharp."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(c: ConfigReader, rule: Mapping[str, Any], common: dict[str, Any]) -> RopeFacts:
    original = c.original_max_position(rule)
    factor = rule.get("factor") or c.positive("max_position_embeddings") / original
    # of a model that is run beyond its original length (Phi-3.5-MoE states two, which are equal)
    attention = rule.get("attention_factor") or rule.get("long_mscale")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    lists = {name: tuple(float(x) for x in rule[f"{name}_factor"]) for name in ("long", "short")}
    return RopeFacts(
        "longrope", short_up_to=original, attention_factor=float(attention),
        divisors=lists["long"], short_divisors=lists["short"], **common,
    )  # fmt: skip


_SCALED = {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
