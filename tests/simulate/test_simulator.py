"""The simulator against arithmetic by hand and against itself step by step."""

from __future__ import annotations

import pytest

from kvlab.plan.plan import make_plan
from kvlab.plan.steps import decode_step, prefill
from kvlab.schedule import Chunk, Request, SamplingParams
from kvlab.simulate import Recipe, SimulateOptions, Simulator, StepClock, Trace, TraceRequest, simulate, synthetic
from kvlab.simulate.clock import Machine
from kvlab.simulate.simulator import prompt_tokens
from kvlab.simulate.summary import Objective, Timed, bucket_of, percentile, summary

MODELS = (
    "llama-3.1-8b",
    "gemma-2-9b",
    "deepseek-v2-lite",
    "mixtral-8x7b",
    "gemma-3n-e2b",
    "jamba-1.5-mini",
    "mamba-2.8b",
)


def chunk(start: int, count: int, samples: bool = True) -> Chunk:
    return Chunk(Request("0", [1] * (start + count), SamplingParams()), start, count, samples)


@pytest.mark.parametrize("model", MODELS)
def test_a_batch_of_equal_decodes_takes_what_the_plan_says(model):
    plan = make_plan(model, gpu="h200", tp=1)
    step = decode_step(plan, 7, 5000)
    clock = StepClock(plan)
    # the plan counts the rows of a tied embedding table besides the whole table
    assert clock.seconds([chunk(4999, 1)] * 7) == pytest.approx(step.seconds, rel=1e-5)
    assert clock.decode_seconds([5000] * 7) == clock.seconds([chunk(4999, 1)] * 7)
    assert clock.timed([chunk(4999, 1)] * 7)[1] == step.bound_by


@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_in_one_step_computes_what_the_plan_says(model):
    plan = make_plan(model, gpu="h200")
    weights, _, operations = StepClock(plan).work([chunk(0, 3000)])
    step = prefill(plan, 3000)
    assert operations == pytest.approx(step.operations, rel=1e-9)
    assert weights == pytest.approx(step.weights_read_bytes, rel=1e-9)


@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_in_chunks_computes_what_it_computes_at_once_but_its_head(model):
    plan = make_plan(model, gpu="h200")
    clock = StepClock(plan)
    whole = clock.work([chunk(0, 3000)])[2]
    parts = sum(clock.work([c])[2] for c in (chunk(0, 1000, False), chunk(1000, 1500, False), chunk(2500, 500)))
    assert parts == pytest.approx(whole, rel=1e-9)


def test_overheads_are_added_to_the_roofline():
    plan = make_plan("llama-3.1-8b", gpu="h200")
    bare, full = Machine(1e12, 1e15), Machine(1e12, 1e15, 0.5, 0.01, 0.1)
    chunks = [chunk(9, 1), chunk(0, 20)]
    extra = StepClock(plan, full).seconds(chunks) - StepClock(plan, bare).seconds(chunks)
    assert extra == pytest.approx(0.5 + 21 * 0.01 + 2 * 0.1)


def test_one_request_alone_by_hand():
    """A prompt of 100 in steps of 64, then two more tokens: four steps, the second gives the first token."""
    plan = make_plan("llama-3.1-8b", gpu="h200")
    trace = Trace("one", "test", (TraceRequest(3.0, 100, 3),))
    result = Simulator(trace, plan, SimulateOptions(max_batched_tokens=64)).run()
    clock = StepClock(plan)
    times = [clock.seconds([c]) for c in (chunk(0, 64, False), chunk(64, 36), chunk(100, 1), chunk(101, 1))]
    (one,) = result.requests
    assert result.steps == 4
    assert one.token_s == pytest.approx([3 + sum(times[:2]), 3 + sum(times[:3]), 3 + sum(times)])
    assert result.busy_s == pytest.approx(sum(times))


