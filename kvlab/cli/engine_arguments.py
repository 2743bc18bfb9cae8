"""The engine's options on a command line, the same for every command that runs it."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlab.cache.prefix import DESIGNS, EVICTIONS, PrefixOptions
from kvlab.cli.pressure_arguments import add_pressure_arguments, check_pressure, policy_of, tiers_of
from kvlab.cli.speculation_arguments import add_speculation_arguments, check_speculation, speculation_of


def add_engine_arguments(parser: argparse.ArgumentParser, prefix: str = "off") -> None:
    """Adds the options of model and engine, `--model`, `--dtype` and `--device` included.

    Args:
        prefix: default of `--prefix`.
    """
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
    add_pressure_arguments(parser)
    _add_prefix_arguments(parser, prefix)
    add_speculation_arguments(parser)


def _add_prefix_arguments(parser: argparse.ArgumentParser, default: str) -> None:
    add = parser.add_argument_group("prefix cache").add_argument
    add("--prefix", default=default, choices=(*DESIGNS, "off"), help=f"its design, or off (default {default})")
    add("--prefix-eviction", choices=EVICTIONS, help="which page nobody holds goes first (default lru)")
    add("--prefix-ttl", type=float, metavar="S", help="of ttl: seconds that an unused page stays (default 60)")


def engine_changes(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `EngineOptions` that the arguments set, those left out that need the model: see `make_engine`.

    Raises:
        ValueError: a size or length that cannot be read, options that do not go together.
    """
    from kvlab.specs.units import parse_bytes, parse_tokens

    check_pressure(args)
    check_speculation(args)
    return {
        "kv_dtype": args.kv_dtype,
        "num_blocks": args.num_blocks,
        "kv_bytes": None if args.kv_bytes is None else parse_bytes(args.kv_bytes, "--kv-bytes"),
        "max_model_len": None if args.max_model_len is None else parse_tokens(args.max_model_len, "--max-model-len"),
        "max_num_seqs": args.max_num_seqs,
        "max_batched_tokens": args.max_batched_tokens,
        "prefix": _prefix(args),
        "tiers": tiers_of(args),
    }


def _prefix(args: argparse.Namespace) -> PrefixOptions | None:
    if args.prefix_ttl is not None and args.prefix_eviction != "ttl":
        raise ValueError("--prefix-ttl: is of --prefix-eviction ttl")
    if args.prefix == "off":
        if args.prefix_eviction is not None:
            raise ValueError("--prefix-eviction: needs a prefix cache, --prefix hash or radix")
        return None
    ttl = {} if args.prefix_ttl is None else {"ttl": args.prefix_ttl}
    return PrefixOptions(args.prefix, args.prefix_eviction or "lru", **ttl)


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
        _tell_of_compiling(model.device)
        size = args.block_size
        if size is None:
            size = default_block_size(kv_formats(model, args.kv_dtype)[1])
        of_model = {"scheduling": policy_of(args, model), "speculation": speculation_of(args, model)}
        return Engine(model, block_size=size, **changes, **of_model)


def _tell_of_compiling(device: Any) -> None:
    """A line on stderr when no CPU kernel is compiled yet: the first step is silent for a minute or two."""
    from kvlab.ops import numba_support

    used = device.type == "cpu" and numba_support.available() and (os.environ.get("KVLAB_OPS") or "cpu") == "cpu"
    if used and not any(Path(numba_support.cache_dir()).rglob("*.nbi")):
        print("kvlab: the CPU kernels are compiled now, once: a minute or two", file=sys.stderr)
