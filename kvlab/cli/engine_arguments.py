"""The engine's options on a command line, the same for every command that runs it."""

from __future__ import annotations

import argparse
import contextlib
import gc
from collections.abc import Iterator
from typing import Any

from kvlab.schedule.policy import ORDERS, VICTIMS, SchedulingPolicy


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of model and engine, `--model`, `--dtype` and `--device` included."""
    parser.add_argument("--model", help="directory, .gguf file or hub id (default: SmolLM2-135M-Instruct)")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--dtype", default="fp32", help="of weights and activations: fp32 (default), bf16, fp16, fp64")
    engine.add_argument("--kv-dtype", help="of the cache: a format of `kvlab formats`, or a "
                        "rule such as int4,first=2:bf16 (default: as --dtype)")  # fmt: skip
    engine.add_argument("--device", default="auto", help='"auto" (default), "cpu", "cuda", "cuda:N"')
    engine.add_argument("--block-size", type=int, metavar="N",
                        help="tokens per page (default 16, or the next that the model or the format needs)")  # fmt: skip
    engine.add_argument("--num-blocks", type=int, metavar="N", help="pages of the pool, the null page included")
    engine.add_argument("--kv-bytes", metavar="SIZE", help="bytes of the pool, as in 2GiB (default: from free memory)")
    engine.add_argument("--max-model-len", metavar="N", help="prompt and output, as in 4k (default: the model's)")
    engine.add_argument("--max-num-seqs", type=int, default=32, metavar="N", help="requests that run at once")
    engine.add_argument("--max-batched-tokens", type=int, default=2048, metavar="N", help="tokens of one step")
    pressure = parser.add_argument_group("when pages run out")
    pressure.add_argument("--order", choices=ORDERS, default="fcfs", help="of waiting requests (default fcfs)")
    pressure.add_argument("--victim", choices=VICTIMS, default="last", help="who gives way (default last)")
    pressure.add_argument("--preempt", choices=("recompute", "swap"), default="recompute",
                          help="what becomes of its pages; swap needs --host-bytes")  # fmt: skip
    pressure.add_argument("--host-bytes", metavar="SIZE", help="host memory below the pool, as in 8GiB (default: none)")
    pressure.add_argument("--disk-dir", metavar="DIR", help="saved prefixes survive here; needs both sizes")
    pressure.add_argument("--disk-bytes", metavar="SIZE", help="of the files in --disk-dir")


def engine_changes(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `EngineOptions` that the arguments set.

    Raises:
        ValueError: a size or length that cannot be read.
    """
    from kvlab.specs.units import parse_bytes, parse_tokens

    return {
        "kv_dtype": args.kv_dtype,
        "num_blocks": args.num_blocks,
        "kv_bytes": None if args.kv_bytes is None else parse_bytes(args.kv_bytes, "--kv-bytes"),
        "max_model_len": None if args.max_model_len is None else parse_tokens(args.max_model_len, "--max-model-len"),
        "max_num_seqs": args.max_num_seqs,
        "max_batched_tokens": args.max_batched_tokens,
        "scheduling": SchedulingPolicy(args.order, args.victim, args.preempt),
        "tiers": _tiers(args),
    }


@contextlib.contextmanager
def objects_that_stay() -> Iterator[None]:
    """What is made inside, modules and kernels above all, lives as long as the process: the garbage collector does not
    walk it, now or later (a fifth of the time that importing torch takes, and most of what ending the process takes)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def make_engine(args: argparse.Namespace, changes: dict[str, Any]) -> Any:
    """The engine of the model that the arguments name, with these options.

    Raises:
        ValueError, OSError: the model or an option does not allow it.
    """
    with objects_that_stay():
        from kvlab.engine import Engine
        from kvlab.engine.kv_formats import kv_formats
        from kvlab.models.load import load_model
        from kvlab.plan.policies import default_block_size

        model = load_model(args.model, args.dtype, args.device)
        size = args.block_size
        if size is None:
            size = default_block_size(kv_formats(model, args.kv_dtype)[1])
        return Engine(model, block_size=size, **changes)


def _tiers(args: argparse.Namespace) -> Any:
    """The `TierOptions` that the arguments ask for, or None.

    Raises:
        ValueError: a part without the rest, or a size that cannot be read.
    """
    if args.host_bytes is None:
        if args.preempt == "swap" or args.disk_dir or args.disk_bytes:
            raise ValueError("--host-bytes: is needed by --preempt swap, --disk-dir and --disk-bytes")
        return None
    from kvlab.engine.tiers import TierOptions

    return TierOptions(args.host_bytes, args.disk_dir, args.disk_bytes)