def test_equal_blocks_are_computed_once():
    plan = make_plan("llama-3.1-8b", gpu="h200")
    rows = (
        TraceRequest(0.0, 1024, 4, (5, 6)),
        TraceRequest(50.0, 1030, 4, (5, 6, 7)),
        TraceRequest(99.0, 512, 4, (6,)),
    )
    trace = Trace("three", "mooncake", rows)
    for design in ("hash", "radix"):
        found = Simulator(trace, plan, SimulateOptions(prefix=design)).run()
        # the second finds the first's 1,024 tokens; block 6 alone is another history
        assert found.counts["hit_tokens"] == 1024
        assert found.to_json()["prefix_hit_rate"] == 1024 / (1024 + 1030 + 512)
    assert Simulator(trace, plan, SimulateOptions(prefix="off")).run().counts["hit_tokens"] == 0


def test_last_token_of_a_prompt_that_was_there_before_is_computed_again():
    plan = make_plan("llama-3.1-8b", gpu="h200")
    rows = (TraceRequest(0.0, 1024, 4, (5, 6)), TraceRequest(50.0, 1024, 4, (5, 6)))
    assert Simulator(Trace("two", "mooncake", rows), plan).run().counts["hit_tokens"] == 1024 - 16


def test_prompts_without_ids_share_nothing_and_blocks_are_cut_to_the_prompt():
    assert set(prompt_tokens(TraceRequest(0, 5, 1), 0, 512)).isdisjoint(prompt_tokens(TraceRequest(0, 5, 1), 1, 512))
    assert prompt_tokens(TraceRequest(0, 5, 1, (8, 9)), 0, 4).tolist() == [8, 8, 8, 8, 9]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama-3.1-8b", {"max_num_seqs": 6, "max_batched_tokens": 300}),
        ("llama-3.1-8b", {"num_blocks": 90, "max_model_len": 1300, "max_batched_tokens": 256, "prefix": "radix"}),
        ("gemma-2-9b", {"num_blocks": 150, "max_model_len": 1000, "max_batched_tokens": 256}),
        # pages behind a window of 128 go back while others wait for them
        ("gpt-oss-20b", {"num_blocks": 90, "max_model_len": 1000, "max_batched_tokens": 256, "prefix": "off"}),
        ("gpt-oss-20b", {"num_blocks": 150, "max_model_len": 1000, "max_batched_tokens": 256, "prefix": "off"}),
        ("jamba-1.5-mini", {"max_num_seqs": 5}),
    ],
    ids=["few places", "few pages", "windows", "short windows", "more pages", "states"],
)
def test_runs_of_equal_steps_change_nothing(model, options, seed):
    """The same times, steps, hits, preemptions and peak as with every step scheduled."""
    recipe = Recipe(
        n=16, rate=400, burstiness=0.3, prompt=120, output=100, spread=0.7, prefix=64, prefixes=2, seed=seed
    )
    trace, own = synthetic(recipe).clipped(900), SimulateOptions(**options)
    plan = make_plan(model, gpu="h200", max_batched_tokens=own.max_batched_tokens)
    fast, slow = (Simulator(trace, plan, own, fast=f).run() for f in (True, False))
    assert fast.requests == slow.requests and fast.steps == slow.steps and fast.counts == slow.counts
    assert all(len(r.token_s) == r.output_tokens for r in fast.requests)
    assert fast.busy_s == pytest.approx(slow.busy_s)


def test_scheduler_and_cache_keep_their_invariants_under_pressure():
    trace = synthetic(Recipe(n=40, rate=300, prompt=100, output=60, spread=0.6, prefix=48, prefixes=3, seed=2))
    plan = make_plan("llama-3.1-8b", gpu="h200")
    simulator = Simulator(trace.clipped(700), plan, SimulateOptions(num_blocks=60, max_model_len=800))
    step = simulator._step

    def checked(now):
        then = step(now)
        simulator.cache.check_invariants()
        return then

    simulator._step = checked
    result = simulator.run()
    assert result.counts["preemptions"] > 0 and all(len(r.token_s) == r.output_tokens for r in result.requests)
    assert simulator.cache.held_bytes == 0


