"""Pool policies in a plan: what they cost, what is wasted, and that the allocator agrees."""

import json
from pathlib import Path

import pytest

from kvlab.cache import KVCacheManager
from kvlab.cli import main
from kvlab.plan import make_plan
from kvlab.plan.policies import WASTE, PolicySettings, bytes_function, sequence_bytes
from kvlab.specs.families import from_config
from kvlab.specs.formats import get_format
from kvlab.specs.layout import group_parts
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import Attention, CompressedEntries, RecurrentState, SlidingWindow, StateArray
from kvlab.specs.pools import POOLS, pool_layout
from kvlab.specs.rollback import RollbackPolicy

CONFIGS = Path(__file__).parents[3] / "shared" / "configs"
BF16 = get_format("bf16")
FULL, WINDOW = Attention(2, 16, 16, BF16), SlidingWindow(2, 16, 16, BF16, window=8)
STATE = RecurrentState("mamba2", (StateArray("ssm", ((4, 8),), 40, BF16),))
MIXES = {
    "windows": (FULL, WINDOW, WINDOW, WINDOW),
    "states": (STATE, STATE, FULL, STATE),
    "all": (FULL, WINDOW, STATE, CompressedEntries(4, 24, BF16), FULL),
}


def model_of(name):
    return ModelSpec("m", "m", tuple(LayerSpec(i, (p,)) for i, p in enumerate(MIXES[name])), 64, 4, 100)


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("name", MIXES)
def test_the_allocator_reaches_the_plan_s_bytes_and_never_more(name, pools):
    model, rollback = model_of(name), RollbackPolicy(2, 6)
    settings = PolicySettings("paged", 4, 6, pools=pools, rollback=rollback)
    layout = pool_layout(model, 4, pools)
    manager = KVCacheManager(layout, [90] * len(layout.buffers), 6, rollback=rollback)
    computed = peak = 0
    while computed < 61:
        new = min(6, 61 - computed, 6 - computed % 6)
        assert manager.allocate("a", computed + new, rollback.at(computed + new, 61))
        computed += new
        peak = max(peak, manager.held_bytes)
        manager.advance("a", computed)
    planned = sequence_bytes(model, 61, settings)
    windows = sum(layout.page_bytes(g) for g, group in enumerate(layout.groups) if group.retention.rule == "window")
    # where a window begins inside a page is the schedule's affair: one page of each
    assert planned.total - windows <= peak <= planned.total
    assert bytes_function(model, settings)(61) == planned.total == planned.bytes_of(1)


def test_kept_states_are_in_the_bytes_and_named():
    plain = sequence_bytes(model_of("states"), 61, PolicySettings("paged", 4, 6))
    kept = sequence_bytes(model_of("states"), 61, PolicySettings("paged", 4, 6, rollback=RollbackPolicy(0, 20, True)))
    state = 3 * 32 * 40 * 2
    # after 20, 40 and 60 tokens, and one for the prompt
    assert kept.total - plain.total == kept.waste("kept_states") == 4 * state
    few = RollbackPolicy(0, 20, checkpoints_kept=2)
    assert sequence_bytes(model_of("states"), 61, PolicySettings("paged", 4, 6, rollback=few)).waste("kept_states") == (
        2 * state
    )


def test_many_sequences_fill_each_other_s_sectors():
    model = model_of("windows")
    one = sequence_bytes(model, 21, PolicySettings("paged", 4, 4, pools="sectors"))
    sector = pool_layout(model, 4, "sectors").unit_bytes[0]
    full, window = one.groups
    assert (full.pages, full.pages_per_unit, window.pages) == (6, 3, 4)
    assert one.total == (2 + 4) * sector and one.waste("remainder") == 0
    short = sequence_bytes(model, 17, PolicySettings("paged", 4, 4, pools="sectors"))
    assert short.waste("remainder") == sector // 3
    assert short.bytes_of(3) == 3 * short.total - sector


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-3-27b", "qwen3-next-80b-a3b", "deepseek-v4-pro"])
def test_the_json_names_every_byte_of_each_policy(name, pools):
    found = make_plan(name, context="32k", policy="paged", pools=pools, checkpoint_tokens="8k").to_json()
    assert found["pool_policy"] == pools and set(found["pools"]) == set(POOLS)
    assert found["kv_bytes"] == found["pools"][pools]["kv_bytes"] == found["policies"]["paged"]["kv_bytes"]
    for split in found["pools"].values():
        named = split["useful_bytes"] + sum(split[f"{kind}_bytes"] for kind in WASTE)
        assert named == split["kv_bytes"] == sum(group["kv_bytes"] for group in split["groups"])
        assert (split["kept_states_bytes"] > 0) == (found["kv_state_bytes"] + found["kv_buffer_bytes"] > 0)


