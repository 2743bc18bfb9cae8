"""The engine's options on a command line become its options, every one of them or with a reason why not."""

import argparse
import dataclasses
import gc
from types import SimpleNamespace

import pytest
import torch

from kvlab.cache.prefix import PrefixOptions
from kvlab.cli import engine_arguments, speculation_arguments
from kvlab.cli.engine_arguments import add_engine_arguments, engine_changes, objects_that_stay
from kvlab.cli.pressure_arguments import policy_of
from kvlab.engine.options import EngineOptions
from kvlab.engine.tiers import TierOptions
from kvlab.ops import numba_support
from kvlab.schedule import SchedulingPolicy
from kvlab.speculate.options import METHODS, SpeculationOptions

# field -> its option; or why the command line has none
REACHED = {
    EngineOptions: {
        "kv_dtype": "--kv-dtype", "kv_scales": "tensors", "block_size": "--block-size", "pools": "the engine's own choice",
        "num_blocks": "--num-blocks", "kv_bytes": "--kv-bytes", "split_tokens": "follows --max-model-len",
        "rollback": "of sessions that go back; no request of a client does", "prefix": "--prefix", "scheduling": "--order",
        "tiers": "--host-bytes", "max_model_len": "--max-model-len", "max_num_seqs": "--max-num-seqs",
        "max_batched_tokens": "--max-batched-tokens", "seed": "each command's --seed", "check": "of tests",
        "pad_to": "of tests", "page_seed": "of tests", "log_events": "of notebooks", "speculation": "--speculate",
    },
    SchedulingPolicy: {
        "order": "--order", "victim": "--victim", "preempt": "--preempt", "costs": "--link-rate", "patience": "of tests",
    },
    TierOptions: {
        "host_bytes": "--host-bytes", "disk_dir": "--disk-dir", "disk_bytes": "--disk-bytes",
        "save_prefixes": "whoever gives memory wants it used", "park_dtype": "--park-dtype",
    },
    PrefixOptions: {
        "design": "--prefix", "eviction": "--prefix-eviction", "ttl": "--prefix-ttl", "digest": "of tests",
        "checkpoint_prompt": "of experiments on states", "junctions": "of experiments on states",
        "checkpoint_tokens": "of experiments on states",
    },
    SpeculationOptions: {
        "method": "--speculate", "k": "--speculate", "adapt": "--adapt-k", "cost": "of experiments",
        "fixed_cost": "of experiments",
        "draft": "--draft-model", "heads": "--heads", "branches": "--draft-tree", "drawn": "of experiments",
        "keep_states": "off only where no state is, and there it does nothing", "longest": "of experiments",
    },
}  # fmt: skip


def parser():
    found = argparse.ArgumentParser()
    add_engine_arguments(found)
    return found


def parsed(*words):
    return parser().parse_args(words)


def changes(*words):
    return engine_changes(parsed(*words))


@pytest.mark.parametrize("options", REACHED, ids=lambda options: options.__name__)
def test_every_field_has_an_option_or_a_reason(options):
    there = {word for action in parser()._actions for word in action.option_strings}
    assert set(REACHED[options]) == {field.name for field in dataclasses.fields(options)}
    assert {word for word in REACHED[options].values() if word.startswith("--")} <= there


def test_the_methods_are_the_engines():
    assert sorted(speculation_arguments.METHODS) == sorted(METHODS)


def test_nothing_said_is_the_default():
    found = changes()
    assert (found["tiers"], found["prefix"], policy_of(parsed(), None)) == (None, None, SchedulingPolicy())


def test_a_policy_and_tiers(tmp_path):
    words = ("--order", "priority", "--victim", "cheapest", "--preempt", "swap", "--host-bytes", "2MiB",
             "--disk-dir", str(tmp_path), "--disk-bytes", "1MiB")  # fmt: skip
    assert policy_of(parsed(*words), None) == SchedulingPolicy("priority", "cheapest", "swap")
    assert changes(*words)["tiers"] == TierOptions(2 << 20, str(tmp_path), 1 << 20)


