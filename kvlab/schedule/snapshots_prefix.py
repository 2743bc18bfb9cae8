"""The prefix cache as plain data, for the step-through: which pages are findable, who goes next, the chain or the tree."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from kvlab.cache import KVCacheManager
from kvlab.cache.prefix import PrefixCache
from kvlab.cache.prefix.chain import HashChain
from kvlab.cache.prefix.links import Link
from kvlab.cache.prefix.radix import RadixTree
from kvlab.cache.prefix.runs import Node

MOST_TOKENS = 12


def prefix_picture(cache: KVCacheManager) -> dict[str, Any]:
    """Empty without a prefix cache, else:

    cached   for each pool, page -> tokens in it, of every findable page
    idle     for each pool, the findable pages that nobody holds, the next to be evicted first
    prefix   `design`, and `entries`, each {label, text, children}: links of the chain, or nodes of the tree
    """
    prefix = cache.prefix
    if prefix is None:
        return {}
    cached: list[dict[str, str]] = [{} for _ in cache.unit_pools]
    for item, history, column in prefix.index.entries():
        place = prefix.columns[column]
        size = cache.groups[place.group].block_size
        last = array("i", history[-prefix.unit * array("i").itemsize :])
        tokens = last[place.place * size :][:size]
        cached[cache.layout.pool_of(place.group)][str(item - place.base)] = spelled(tokens)
    idle: list[list[int]] = [[] for _ in cache.unit_pools]
    for group, page in prefix.cached_pages():
        idle[cache.layout.pool_of(group)].append(page)
    index = prefix.index
    entries = _tree(cache, index) if isinstance(index, RadixTree) else _chain(cache, index)
    return {"cached": cached, "idle": idle, "prefix": {"design": prefix.options.design, "entries": entries}}


def spelled(tokens: Iterable[int]) -> str:
    """Token ids as text, runs joined: "0-7, 1008"; long ones end in "..."."""
    runs: list[list[int]] = []
    for token in tokens:
        if runs and token == runs[-1][1] + 1:
            runs[-1][1] = token
        elif len(runs) == MOST_TOKENS:
            return ", ".join(_run(*run) for run in runs) + ", ..."
        else:
            runs.append([token, token])
    return ", ".join(_run(*run) for run in runs) or "none"


def _run(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _pages(cache: KVCacheManager, columns: Sequence[Sequence[int]]) -> str:
    """Pages of each group, from the index's columns."""
    prefix: PrefixCache = cache.prefix  # type: ignore[assignment]
    found = []
    for rule, group in zip(prefix.rules, cache.groups, strict=True):
        pages = [page for at in zip(*(columns[c] for c in rule.columns), strict=True) for page in at]
        name = f"{group.name} " if len(cache.groups) > 1 else ""
        found.append(f"{name}pages {', '.join(str(page or '-') for page in pages)}")
    return "; ".join(found)


def _chain(cache: KVCacheManager, index: HashChain) -> list[dict[str, Any]]:
    behind: dict[bytes, list[Link]] = {}
    for link in index.links():
        behind.setdefault(link.before, []).append(link)

    def entry(link: Link) -> dict[str, Any]:
        tokens = spelled(array("i", link.tokens))
        text = f"tokens {tokens}; {_pages(cache, [[page] for page in link.pages])}"
        return {"label": link.digest.hex()[:8], "text": text, "children": list(map(entry, behind.get(link.digest, ())))}

    return [entry(link) for link in behind.get(b"", ())]


def _tree(cache: KVCacheManager, index: RadixTree) -> list[dict[str, Any]]:
    unit = cache.prefix.unit  # type: ignore[union-attr]

    def entry(node: Node) -> dict[str, Any]:
        tokens = spelled(array("i", bytes(node.key)))
        where = f"{node.start * unit}-{(node.start + node.units) * unit - 1}"
        locked = f"; locked by {node.locks}" if node.locks else "; evictable from its end"
        text = f"tokens {tokens}; {_pages(cache, node.pages)}{locked}"
        return {"label": where, "text": text, "children": list(map(entry, node.children.values()))}

    return [entry(child) for root in index.roots.values() for child in root.children.values()]
