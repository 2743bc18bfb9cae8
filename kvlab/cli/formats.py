"""kvlab formats: what every storage format of the cache costs, nominal and real, and what it loses."""

from __future__ import annotations

import argparse
import json

HELP = "storage formats of the cache: nominal and real bits, error on real keys and values and on planted outliers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("formats", nargs="*", help="formats to show (default: all)")
    parser.add_argument("--model", help="a model the engine runs (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints the table."""
    from kvlab.specs.formats import get_format

    for name in args.formats:
        get_format(name)
    from kvlab.lab.format_report import as_dicts, report
    from kvlab.models.load import load_model
    from kvlab.ops.attention.coverage import CLOSED, LATENT, latent_fallback

    model = load_model(args.model)
    rows = report(model, args.formats)
    if args.json:
        print(json.dumps({"model": model.name, "source": model.source, "formats": as_dicts(rows)}, indent=1))
        return 0
    print(f"{model.name}, keys and values of a short text; errors relative to the rows' own size (root mean square).")
    print("bits per value: of a code, with scales, with the padding of a page of 32 tokens\n")
    head = f"{'format':<16} {'code':>4} {'scales':>7} {'page':>7} {'keys':>8} {'values':>8} {'outliers':>8}"
    print(f"{head}  {'on the CPU':<10}  on a GPU")
    for r in rows:
        error = " ".join(f"{x:>8.2%}" for x in (r.key, r.value, r.outlier))
        gpu = "gathered" if r.gpu else "in place, prefill gathered" if r.name in CLOSED else "in place"
        read = f"{r.cpu:<10}  {gpu}"
        print(f"{r.name:<16} {r.bits:>4} {r.row_bits:>7.2f} {r.page_bits:>7.2f} {error}  {read}")
    print("\noutliers: error of the other values where one channel is 30 times as large")
    print("on the CPU, on a GPU: a kernel reads the pages in place, or torch gathers and decodes them in each step")
    print(f"latents (MLA): a GPU kernel reads {', '.join(LATENT)} in place; of other formats {latent_fallback('int8')}")
    for r in rows:
        print(f"  {r.name:<16} {r.note}" + (f"; gathered on a GPU: {r.gpu}" if r.gpu else ""))
    return 0
