"""What happens when pages run out, on a command line: who gives way, what becomes of its pages, what lies below."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from kvlab.schedule.policy import ORDERS, PREEMPT, VICTIMS, SchedulingPolicy, SwapCosts

if TYPE_CHECKING:
    from kvlab.models.load import LoadedModel


def add_pressure_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of scheduling and of the tiers."""
    add = parser.add_argument_group("when pages run out").add_argument
    add("--order", choices=ORDERS, default="fcfs", help="of waiting requests (default fcfs)")
    add("--victim", choices=VICTIMS, default="last", help="who gives way (default last)")
    add("--preempt", choices=PREEMPT, default="recompute",
        help="what becomes of its pages; swap and auto, the faster of both, need --host-bytes")  # fmt: skip
    add("--link-rate", metavar="SIZE", help="what auto goes by: bytes a second to the memory below, as in 25GB, and")
    add("--flop-rate", type=float, metavar="X", help="operations a second of a prefill, as in 5e10 (default: measured)")
    add("--host-bytes", metavar="SIZE", help="host memory below the pool, as in 8GiB (default: none)")
    add("--park-dtype", metavar="F", help="preempted requests wait in this format instead, on the device: lossy")
    add("--disk-dir", metavar="DIR",
        help="saved prefixes survive a restart here; needs both sizes. Where every layer keeps everything they are found "
        "page by page; with windows, chunks or states at the lengths that were saved: the ends of requests, the last page "
        "end of prompts, where prompts part. Files are written, flushed and read in a thread of their own")  # fmt: skip
    add(
        "--disk-bytes",
        metavar="SIZE",
        help="of all page files in --disk-dir; those of other models are the first to go",
    )


def check_pressure(args: argparse.Namespace) -> None:
    """Nothing, where the arguments fit together.

    Raises:
        ValueError: a part without the rest, or a rate that is none.
    """
    needy = {
        f"--preempt {args.preempt}": args.preempt != "recompute", "--park-dtype": args.park_dtype,
        "--disk-dir": args.disk_dir, "--disk-bytes": args.disk_bytes,
    }  # fmt: skip
    if args.host_bytes is None and (found := [name for name, given in needy.items() if given]):
        raise ValueError(f"--host-bytes: is needed by {found[0]}")
    if args.park_dtype and args.preempt == "recompute":
        raise ValueError("--park-dtype: needs --preempt swap or auto, else no request waits in the memory below")
    if args.park_dtype and args.preempt == "auto" and args.link_rate is None:
        raise ValueError("--park-dtype: with --preempt auto give --link-rate, recoding pages is not measured")
    rates = [n for n in ("link_rate", "flop_rate") if getattr(args, n) is not None]
    if rates and args.preempt != "auto" and args.victim != "cheapest":
        raise ValueError(f"--{rates[0].replace('_', '-')}: is of --preempt auto and --victim cheapest")
    if args.flop_rate is not None and not 0 < args.flop_rate < float("inf"):
        raise ValueError(f"--flop-rate {args.flop_rate}: must be a positive number of operations a second")
    _link_rate(args)
    if len(rates) == 1 and args.preempt != "auto" and args.victim == "cheapest":
        raise ValueError("--victim cheapest: give both --link-rate and --flop-rate, or neither")


def tiers_of(args: argparse.Namespace) -> Any:
    """The `TierOptions` that the arguments ask for, or None.

    Raises:
        ValueError: a part without the rest, or a size that cannot be read.
    """
    if args.host_bytes is None:
        return None
    from kvlab.engine.tiers import TierOptions

    return TierOptions(args.host_bytes, args.disk_dir, args.disk_bytes, park_dtype=args.park_dtype)


def policy_of(args: argparse.Namespace, model: LoadedModel) -> SchedulingPolicy:
    """The policy that the arguments ask for. `auto` measures the rates that they do not state and says them on stderr;
    `cheapest` alone compares by stated rates only: without them it counts tokens, which gives the same order."""
    link, flops = _link_rate(args), args.flop_rate
    costs: SwapCosts | None = None
    if args.preempt == "auto" or (link and flops):
        costs = _costs(model, link, flops)
    return SchedulingPolicy(args.order, args.victim, args.preempt, costs)


def _costs(model: LoadedModel, link: float | None, flops: float | None) -> SwapCosts:
    from kvlab.engine.tiers import swap_costs

    if link and flops:
        return swap_costs(model, link, flops)
    from kvlab.lab.swap_rates import measure_swap_rates

    found = measure_swap_rates(model)
    link, flops = link or found.link_bytes_per_s, flops or found.flops
    print(f"kvlab: preempted requests are swapped at {link / 1e9:.3g} GB/s or computed again at {flops / 1e9:.3g} "
          "GFLOP/s, whichever is faster", file=sys.stderr)  # fmt: skip
    return swap_costs(model, link, flops, found.latency_s)


def _link_rate(args: argparse.Namespace) -> int | None:
    if args.link_rate is None:
        return None
    from kvlab.specs.units import parse_bytes

    return parse_bytes(args.link_rate, "--link-rate")
