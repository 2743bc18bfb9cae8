"""`kvlab claims`: the ledger, recomputed."""

from __future__ import annotations

import argparse
import json
from collections import Counter

HELP = "recompute the claims of the two texts and print the verdicts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvlab claims`."""
    parser.add_argument("--chapter", type=int, metavar="N", help="only the claims of section N")
    parser.add_argument("--json", action="store_true", help="a list of {id, verdict, recomputed, correction, ...}")


def run(args: argparse.Namespace) -> int:
    """Prints the claims and how many there are of each verdict."""
    from kvlab.book.claims.ledger import entries
    from kvlab.book.claims.show import lines

    found = entries(args.chapter)
    if args.json:
        print(json.dumps([e.to_json() for e in found], indent=1))
        return 0
    print("\n".join(lines(found)))
    counted = ", ".join(f"{n} {verdict}" for verdict, n in Counter(e.verdict for e in found).most_common())
    print(f"\n{len(found)} claims: {counted}")
    return 0
