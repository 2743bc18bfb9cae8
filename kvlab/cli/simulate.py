"""`kvlab simulate`: a trace of requests on hardware that is not here."""

from __future__ import annotations

import argparse
import json
import sys

from kvlab.cli.load_report import TRACE, add_load_arguments, load_of, print_summary

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
    add("--model", default="llama-3.1-8b", help="as in `kvlab plan` (default llama-3.1-8b)")
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
    add("--max-num-seqs", type=int, metavar="N", help="requests that run at once (default 256)")
    add("--max-batched-tokens", metavar="N", help="tokens of one step (default 8k)")
    add("--max-model-len", metavar="N", help="prompt and output of a request (default: the model's)")
    add("--step-overhead-ms", type=float, default=0.0, metavar="X", help="fixed cost of every step (default 0)")
    add("--calibrate", action="store_true", help="measure this machine, and the error of its clock, instead")
    add("--json", action="store_true", help="everything as JSON, times in seconds")
    add_load_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0 after the result is printed.

    Raises:
        ValueError, OSError: what cannot be read, sized or run.
    """
    if args.calibrate:
        from kvlab.lab.calibrate import print_calibration

        return print_calibration(args.json)
    if args.trace is None:
        raise ValueError("TRACE: give a file or a recipe, or --calibrate")
    from dataclasses import replace

    from kvlab.simulate import Simulator
    from kvlab.simulate.clock import machine_of
    from kvlab.simulate.options import simulate_options
    from kvlab.simulate.simulator import simulated_plan

    if not 0 <= args.step_overhead_ms < float("inf"):
        raise ValueError(f"--step-overhead-ms {args.step_overhead_ms}: must be a number of at least 0")
    trace, objective = load_of(args)
    names = ("gpu", "tp", "kv_dtype", "weight_dtype", "block_size", "gpu_util", "reserve", "prefix", "pools",
             "num_blocks", "max_num_seqs", "max_batched_tokens", "max_model_len")  # fmt: skip
    own, of_plan = simulate_options({name: getattr(args, name) for name in names})
    plan = simulated_plan(args.model, own, of_plan)
    machine = replace(machine_of(plan), overhead_s=args.step_overhead_ms / 1e3)
    result = Simulator(trace, plan, replace(own, objective=objective), machine).run(_bar).to_json()
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if args.json:
        print(json.dumps(result, indent=1, allow_nan=False))
    else:
        print_summary(result)
    return 0


def _bar(done: int, total: int, now: float) -> bool:
    """Progress on a terminal's stderr; never stops the run (Ctrl-C does)."""
    if sys.stderr.isatty():
        print(f"\r{done} of {total} requests, {now:.0f} s simulated", end="", file=sys.stderr, flush=True)
    return False
