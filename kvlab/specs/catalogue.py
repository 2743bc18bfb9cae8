"""Facts of named models, so that a plan works offline: `names`, `get`, `entry`.

The facts live in `catalogue.json`, one line per model. A row holds short names for what every decoder has and
the family's own field names for the rest; `get` returns them as a config that `families.from_config` and
`weights.count` understand. Row keys and what they become:

    type      model_type; a multimodal wrapper's row describes its text decoder
    layers    num_hidden_layers         hidden    hidden_size
    heads     num_attention_heads       kv_heads  num_key_value_heads
    ffn       intermediate_size         vocab     vocab_size
    context   max_position_embeddings   tied      tie_word_embeddings
    window    sliding_window
    like      another row: this one differs from it by what it states
    hub       id on the model hub
    source    where the facts come from: "config.json" the published file (or an excerpt or re-typed copy, where it
              says so), a paper and its table, or "published shapes", those of the publisher's model card and config

A text such as "mamba*5 attention (mamba*9 attention)*3" stands for the list it spells.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from kvlab.specs.families.multimodal import WRAPPERS

_SHORT = {
    "type": "model_type", "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "ffn": "intermediate_size", "vocab": "vocab_size",
    "context": "max_position_embeddings", "tied": "tie_word_embeddings", "window": "sliding_window",
}  # fmt: skip
_LISTS = {"layer_types", "layers_block_type", "compress_ratios", "indexer_types", "attn_type_list"}
_META = {"hub", "source", "like"}


@dataclass(frozen=True)
class Entry:
    """A model of the catalogue.

    Attributes:
        name: its name here.
        hub: id on the model hub, "" when it has none.
        source: where the facts come from.
        config: the facts under Hugging Face's field names.
    """

    name: str
    hub: str
    source: str
    config: dict[str, Any]


@lru_cache(maxsize=1)
def _rows() -> dict[str, dict[str, Any]]:
    return json.loads(files("kvlab.specs").joinpath("catalogue.json").read_text(encoding="utf-8"))


def names() -> tuple[str, ...]:
    """Names of all models, in the catalogue's order (family by family)."""
    return tuple(_rows())


def get(name: str) -> dict[str, Any]:
    """The facts of model `name` as a config; a fresh dict.

    Raises:
        ValueError: unknown name; the message suggests close ones.
    """
    return entry(name).config


def entry(name: str) -> Entry:
    """The catalogue's entry for `name`: upper and lower case are the same, and a hub id names its model.

    Raises:
        ValueError: unknown name; the message suggests close ones.
    """
    key = find(name)
    if key is None:
        raise ValueError(f"model {name!r}: not in the catalogue{suggest(name)}")
    row = _whole(key)
    return Entry(key, row.get("hub", ""), row["source"], _config(row))


def find(name: str) -> str | None:
    """The catalogue's own spelling of `name` (a name or a hub id), None when it is not there."""
    wanted = name.strip().lower()
    if wanted in _rows():
        return wanted
    return next((key for key, row in _rows().items() if row.get("hub", "").lower() == wanted), None)


def suggest(name: str) -> str:
    """ "; did you mean ...?" with the closest names, "" when none is close."""
    close = difflib.get_close_matches(name.strip().lower().rpartition("/")[2], names(), 3, 0.5)
    return f"; did you mean {', '.join(close)}?" if close else ""


def _whole(name: str) -> dict[str, Any]:
    """The row, with what it takes over from the row it is like (but not that one's hub id)."""
    row = _rows()[name]
    if "like" not in row:
        return dict(row)
    base = _whole(row["like"])
    base.pop("hub", None)
    return {**base, **row}


def _config(row: dict[str, Any]) -> dict[str, Any]:
    facts = {_SHORT.get(key, key): value for key, value in row.items() if key not in _META}
    for key in _LISTS & facts.keys():
        if isinstance(facts[key], str):
            facts[key] = expand(facts[key])
    model_type = facts.pop("model_type")
    if model_type in WRAPPERS:
        return {"model_type": model_type, "text_config": {"model_type": WRAPPERS[model_type], **facts}}
    return {"model_type": model_type, **facts}


def expand(text: str) -> list[Any]:
    """The list that a text with repetitions spells: "a*2 (b 4)*2" is ["a", "a", "b", 4, "b", 4]."""
    flat = re.sub(r"\(([^()]*)\)\*(\d+)", lambda m: " ".join([m[1]] * int(m[2])), text)
    found: list[Any] = []
    for word in flat.split():
        item, _, times = word.partition("*")
        found += [int(item) if item.isdigit() else item] * int(times or 1)
    return found
