"""How tokens are drafted, on a command line: a method, its K, and what the method needs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlab.models.load import LoadedModel
    from kvlab.speculate import SpeculationOptions

METHODS = ("ngram", "lookahead", "draft", "medusa", "eagle")
TREES = ("medusa", "eagle")
MOST = 64
"""Drafts a step: far above what is ever right, and buffers grow with it."""

FIELDS = {
    "adapt_k": ("--adapt-k", METHODS), "draft_model": ("--draft-model", ("draft",)),
    "draft_layers": ("--draft-layers", ("draft",)), "heads": ("--heads", TREES), "draft_tree": ("--draft-tree", TREES),
}  # fmt: skip
"""Which methods each further option is of."""


def add_speculation_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--speculate` and what belongs to it."""
    group = parser.add_argument_group("speculation")
    add = group.add_argument
    add("--speculate", metavar="METHOD[:K]",
        help="draft K tokens a step (default 4, or the whole tree) by ngram, lookahead, draft, medusa or eagle")  # fmt: skip
    add("--adapt-k", action="store_true", help="K is the most; fewer where drafts turn out wrong")
    add("--draft-model", metavar="MODEL", help="of draft: a smaller model of the same vocabulary")
    add("--draft-layers", type=int, metavar="N", help="of draft: N layers of the model itself")
    add("--heads", metavar="FILE", help="of medusa, eagle: trained heads (default: those of the default model)")
    add("--draft-tree", metavar="N,N,...", help="of medusa, eagle: children by depth, as in 3,2,1; of "
        "them the K likeliest are drafted (default: a chain)")  # fmt: skip


def check_speculation(args: argparse.Namespace) -> None:
    """Nothing, where the arguments fit together; a model's part is checked by `speculation_of`.

    Raises:
        ValueError: an unknown method, a K out of its range, an option without its method, a method without its draft.
    """
    method, _ = _method(args)
    for name, (option, methods) in FIELDS.items():
        value = getattr(args, name)
        if value is not None and value is not False and method not in methods:
            raise ValueError(f"{option}: is of --speculate {' or '.join(methods)}")
    if method == "draft" and (args.draft_model is None) == (args.draft_layers is None):
        raise ValueError("--speculate draft: needs one of --draft-model and --draft-layers")
    _branches(args.draft_tree)


def speculation_of(args: argparse.Namespace, model: LoadedModel) -> SpeculationOptions | None:
    """The options that the arguments ask for, with the model that drafts read or cut out of `model`.

    Raises:
        ValueError, OSError: a model that cannot be read, or a number of layers that it has not.
    """
    method, k = _method(args)
    if not method:
        return None
    from kvlab.speculate import SpeculationOptions

    branches = _branches(args.draft_tree)
    draft = _draft(args, model) if method == "draft" else None
    return SpeculationOptions(method, k, args.adapt_k, draft=draft, heads=args.heads, branches=branches)


def _draft(args: argparse.Namespace, model: LoadedModel) -> LoadedModel:
    if args.draft_layers is not None:
        from kvlab.speculate.skip import skip_layers, spread

        return skip_layers(model, spread(len(model.spec.layers), args.draft_layers))
    from kvlab.models.load import load_model

    return load_model(args.draft_model, args.dtype, args.device)


def _method(args: argparse.Namespace) -> tuple[str, int]:
    """(method, K); ("", 0) without speculation."""
    if args.speculate is None:
        return "", 0
    method, colon, count = args.speculate.partition(":")
    if method not in METHODS:
        raise ValueError(f"--speculate {args.speculate!r}: must begin with one of {', '.join(METHODS)}")
    k = int(count) if count.isascii() and count.isdigit() else 0 if colon else _nodes(_branches(args.draft_tree)) or 4
    if not 1 <= k <= MOST:
        raise ValueError(f"--speculate {args.speculate!r}: K must be from 1 to {MOST}")
    return method, k


def _branches(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= MOST for part in parts):
        raise ValueError(f"--draft-tree {text!r}: must be whole numbers from 1 to {MOST}, as in 3,2,1")
    found = tuple(map(int, parts))
    if found[0] * len(found) > MOST:
        raise ValueError(f"--draft-tree {text!r}: the first level times the levels must be at most {MOST}")
    return found


def _nodes(branches: tuple[int, ...]) -> int:
    """Drafts of a whole tree, as far as a step takes them; 0 of none."""
    nodes, level = 0, 1
    for children in branches:
        level = min(MOST, level * children)
        nodes += level
    return min(MOST, nodes)
