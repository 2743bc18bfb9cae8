"""Trains, scores and records: python -m kvlab.lab.mqar --out book/results/mqar.json"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from kvlab.lab.mqar.models import KINDS
from kvlab.lab.mqar.record import SEEDS, record
from kvlab.lab.mqar.train import Settings


def main() -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m kvlab.lab.mqar", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the record; a call goes on from what it holds")
    parser.add_argument("--only", nargs="+", default=[], choices=[*KINDS], metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=Settings.steps)
    args = parser.parse_args()
    torch.set_num_threads(1)
    record(args.out, Settings(steps=args.steps), args.only, args.seeds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
