"""Every published config under ../shared/configs against what transformers really keeps in its cache for it.

`expected.json` there was derived from the raw fields and checked against transformers' own cache, so it shares no
code with kvlab. Where the folder is absent the tests skip; `test_golden.py` holds the project's own table.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvlab.specs.families import from_config
from kvlab.specs.model import ModelSpec
from kvlab.specs.parts import (
    Attention,
    ChunkedLocal,
    CompressedEntries,
    CrossAttention,
    IndexKeys,
    MLALatent,
    RecurrentState,
    SlidingWindow,
)  # fmt: skip

CONFIGS = Path(__file__).parents[3] / "shared" / "configs"


def _cases() -> list[Any]:
    file = CONFIGS / "expected.json"
    if not file.is_file():
        return [pytest.param(None, marks=pytest.mark.skip(reason="../shared/configs is not here"))]
    return [pytest.param(name, id=name.removesuffix(".json")) for name in json.loads(file.read_text())["configs"]]


def _load(name: str) -> tuple[ModelSpec, dict[str, Any]]:
    expected = json.loads((CONFIGS / "expected.json").read_text())["configs"][name]
    return from_config(json.loads((CONFIGS / name).read_text())), expected


@pytest.mark.parametrize("name", _cases())
def test_bytes_per_token_and_at_every_listed_length(name: str) -> None:
    model, expected = _load(name)
    assert model.model_type == expected["model_type"]
    assert model.bytes_per_token == expected["growing_bytes_per_token"]
    assert model.bytes_per_token_short == expected["bytes_per_token_short_context"]
    windowed = [p for _, p in model.parts() if p.retention.rule in ("window", "chunk")]
    assert sum(p.slope(0) for p in windowed) == expected["windowed_bytes_per_token_until_window"]
    assert sum(p.retention.size * p.entry_bytes for p in windowed) == expected["windowed_cap_bytes_at_W"]
    for tokens, total in expected["total_kv_bytes_at_tokens"].items():
        assert model.bytes_at(int(tokens)) - model.state_bytes == total, tokens


@pytest.mark.parametrize("name", _cases())
def test_fixed_state(name: str) -> None:
    config = json.loads((CONFIGS / name).read_text())
    _, expected = _load(name)
    state = expected["fixed_state"] or {}
    assert from_config(config).state_bytes == state.get("bytes_bf16_conv_k_minus_1_fp32_recurrent", 0)
    assert from_config(config, state_format="bf16").state_bytes == state.get("bytes_all_bf16_conv_k_minus_1", 0)
    arrays = [a for _, p in from_config(config).parts() if isinstance(p, RecurrentState) for a in p.arrays]
    conv = sum(a.elements for a in arrays if a.name == "conv")
    assert conv == state.get("conv_elems_k_minus_1_columns", 0)
    assert sum(a.elements for a in arrays if a.name == "state") == state.get("recurrent_elems", 0)


@pytest.mark.parametrize("name", _cases())
def test_layer_groups(name: str) -> None:
    model, expected = _load(name)
    assert _groups(model) == Counter({_expected_group(g): g["layers"] for g in expected["layer_groups"]})


def _expected_group(group: dict[str, Any]) -> tuple[Any, ...]:
    kind = group["type"]
    if kind in ("full", "sliding", "chunked", "cross"):
        return (kind, group["kv_heads"], group["k_head_dim"], group["v_head_dim"], group.get("window", 0))
    if kind in ("mla", "mla+indexer"):
        return (kind, group["kv_lora_rank"], group["rope_dim"], group.get("index_head_dim", 0))
    if kind == "recurrent":
        return (kind, group["conv_channels"], group["conv_kernel"], group["ssm_elems"])
    return (kind, group["window"], group["compress_ratio"]) if kind in ("csa", "hca") else (kind,)


def _groups(model: ModelSpec) -> Counter[tuple[Any, ...]]:
    found: Counter[tuple[Any, ...]] = Counter()
    for layer in model.layers:
        index = next((p.width for p in layer.parts if isinstance(p, IndexKeys)), 0)
        found.update(_group(part, index) for part in layer.parts if not isinstance(part, IndexKeys))
        found.update([("none",)] if not layer.parts else [])
    found.pop(("part of csa or hca",), None)
    return found


def _group(part: Any, index: int) -> tuple[Any, ...]:
    if isinstance(part, Attention):
        kinds = {SlidingWindow: "sliding", ChunkedLocal: "chunked", CrossAttention: "cross", Attention: "full"}
        return (kinds[type(part)], part.num_kv_heads, part.key_dim, part.value_dim, part.retention.size)
    if isinstance(part, MLALatent):
        return ("mla+indexer" if index else "mla", part.latent_dim, part.rope_dim, index)
    if isinstance(part, RecurrentState):
        conv = [a for a in part.arrays if a.name == "conv"]
        channels = conv[0].elements // conv[0].columns if conv else 0
        state = sum(a.elements for a in part.arrays if a.name == "state")
        return ("recurrent", channels, conv[0].columns + 1 if conv else 0, state)
    if isinstance(part, CompressedEntries):
        return ("csa" if part.ratio == 4 else "hca", 128, part.ratio)
    return ("kv_shared",) if part.kind == "shared" else ("part of csa or hca",)
