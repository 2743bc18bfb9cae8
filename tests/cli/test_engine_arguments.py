"""The engine's options on a command line become its options."""

import argparse
import gc

import pytest

from kvlab.cli.engine_arguments import add_engine_arguments, engine_changes, objects_that_stay
from kvlab.engine.tiers import TierOptions
from kvlab.schedule import SchedulingPolicy


def changes(*words):
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return engine_changes(parser.parse_args(words))


def test_nothing_said_is_the_default():
    found = changes()
    assert (found["scheduling"], found["tiers"]) == (SchedulingPolicy(), None)


def test_a_policy_and_tiers(tmp_path):
    found = changes("--order", "priority", "--victim", "cheapest", "--preempt", "swap", "--host-bytes", "2MiB",
                    "--disk-dir", str(tmp_path), "--disk-bytes", "1MiB")  # fmt: skip
    assert found["scheduling"] == SchedulingPolicy("priority", "cheapest", "swap")
    assert found["tiers"] == TierOptions(2 << 20, str(tmp_path), 1 << 20)


@pytest.mark.parametrize("words", [("--preempt", "swap"), ("--disk-dir", "x", "--disk-bytes", "1MiB")])
def test_a_tier_needs_host_memory(words):
    with pytest.raises(ValueError, match="--host-bytes: is needed by"):
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
