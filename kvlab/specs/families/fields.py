"""Reading a config: one name per fact, whatever the family calls it, and a note for every value it leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlab.specs.formats import StorageFormat

_MOST_LAYERS = 10_000  # a typing error must not fill the memory


@dataclass(frozen=True)
class Formats:
    """Storage formats of the three sorts of cached values: KV rows, recurrent matrices, convolution inputs."""

    kv: StorageFormat
    state: StorageFormat
    conv: StorageFormat


@dataclass
class Fields:
    """The fields of one text model's config under Hugging Face's usual names.

    Attributes:
        config: the (text part of the) config.
        model_type: names the family in messages.
        names: usual name -> the family's names for it; a dot descends ("attn_config.kv_n_heads").
        defaults: what transformers' config class supplies when the field is absent.
        formats: storage formats of the parts to build.
        image_tokens: tokens of an encoder that cross attention reads.
        notes: grows by a line for each default taken.
    """

    config: Mapping[str, Any]
    model_type: str
    names: Mapping[str, str | tuple[str, ...]]
    defaults: Mapping[str, Any]
    formats: Formats
    image_tokens: int = 0
    notes: list[str] = field(default_factory=list)

    def _spellings(self, name: str) -> tuple[str, ...]:
        known = self.names.get(name, ())
        return (*((known,) if isinstance(known, str) else known), name)

    def _find(self, name: str) -> tuple[bool, Any]:
        for spelling in self._spellings(name):
            node: Any = self.config
            for key in spelling.split("."):
                if not isinstance(node, Mapping) or key not in node:
                    break
                node = node[key]
            else:
                return True, node
        return False, None

    def has(self, name: str) -> bool:
        """True when the config states `name`, be it as null."""
        return self._find(name)[0]

    def get(self, name: str) -> Any:
        """The value of `name`: as stated (None for null), else the class's default, else None."""
        stated, value = self._find(name)
        if stated or name not in self.defaults:
            return value
        value = self.defaults[name]
        if value is not None:
            self.note(f"{name} is not in the config: {value}, the default of transformers' {self.model_type} class")
        return value

    def need(self, name: str) -> int:
        """The positive integer `name`.

        Raises:
            ValueError: absent without a documented default, or not a positive integer.
        """
        value = self.get(name)
        if value is None:
            raise ValueError(f"{self.model_type} config: missing {' or '.join(self._spellings(name))}")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ValueError(f"{self.model_type} config: {name} is {value!r}, must be a positive integer")
        return value

    def count(self, name: str) -> int:
        """The number `name`, 0 when absent or null.

        Raises:
            ValueError: stated, but not a non-negative integer.
        """
        value = self.get(name)
        return 0 if value is None or (value == 0 and not isinstance(value, bool)) else self.need(name)

    def listed(self, name: str) -> list[Any] | None:
        """The list `name`, None when absent or null.

        Raises:
            ValueError: not a list.
        """
        value = self.get(name)
        if value is not None and not isinstance(value, (list, tuple)):
            raise ValueError(f"{self.model_type} config: {name} is {value!r}, must be a list")
        return None if value is None else list(value)

    def note(self, text: str) -> None:
        """Record an assumption, once."""
        if text not in self.notes:
            self.notes.append(text)

    @property
    def num_layers(self) -> int:
        """Decoder layers.

        Raises:
            ValueError: missing, or more than any model has.
        """
        layers = self.need("num_hidden_layers")
        if layers > _MOST_LAYERS:
            raise ValueError(
                f"{self.model_type} config: num_hidden_layers is {layers}, at most {_MOST_LAYERS} are sized"
            )
        return layers
