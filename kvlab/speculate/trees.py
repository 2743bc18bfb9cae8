"""Drafts as trees: growing them, which models can take them, and closing the gaps once a path is verified."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import torch

from kvlab.cache import KVCacheManager
from kvlab.speculate.draft import ROOT, Draft

PLAIN_FORMATS = ("fp64", "fp32", "bf16", "fp16")


def check_branches(engine: Any) -> None:
    """Refuses trees where some part of the model cannot branch.

    Raises:
        ValueError: names the part: anything but full attention, or pages of codes.
    """
    for layer, part in engine.spec.parts():
        if part.kind == "shared":
            continue  # it owns nothing, and whose entries it reads is another part of the model
        plain = part.kind == "full" and part.format.name in PLAIN_FORMATS
        what = "" if plain else part.format.name if part.kind == "full" else part.kind
        if what:
            raise ValueError(
                f"branches: layer {layer} of {engine.model.name!r} keeps {what!r}; only full attention over pages in "
                f"{', '.join(PLAIN_FORMATS)} takes trees of drafts, the others take chains"
            )


def can_branch(engine: Any) -> bool:
    """Whether every part of the engine's model takes trees of drafts."""
    try:
        check_branches(engine)
    except ValueError:
        return False
    return True


def product_tree(levels: Sequence[Sequence[tuple[int, float]]], count: int) -> Draft:
    """The `count` likeliest nodes of the tree whose nodes at each depth all have the same children.

    Args:
        levels: for each depth (token, log probability) of its children, likeliest first.
    """
    tokens: list[int] = []
    parents: list[int] = []
    # (cost of the path, order, depth, index among the children, parent): a parent is always taken before its children
    heap = [(-levels[0][0][1], 0, 0, 0, ROOT)] if levels and levels[0] else []
    order = 0
    while heap and len(tokens) < count:
        cost, _, depth, child, parent = heapq.heappop(heap)
        token, own = levels[depth][child]
        if child + 1 < len(levels[depth]):
            order += 1
            heapq.heappush(heap, (cost + own - levels[depth][child + 1][1], order, depth, child + 1, parent))
        if depth + 1 < len(levels):
            order += 1
            heapq.heappush(heap, (cost - levels[depth + 1][0][1], order, depth + 1, 0, len(tokens)))
        tokens.append(token)
        parents.append(parent)
    return Draft(tuple(tokens), tuple(parents))


def best_nodes(tokens: Sequence[int], parents: Sequence[int], scores: Sequence[float], count: int) -> Draft:
    """The `count` likeliest of a tree's nodes, likeliest first.

    Args:
        scores: log probability of the path to each node: no child has more than its parent.
    """
    chosen = sorted(range(len(tokens)), key=lambda i: (-scores[i], i))[:count]
    place = {node: i for i, node in enumerate(chosen)} | {ROOT: ROOT}
    return Draft(tuple(tokens[i] for i in chosen), tuple(place[parents[i]] for i in chosen))


class GrowingTree:
    """A draft tree that grows level by level, the likeliest nodes of each level first.

    Attributes:
        tokens, parents, scores: of each node; scores are log probabilities of the path to it.
        frontier: the nodes that the next level's are children of.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []
        self.frontier = [ROOT]
        # of each node that was in a frontier, how many were before it
        self._place: dict[int, int] = {}
        self._level = 0

    def widen(self, best: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Gives each node of the frontier its children, (token, log probability) each."""
        self._level = len(self.tokens)
        for node, children in zip(self.frontier, best, strict=True):
            above = 0.0 if node == ROOT else self.scores[node]
            for token, score in children:
                self.tokens.append(token)
                self.parents.append(node)
                self.scores.append(above + score)

    def deepen(self, width: int) -> list[tuple[int, int]]:
        """(node, its parent's place among all that were in a frontier, or `ROOT`) of the new frontier: the `width`
        likeliest nodes of the last level."""
        level = range(self._level, len(self.tokens))
        self.frontier = sorted(level, key=lambda node: -self.scores[node])[:width]
        for node in self.frontier:
            self._place[node] = len(self._place)
        return [(node, self._place.get(self.parents[node], ROOT)) for node in self.frontier]


def compact(
    cache: KVCacheManager, views: Sequence[Sequence[Any]], request_id: str, known: int, path: list[int]
) -> None:
    """Moves the entries of verified drafts to consecutive slots behind the request's `known` tokens.

    Args:
        views: of the cache, [layer][part].
        path: which drafts were right, by their place among the drafts.
    """
    if path == list(range(len(path))):
        return
    for parts in views:
        for view in parts:
            if view is None:
                continue
            slots = torch.tensor(cache.slot_mapping(request_id, known, known + path[-1] + 1, view.group or 0))
            source, target = slots[path].to(view.k.device), slots[: len(path)].to(view.k.device)
            size = view.block_size
            for codes in (view.k, view.v):
                codes[target // size, :, target % size] = codes[source // size, :, source % size]