@pytest.mark.parametrize("words", ["--preempt auto --host-bytes 1MiB", "--victim cheapest"])
def test_stated_rates_are_the_costs_that_are_compared(words, monkeypatch):
    monkeypatch.setattr("kvlab.engine.tiers.swap_costs", lambda model, link, flops: (model, link, flops))
    args = parsed(*words.split(), "--link-rate", "25GB", "--flop-rate", "5e10")
    assert policy_of(args, "a model").costs == ("a model", 25 * 10**9, 5e10)


def test_rates_that_are_not_stated_are_measured_and_said(monkeypatch, capsys):
    found = SimpleNamespace(link_bytes_per_s=8e9, flops=4e10, latency_s=1e-5)
    monkeypatch.setattr("kvlab.lab.swap_rates.measure_swap_rates", lambda model: found)
    monkeypatch.setattr("kvlab.engine.tiers.swap_costs", lambda *costs: costs)
    args = parsed("--preempt", "auto", "--host-bytes", "1MiB", "--flop-rate", "7e10")
    assert policy_of(args, "a model").costs == ("a model", 8e9, 7e10, 1e-5)
    told = capsys.readouterr().err
    assert "swapped at 8 GB/s" in told and "at 70 GFLOP/s" in told and told.count("\n") == 1


def test_prefix_eviction():
    assert changes("--prefix", "radix")["prefix"] == PrefixOptions("radix")
    words = ("--prefix", "hash", "--prefix-eviction", "ttl", "--prefix-ttl", "2.5")
    assert changes(*words)["prefix"] == PrefixOptions("hash", "ttl", 2.5)


@pytest.mark.parametrize(
    "words", [("--preempt", "swap"), ("--preempt", "auto"), ("--disk-dir", "x", "--disk-bytes", "1MiB"),
              ("--park-dtype", "int8")],
)  # fmt: skip
def test_a_tier_needs_host_memory(words):
    with pytest.raises(ValueError, match="--host-bytes: is needed by --"):
        changes(*words)


def test_a_directory_without_a_size_is_refused():
    with pytest.raises(ValueError, match="disk_dir and disk_bytes: give both, or none"):
        changes("--host-bytes", "1MiB", "--disk-dir", "x")


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_rests_while_a_start_makes_what_stays_and_is_then_as_it_was(collects):
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(ValueError, match="no such model"), objects_that_stay():
            assert not gc.isenabled()
            raise ValueError("no such model")
        assert gc.isenabled() is collects
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.enable()


@pytest.mark.parametrize(("words", "k"), [("ngram", 4), ("medusa", 4), ("medusa --draft-tree 3,2,1", 15),
                                          ("eagle:5 --draft-tree 3,2,1", 5), ("eagle --draft-tree 8,8,8", 64)])  # fmt: skip
def test_a_tree_is_drafted_whole_unless_k_says_otherwise(words, k):
    assert speculation_arguments.speculation_of(parsed("--speculate", *words.split()), None).k == k


def test_a_first_step_that_compiles_is_announced_and_a_later_one_is_not(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("KVLAB_OPS", raising=False)
    monkeypatch.setattr(numba_support, "cache_dir", lambda: str(tmp_path))
    engine_arguments._tell_of_compiling(torch.device("cpu"))
    assert capsys.readouterr().err == "kvlab: the CPU kernels are compiled now, once: a minute or two\n"
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "kernel.nbi").write_bytes(b"")
    engine_arguments._tell_of_compiling(torch.device("cpu"))
    monkeypatch.setenv("KVLAB_OPS", "torch")
    (tmp_path / "ops" / "kernel.nbi").unlink()
    engine_arguments._tell_of_compiling(torch.device("cpu"))
    assert capsys.readouterr().err == ""