def test_request_that_fits_nothing_is_refused_and_the_others_go_on():
    rows = (TraceRequest(0.0, 10, 5), TraceRequest(0.0, 4000, 5), TraceRequest(1.0, 10, 5))
    found = simulate(Trace("t", "test", rows), "llama-3.1-8b", gpu="h200", num_blocks=20).to_json()
    assert found["refused"] == 1 and found["finished"] == 2
    assert found["errors"] == {"refused: too long for the model or the pool": 1}


def test_progress_is_told_and_may_stop_the_run():
    trace = synthetic(Recipe(n=400, rate=1000, prompt=700, output=3))
    told = []

    def stop(done, total, now):
        told.append((done, total, now))
        return len(told) == 2

    result = Simulator(trace, make_plan("llama-3.1-8b", gpu="h200"), SimulateOptions(max_batched_tokens=512)).run(stop)
    assert result.cancelled and result.to_json()["cancelled"]
    assert len(told) == 2 and told[0][0] < told[1][0] < told[1][1] == 400 and 0 < told[0][2] < told[1][2]


@pytest.mark.parametrize(
    ("model", "options", "error"),
    [
        ("llama-3.1-70b", {"gpu": "h200"}, "no room for a cache of 2 pages of .*; use more GPUs"),
        ("llama-3.1-8b", {"gpu": "h200", "pp": 2}, "pp 2, cp 1: must be 1"),
        ("llama-3.1-8b", {"prefix": "tree"}, "prefix 'tree': must be one of hash, radix, off"),
        ("llama-3.1-8b", {"num_blocks": 1}, "num_blocks 1: must be at least 2"),
        ("llama-3.1-8b", {"num_blocks": 10**14}, "num_blocks 100000000000000: takes .* of each GPU, which has "),
        ("llama-3.1-8b", {"gpu": "h200", "reserve": "900GiB"}, "a reserve of 900.00 GiB leave 0 B of"),
        ("llama-3.1-8b", {"max_model_len": "1M"}, "max_model_len 1048576: the model was made for at most 131072"),
        ("no-such-model", {}, "no-such-model"),
        ("llama-3.1-8b", {"colour": 1}, "option 'colour'"),
    ],
)
def test_what_cannot_be_simulated_is_told(model, options, error):
    with pytest.raises(ValueError, match=error):
        simulate(Trace("t", "test", (TraceRequest(0.0, 10, 5),)), model, **options)


def test_trace_without_arrivals_is_refused():
    trace = Trace("t", "lengths", (TraceRequest(0.0, 10, 5),), timed=False)
    with pytest.raises(ValueError, match="t: has no arrival times"):
        simulate(trace, "llama-3.1-8b", gpu="h200")


# summary


def test_percentiles_are_linear_between_neighbours():
    assert [percentile([1.0, 2.0, 4.0], p) for p in (0, 25, 50, 75, 100)] == [1.0, 1.5, 2.0, 3.0, 4.0]
    with pytest.raises(ValueError, match="needs values"):
        percentile([], 50)


def test_summary_counts_what_kept_both_objectives():
    served = Timed(100, 3, 1.0, [1.5, 1.6, 1.7])
    late, slow = Timed(600, 2, 1.0, [9.0, 9.1]), Timed(600, 2, 1.0, [1.5, 3.5])
    refused = Timed(9000, 2, 2.0, error="429")
    found = summary([served, late, slow, refused], Objective(2.0, 0.5))
    assert (found["requests"], found["finished"], found["errors"], found["good_requests"]) == (4, 3, {"429": 1}, 1)
    assert found["seconds"] == pytest.approx(8.1) and found["output_tokens"] == 7
    assert found["latency"]["1-512"]["ttft_s"]["p50"] == 0.5 and found["latency"]["513-2048"]["requests"] == 2
    assert found["latency"]["8193-32768"] is None and "32769+" not in found["latency"]


def test_length_buckets_meet():
    assert [bucket_of(n) for n in (1, 512, 513, 2048, 2049, 32768, 32769)] == [
        "1-512", "1-512", "513-2048", "513-2048", "2049-8192", "8193-32768", "32769+",
    ]  # fmt: skip