def test_the_command_shows_pools_and_refuses_what_is_none(capsys):
    assert main(["plan", "gemma-3-27b", "--policy", "paged", "--pools", "unified", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pool_policy"] == "unified"
    assert main(["plan", "gemma-3-27b", "--pools", "one"]) == 2
    assert "pools 'one': must be one of per_kind, unified, sectors" in capsys.readouterr().err
    assert main(["plan", "gemma-3-27b", "--policy", "paged", "--pools", "sectors"]) == 0
    assert "Under policy paged, pools sectors" in capsys.readouterr().out


# the policy of vLLM, restated from its source for the published hybrids


def vllm_by_hand(model, block_size=16):
    """(bytes of a layer's page, layers per group, groups, tokens per block of each kind), from layers' bytes alone."""
    rows = {}
    for _, part in model.parts():
        rule = part.retention
        if rule.rule != "none":
            size = part.fixed_bytes if rule.rule == "state" else part.entry_bytes
            rows.setdefault((rule.rule, rule.size, size), 0)
            rows[rule.rule, rule.size, size] += 1
    token_bytes = [size for rule, _, size in rows if rule != "state"]
    page = block_size * max(token_bytes)
    largest = max((size for rule, _, size in rows if rule == "state"), default=0)
    while page < largest:
        page += block_size * max(token_bytes)
    few, many = min(rows.values()), max(rows.values())
    layers = many if many < 1.5 * few else few
    groups = sum(-(-count // layers) for count in rows.values())
    return page, layers, groups, {s: page // s // block_size * block_size for s in token_bytes}


def hybrids():
    """The published configs whose layers differ in retention, and which vLLM's policy models."""
    found = []
    for path in sorted(CONFIGS.glob("*.json")) if CONFIGS.exists() else []:
        config = json.loads(path.read_text())
        if "model_type" not in config:
            continue
        rules = {part.retention for _, part in from_config(config).parts()} - {None}
        kinds = {rule.rule for rule in rules if rule.rule != "none"}
        if len([r for r in rules if r.rule != "none"]) > 1 and not kinds & {"stride", "encoder"}:
            found.append(path.name)
    return found


@pytest.mark.parametrize("name", hybrids() or [pytest.param("", marks=pytest.mark.skip("no published configs here"))])
def test_vllm_s_rule_for_the_published_hybrids(name):
    from kvlab.plan.unified import unified_pool

    model = from_config(json.loads((CONFIGS / name).read_text()))
    pool = unified_pool(model, 16)
    page, layers, groups, tokens = vllm_by_hand(model)
    assert (pool.page_bytes, pool.layers_per_group, len(pool.groups)) == (page, layers, groups)
    for group in pool.groups:
        if group.retention.rule != "state":
            assert group.block_size == tokens[group.parts[0].entry_bytes]


@pytest.mark.parametrize("name", hybrids() or [pytest.param("", marks=pytest.mark.skip("no published configs here"))])
def test_the_engine_s_unified_pool_is_vllm_s_but_for_padded_rows(name):
    """Same groups, same layers a group; a page is at least vLLM's, and larger only by what rows are padded."""
    from kvlab.plan.unified import unified_pool

    model = from_config(json.loads((CONFIGS / name).read_text()))
    ours, theirs = pool_layout(model, 16, "unified"), unified_pool(model, 16)
    assert len(ours.groups) == len(theirs.groups) and len(ours.buffers[0]) == theirs.layers_per_group
    assert theirs.page_bytes <= ours.buffers[0][0] <= 1.02 * theirs.page_bytes
    assert sum(len(g.members) for g in ours.groups) == sum(len(g.members) for g in group_parts(model, 16))


def test_a_step_back_that_the_engine_refuses_is_no_plan_either():
    with pytest.raises(ValueError, match="tokens 5 needs checkpoint_tokens, the states of layer 0"):
        make_plan("qwen3-next-80b-a3b", rollback_tokens=5, policy="paged")
    assert make_plan("qwen3-next-80b-a3b", rollback_tokens=5, checkpoint_tokens=64, policy="paged").sequence().total
