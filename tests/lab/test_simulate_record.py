"""The record of how long a simulation takes: what it holds, and that its trace is what it says of it."""

from __future__ import annotations

from kvlab.book import results
from kvlab.lab import simulate_record
from kvlab.simulate import parse_recipe, synthetic


def test_the_record_has_its_times_and_its_provenance():
    found = simulate_record.record("random:n=2,prompt=4,output=3", repeats=1)
    assert set(results.REQUIRED) <= found.keys()
    assert found["result"]["requests"] == found["result"]["finished"] == 2 and found["result"]["output_tokens"] == 6
    assert len(found["runs"]) == 1 and all(0 < run["wall_seconds"] < run["process_seconds"] for run in found["runs"])
    assert (
        "kvlab simulate random:n=2" in found["simulated_with"]
        and "--model llama-3.1-70b --gpu h200" in found["simulated_with"]
    )


def test_the_trace_is_about_as_mooncakes_conversations():
    trace = synthetic(parse_recipe(simulate_record.RECIPE))
    n = len(trace.requests)
    assert n == 2000 and 2.7 < n / trace.duration_s < 3.3
    assert 12_000 < sum(r.prompt_tokens for r in trace.requests) / n < 15_000
    assert 350 < sum(r.output_tokens for r in trace.requests) / n < 450
    again, blocks = trace.shared_blocks
    assert 0.25 < again / blocks < 0.35
