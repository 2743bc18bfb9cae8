"""The explorer's state: the plan's own figures, for presets and own shapes, and parts that add up."""

import json
import shlex

import pytest

from kvlab.plan import make_plan
from kvlab.plan.explore import ATTENTION, DEFAULTS, command, explorer_state, own_config
from kvlab.specs import catalogue

OWN = {"model": "own", "layers": 8, "query_heads": 16, "kv_heads": 4, "head_dim": 64, "window": 1024}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"model": "llama-3-70b", "tp": 4, "kv_dtype": "fp8_e4m3", "weight_dtype": "fp8_e4m3", "context": 131072},
        {"model": "qwen3-next-80b-a3b", "gpu": "h200", "tp": 2, "batch": 64},
        {"model": "gpt-oss-20b", "gpu": "rtx-5090", "batch": 16, "policy": "paged"},
    ],
)
def test_a_preset_shows_what_the_plan_says(params):
    state = explorer_state(params)
    p = {**DEFAULTS, **params}
    options = {k: p[k] for k in ("context", "batch", "kv_dtype", "weight_dtype", "tp", "gpu", "policy")}
    found = make_plan(p["model"], **options).to_json()
    for key in ("max_concurrent", "kv_bytes", "kv_bytes_per_gpu", "kv_bytes_per_token_at_context", "kv_state_bytes",
                "weights_bytes", "longest_context"):  # fmt: skip
        assert state[key] == found[key], key
    assert state["fits"] == found["batch_fits"]
    assert state["memory"]["weights_bytes"] == found["weights_bytes_per_gpu"]
    assert state["memory"]["capacity_bytes"] == found["hardware"]["memory_bytes"]
    assert {k: v for k, v in state["decode"].items() if k != "bound"} == found["timing"]["decode"]
    json.dumps(state, allow_nan=False)


@pytest.mark.parametrize("attention", ATTENTION)
def test_the_command_line_is_the_same_plan_for_every_own_shape(attention, capsys):
    from kvlab.cli import main

    state = explorer_state({**OWN, "attention": attention, "context": 32768, "batch": 3, "gpu": "l40s"})
    words = shlex.split(state["command"])
    assert words[:2] == ["kvlab", "plan"]
    assert main([*words[1:], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for key in ("max_concurrent", "kv_bytes", "weights_bytes", "longest_context"):
        assert state[key] == found[key], key
    assert state["decode"]["tokens_per_s"] == found["timing"]["decode"]["tokens_per_s"]


def test_what_fills_a_gpu_adds_up_and_crosses_the_capacity_when_the_batch_no_longer_fits():
    base = {"model": "qwen3-next-80b-a3b", "gpu": "h200", "tp": 2, "policy": "paged"}
    most = explorer_state(base)["max_concurrent"]
    for batch, fits in ((1, True), (most, True), (most + 1, False)):
        state = explorer_state({**base, "batch": batch})
        m = state["memory"]
        parts = [m[f"{part}_bytes"] for part in ("weights", "cache", "state", "overhead")]
        assert min(parts) > 0
        assert sum(parts) == m["used_bytes"] == m["capacity_bytes"] - m["free_bytes"]
        assert (state["fits"], m["used_bytes"] <= m["capacity_bytes"]) == (fits, fits)


@pytest.mark.parametrize(
    ("attention", "per_token"),
    [
        ("mha", 8 * 2 * 16 * 64 * 2), ("gqa", 8 * 2 * 4 * 64 * 2), ("mqa", 8 * 2 * 64 * 2), ("mla", 8 * 576 * 2),
        ("sliding", 0), ("hybrid", 2 * 2 * 4 * 64 * 2), ("recurrent", 2 * 2 * 4 * 64 * 2), ("compressed", 8 * 64 * 2 / 128),
    ],
)  # fmt: skip
def test_own_shapes_cost_what_their_factors_say(attention, per_token):
    state = explorer_state({**OWN, "attention": attention, "context": 4096})
    assert state["kv_bytes_per_token_at_context"] == per_token
    windows = {"sliding": 8, "hybrid": 6}.get(attention, 0) * 1024 * 2 * 4 * 64 * 2
    windows += {"compressed": 8}.get(attention, 0) * 1024 * 64 * 2
    # per recurrent layer a matrix of 128 x 128 fp32 per head, and three inputs of a convolution over q, k and v in bf16
    states = {"recurrent": 6}.get(attention, 0) * 16 * (128 * 128 * 4 + 3 * 3 * 128 * 2)
    assert state["kv_bytes"] == 4096 * per_token + windows + states
    assert state["kv_state_bytes"] == states


def test_one_entry_for_4_tokens_brings_an_indexer_with_it():
    dense, sparse = (explorer_state({**OWN, "attention": "compressed", "ratio": r, "context": 4096}) for r in (4, 128))
    entries = 8 * 64 * 2
    assert dense["kv_bytes"] - sparse["kv_bytes"] == 4096 // 4 * 2 * entries - 4096 // 128 * entries


def test_an_own_shapes_weights_are_those_of_a_gated_decoder():
    state = explorer_state({**OWN, "attention": "gqa"})
    hidden, ffn = 1024, 3584
    layer = 2 * hidden * hidden + 2 * hidden * 256 + 3 * hidden * ffn + 2 * hidden
    assert state["weights_bytes"] == 2 * (8 * layer + hidden + 2 * 128256 * hidden)
    assert any("hidden size 1,024, feed-forward width 3,584" in note for note in state["notes"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers 0: must be at least 1"),
        ({"layers": 2.5}, "layers 2.5: must be a whole number"),
        ({"layers": float("nan")}, "layers nan: must be a whole number"),
        ({"layers": None}, "layers None: must be a whole number"),
        ({"kv_heads": 3}, "kv_heads 3: must divide the 16 query heads"),
        ({"attention": "linear"}, "attention 'linear': must be one of mha"),
        ({"tp": 32}, "tp 32: must divide the 16 query heads"),
        ({"context": 0}, "context 0"),
        ({"attention": "compressed", "ratio": 8}, "ratio 8: must be one of 4, 128 tokens per entry"),
        ({"gpu": "abacus"}, "gpu 'abacus': must be one of"),
        ({"colour": 1}, "control 'colour': must be one of"),
    ],
)
def test_impossible_settings_are_refused_with_the_rule(change, message):
    with pytest.raises(ValueError, match=message):
        explorer_state({**OWN, **change})


def test_every_model_of_the_catalogue_can_be_shown():
    for name in catalogue.names():
        state = explorer_state({"model": name, "batch": 2})
        assert state["kv_bytes"] > 0, name
        assert state["decode"]["tokens_per_s"] > 0, name


def test_the_command_names_what_differs_from_the_defaults():
    params = {**DEFAULTS, "model": "llama-3-8b", "kv_dtype": "int8", "tp": 2}
    want = "kvlab plan llama-3-8b --context 8192 --batch 1 --kv-dtype int8 --tp 2 --gpu h100-sxm"
    assert command(params) == want
    assert own_config({**OWN, "attention": "mla"})["model_type"] == "minicpm3"
