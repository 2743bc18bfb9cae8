"""This machine as a simulated one: its rates measured, and how far the clock is from the engine's real steps.

    bandwidth     of reading memory that no cache holds
    fixed cost    of a step: a decode of one short sequence, minus its bytes over the bandwidth
    FLOP/s        operations of a prompt's step over its time, minus the fixed cost
    per sequence  what eight short sequences take beyond that

Four loads set the rates; the error is that of other loads, over every step of them.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from kvlab.engine import Engine, SamplingParams
from kvlab.lab.bandwidth import read_bandwidth
from kvlab.lab.record import provenance
from kvlab.models.load import LoadedModel, load_model
from kvlab.plan.plan import Plan, make_plan
from kvlab.schedule import Chunk
from kvlab.simulate.clock import Machine, StepClock

SEQUENCES = 8
NEW = 8
"""Tokens that each sequence of a load decodes."""
HELD_OUT = ((1, 300), (2, 700), (4, 128), (4, 500), (8, 250), (16, 60), (3, 1200))
"""(sequences, prompt tokens) of the loads that the error is taken over."""

Timed = tuple[tuple[Chunk, ...], float]
"""A step's chunks and its seconds."""


def timed_steps(model: LoadedModel, sequences: int, prompt: int, max_batched_tokens: int = 512) -> list[Timed]:
    """Every step of a load of equal requests that come together: what it computed, and its seconds."""
    engine = Engine(
        model, num_blocks=sequences * (-(-(prompt + NEW) // 16)) + sequences + 1, max_num_seqs=sequences,
        max_batched_tokens=max_batched_tokens, max_model_len=prompt + NEW,
    )  # fmt: skip
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    rng = random.Random(0)
    for _ in range(sequences):
        engine.add_request([rng.randrange(model.config.vocab_size) for _ in range(prompt)], params)
    found = []
    while engine.requests:
        alive = dict(engine.requests)
        starts = {name: request.num_computed for name, request in alive.items()}
        known = {name: len(request.tokens) for name, request in alive.items()}
        start = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - start
        step = max(e.step for e in engine.events.of("chunk"))
        counts = {e.request_id: e.tokens for e in engine.events.of("chunk") if e.step == step}
        chunks = (
            Chunk(alive[name], starts[name], count, starts[name] + count == known[name])
            for name, count in counts.items()
        )
        found.append((tuple(chunks), seconds))
    return found


def plan_of(model: LoadedModel) -> Plan:
    """The plan of a loaded model in the types it computes in."""
    return make_plan(model.hf_config, kv_dtype=model.dtype, weight_dtype=model.dtype, gpu="h100")


def measure(model: LoadedModel, bandwidth: float) -> Machine:
    """This machine's rates for `model`, from four loads; `bandwidth` in bytes per second."""
    clock = StepClock(plan_of(model), Machine(bandwidth, float("inf")))
    timed_steps(model, 1, 32)  # kernels are loaded, buffers touched
    single, prompt, batch = timed_steps(model, 1, 32), timed_steps(model, 1, 500), timed_steps(model, SEQUENCES, 32)
    overhead = max(0.0, _beyond(clock, single[1:]))
    chunks, seconds = prompt[0]
    flops = clock.work(chunks)[2] / max(seconds - overhead, 1e-9)
    full = StepClock(clock.plan, Machine(bandwidth, flops, overhead))
    # the fixed cost has one sequence in it so far
    sequence = min(overhead, max(0.0, _beyond(full, batch[1:]) / (SEQUENCES - 1)))
    source = f"this machine, measured with {model.name} in {model.dtype}"
    return Machine(bandwidth, flops, overhead - sequence, sequence_s=sequence, source=source, name="this machine")


def _beyond(clock: StepClock, steps: Sequence[Timed]) -> float:
    """Seconds that steps take beyond what the clock says, the median."""
    return statistics.median(seconds - clock.seconds(chunks) for chunks, seconds in steps)


def errors(model: LoadedModel, machine: Machine, loads: Sequence[tuple[int, int]] = HELD_OUT) -> list[dict[str, Any]]:
    """For every load: steps, and the clock's relative error on each of them."""
    clock = StepClock(plan_of(model), machine)
    rows = []
    for sequences, prompt in loads:
        steps = timed_steps(model, sequences, prompt)
        found = [clock.seconds(chunks) / seconds - 1 for chunks, seconds in steps]
        rows.append({"sequences": sequences, "prompt": prompt, "steps": len(steps), "errors": found})
    return rows


def measured(target: str | None = None) -> tuple[LoadedModel, Machine]:
    """A model, the default one unless named, and this machine's rates with it."""
    model = load_model(target, "fp32", "cpu")
    return model, measure(model, read_bandwidth(2**30))


def calibrate(target: str | None = None) -> dict[str, Any]:
    """The machine's rates, and the median error of a step's time against the engine on the default model."""
    model, machine = measured(target)
    rows = errors(model, machine)
    every = [abs(e) for row in rows for e in row["errors"]]
    return {
        "what": "the roofline clock against the engine's real steps",
        "model": model.name,
        "bandwidth_bytes_per_s": machine.bandwidth,
        "flops": machine.flops,
        "step_overhead_s": machine.overhead_s,
        "sequence_s": machine.sequence_s,
        "steps": len(every),
        "median_error": statistics.median(every),
        "p90_error": sorted(every)[int(0.9 * len(every))],
        "loads": [
            {k: v for k, v in row.items() if k != "errors"} | {"median_signed_error": statistics.median(row["errors"])}
            for row in rows
        ],
        **provenance("kvlab simulate --calibrate --json"),
    }


def print_calibration(as_json: bool) -> int:
    """Calibrates and prints; 0."""
    found = calibrate()
    if as_json:
        print(json.dumps(found, indent=1))
        return 0
    print(f"bandwidth {found['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s, {found['flops'] / 1e9:.1f} GFLOP/s")
    print(f"per step {found['step_overhead_s'] * 1e3:.2f} ms, per sequence {found['sequence_s'] * 1e3:.2f} ms")
    print(f"{found['steps']} steps of {found['model']}: median error {found['median_error']:.1%}, "
          f"nine in ten within {found['p90_error']:.1%}")  # fmt: skip
    for row in found["loads"]:
        print(f"  {row['sequences']:>2} x {row['prompt']:>4} tokens: {row['median_signed_error']:+.1%}")
    return 0
