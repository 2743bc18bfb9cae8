"""`kvlab simulate`: a trace of requests on hardware that is not here."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvlab.cli.load_report import TRACE, add_load_arguments, load_of, print_summary
from kvlab.specs.units import human_bytes

if TYPE_CHECKING:
    from kvlab.plan.plan import Plan
    from kvlab.simulate.clock import Machine
    from kvlab.simulate.options import SimulateOptions

DEFAULT_MODEL = "llama-3.1-8b"
HELP = "run a trace of requests through the scheduler and cache of hardware you do not have"

EPILOG = (
    TRACE
    + """\
A step takes the longer of its bytes over the bandwidth and its operations over the arithmetic rate: a lower bound."""
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvlab simulate`; those of a plan are checked by `kvlab.plan.options`."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("trace", nargs="?", metavar="TRACE", help="file or recipe")
    add("--model", help=f"as in `kvlab plan` (default {DEFAULT_MODEL}; with --calibrate the one it measures with)")
    add("--gpu", metavar="NAME", help="h100 (default), h200, b200, a100, l40s, ...")
    add("--tp", metavar="N", help="GPUs that split every layer (default 1)")
    add("--kv-dtype", metavar="F", help="of the cache (default bf16)")
    add("--weight-dtype", metavar="F", help="of the weights (default bf16)")
    add("--block-size", metavar="N", help="tokens of a page (default 64)")
    add("--gpu-util", metavar="X", help="fraction of the GPU's memory to use (default 0.9)")
    add("--reserve", metavar="BYTES", help="per GPU for activations and the runtime (default 2GiB)")
    add("--prefix", choices=("hash", "radix", "off"), help="design of the prefix cache (default hash)")
    add("--pools", choices=("unified", "sectors"), help="how layers of several kinds share memory (default unified)")
    add("--num-blocks", type=int, metavar="N", help="pages of the pool (default: what the weights leave)")
    add("--kv-bytes", metavar="SIZE", help="bytes of the pool instead, as in 2GiB")
    add("--max-num-seqs", type=int, metavar="N", help="requests that run at once (default 256)")
    add("--max-batched-tokens", metavar="N", help="tokens of one step (default 8k)")
    add("--max-model-len", metavar="N", help="prompt and output of a request (default: the model's)")
    add("--step-overhead-ms", type=float, metavar="X", help="fixed cost of every step (default 0)")
    add("--calibrate", action="store_true",
        help="measure this machine: with TRACE it is simulated, without its rates and the clock's error are told")  # fmt: skip
    add("--json", action="store_true", help="everything as JSON, times in seconds")
    add_load_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0 after the result is printed.

    Raises:
        ValueError, OSError: what cannot be read, sized or run.
    """
    if args.trace is None:
        if not args.calibrate:
            raise ValueError("TRACE: give a file or a recipe, or --calibrate")
        from kvlab.lab.calibrate import print_calibration

        return print_calibration(args.json)
    from kvlab.simulate import Simulator

    began = time.perf_counter()
    trace, objective = load_of(args)
    plan, own, machine = _measured(args) if args.calibrate else _vendors(args)
    simulator = Simulator(trace, plan, replace(own, objective=objective), machine)
    result = simulator.run(_bar).to_json() | {"wall_seconds": round(time.perf_counter() - began, 3)}
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if args.json:
        print(json.dumps(result, indent=1, allow_nan=False))
    else:
        print_summary(result)
    return 0


def _vendors(args: argparse.Namespace) -> tuple[Plan, SimulateOptions, Machine]:
    """The plan, the options of the scheduler, and the GPU at its vendor's rates."""
    from kvlab.simulate.clock import machine_of
    from kvlab.simulate.simulator import simulated_plan

    overhead = 0.0 if args.step_overhead_ms is None else args.step_overhead_ms
    if not 0 <= overhead < float("inf"):
        raise ValueError(f"--step-overhead-ms {overhead}: must be a number of at least 0")
    own, of_plan = _options(args)
    plan = simulated_plan(args.model or DEFAULT_MODEL, own, of_plan)
    if own.kv_bytes is not None and own.kv_bytes > plan.memory.free_bytes:
        free = max(0, plan.memory.free_bytes)
        raise ValueError(f"--kv-bytes {args.kv_bytes}: the weights leave {human_bytes(free)} of each GPU for a cache")
    return plan, own, replace(machine_of(plan), overhead_s=overhead / 1e3)


def _measured(args: argparse.Namespace) -> tuple[Plan, SimulateOptions, Machine]:
    """The same for this machine at the rates that it shows, with the model that they were measured with unless another
    is named; types and pool are those that the engine would take here."""
    of_a_gpu = ("gpu", "tp", "gpu_util", "reserve", "step_overhead_ms")
    if given := [name for name in of_a_gpu if getattr(args, name) is not None]:
        raise ValueError(f"--{given[0].replace('_', '-')}: is not taken with --calibrate, which measures this machine")
    own, of_plan = _options(args)
    from kvlab.engine.sizing import default_kv_bytes, total_memory
    from kvlab.lab.calibrate import measured
    from kvlab.simulate.simulator import simulated_plan

    model, machine = measured()
    if own.num_blocks is own.kv_bytes is None:
        own = replace(own, kv_bytes=default_kv_bytes(model.device))
    types = {"kv_dtype": model.dtype, "weight_dtype": model.dtype}
    plan = simulated_plan(args.model or model.hf_config, own, types | of_plan)
    needed, there = (plan.weights_bytes or 0) + (own.kv_bytes or 0), total_memory(model.device)
    if needed > there:
        raise ValueError(
            f"--model {plan.model.name}: weights and pool take {human_bytes(needed)}, this machine has {human_bytes(there)}"
        )
    return plan, own, machine


def _options(args: argparse.Namespace) -> tuple[SimulateOptions, dict[str, Any]]:
    from kvlab.simulate.options import simulate_options

    names = ("gpu", "tp", "kv_dtype", "weight_dtype", "block_size", "gpu_util", "reserve", "prefix", "pools",
             "num_blocks", "kv_bytes", "max_num_seqs", "max_batched_tokens", "max_model_len")  # fmt: skip
    return simulate_options({name: getattr(args, name) for name in names})


def _bar(done: int, total: int, now: float) -> bool:
    """Progress on a terminal's stderr; never stops the run (Ctrl-C does)."""
    if sys.stderr.isatty():
        print(f"\r{done} of {total} requests, {now:.0f} s simulated", end="", file=sys.stderr, flush=True)
    return False
