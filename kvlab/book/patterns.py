"""Sparse patterns as masks: which stored tokens each query reads, and what that comes to in tokens, pages and bytes.

A mask is bool [T, T], row t for the query at position t. All are causal. Resident bytes are those of every token:
none of these patterns knows beforehand what a later query will read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlab.book.plots import PALETTE, SYMBOLS, TEXT, new_figure
from kvlab.specs.pages import cdiv


def _causal(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """(query positions [T, 1], key positions [1, T], causal mask [T, T])."""
    q, k = torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]
    return q, k, k <= q


def longformer(tokens: int, window: int, sinks: int) -> Tensor:
    """The last `window` tokens, and the first `sinks`, which are global. Source: arXiv:2004.05150, made causal."""
    q, k, causal = _causal(tokens)
    return causal & ((q - k < window) | (k < sinks))


def bigbird(tokens: int, window: int, sinks: int, drawn: int, seed: int = 0) -> Tensor:
    """`longformer`, and `drawn` random earlier tokens for each query. Source: arXiv:2007.14062, made causal."""
    _, _, causal = _causal(tokens)
    scores = torch.rand(tokens, tokens, generator=torch.Generator().manual_seed(seed)).masked_fill(~causal, -1)
    chosen = torch.zeros_like(causal).scatter(1, scores.topk(min(drawn, tokens), dim=1).indices, True)
    return longformer(tokens, window, sinks) | (chosen & causal)


def lsh(vectors: Tensor, buckets: int, seed: int = 0) -> Tensor:
    """Tokens whose vectors [T, D] fall into the query's bucket. Source: Reformer, arXiv:2001.04451, one round of hashing.

    Raises:
        ValueError: an odd number of buckets: half are the directions of a random projection, half their opposites.
    """
    if buckets % 2:
        raise ValueError(f"buckets {buckets}: must be even")
    turned = vectors @ torch.randn(
        vectors.shape[1], buckets // 2, generator=torch.Generator().manual_seed(seed), dtype=vectors.dtype
    )
    bucket = torch.cat((turned, -turned), dim=1).argmax(1)
    return _causal(len(vectors))[2] & (bucket[:, None] == bucket[None, :])


def nsa(query: Tensor, key: Tensor, block: int, top: int, window: int) -> Tensor:
    """The `top` best blocks by the score of their mean key, and the last `window` tokens.

    The branch that reads the means themselves is counted by `Reads`. Source: arXiv:2502.11089, with means for its
    learned compression.
    """
    tokens = len(key)
    q, k, causal = _causal(tokens)
    means = torch.stack([key[i : i + block].mean(0) for i in range(0, tokens, block)])
    complete = (torch.arange(len(means)) + 1) * block <= q + 1  # [T, blocks]
    best = (query @ means.T).masked_fill(~complete, float("-inf"))
    order = best.topk(min(top, len(means)), dim=1)
    chosen = torch.zeros_like(complete).scatter(1, order.indices, order.values > float("-inf"))
    return causal & ((q - k < window) | chosen.repeat_interleave(block, dim=1)[:, :tokens])


@dataclass(frozen=True)
class Reads:
    """What the last query of a mask reads.

    Attributes:
        tokens: entries it attends to. pages: pages that hold at least one of them.
        read_bytes: of these entries. page_bytes: of these pages, whole. resident_bytes: of all entries.
    """

    tokens: int
    pages: int
    read_bytes: int
    page_bytes: int
    resident_bytes: int


def last_reads(mask: Tensor, block_size: int, entry_bytes: int, extra: int = 0) -> Reads:
    """Counts of the last row of `mask`, entries of `entry_bytes` in pages of `block_size` tokens.

    Args:
        extra: entries that are stored and read besides, such as the means of NSA's blocks.
    """
    row = mask[-1].nonzero().flatten()
    pages = len(set((row // block_size).tolist()))
    held = (len(mask) + extra) * entry_bytes
    page_bytes = (pages + cdiv(extra, block_size)) * block_size * entry_bytes
    return Reads(len(row) + extra, pages, (len(row) + extra) * entry_bytes, page_bytes, held)


def patterns_figure(masks: dict[str, Tensor]) -> Any:
    """One panel per mask, a mark for each query-key pair that is read."""
    fig = new_figure(x="key position", y="query position", height=250 * cdiv(len(masks), 2))
    blank = fig.layout.xaxis.to_plotly_json() | {"showticklabels": False, "ticks": "", "showgrid": False}
    rows = cdiv(len(masks), 2)
    for i, (name, mask) in enumerate(masks.items()):
        pairs, suffix = mask.nonzero().tolist(), str(i + 1) if i else ""
        left, bottom = (i % 2) / 2, 1 - (i // 2 + 1) / rows
        fig.add_scatter(
            x=[k for _, k in pairs], y=[q for q, _ in pairs], mode="markers", name=name, xaxis=f"x{suffix}",
            yaxis=f"y{suffix}", marker={"symbol": SYMBOLS[1], "size": 4, "color": PALETTE[i % len(PALETTE)]},
        )  # fmt: skip
        edge = [-1, len(mask)]
        fig.layout[f"xaxis{suffix}"] = blank | {
            "domain": [left + 0.02, left + 0.48], "range": edge, "anchor": f"y{suffix}",
            "title": {"text": f"{name}: {len(pairs):,} pairs", "font": {"size": 13}},
        }  # fmt: skip
        fig.layout[f"yaxis{suffix}"] = blank | {
            "domain": [bottom + 0.12 / rows, bottom + 0.97 / rows], "range": edge[::-1], "anchor": f"x{suffix}",
            "title": {"text": "query" if i % 2 == 0 else ""},
        }  # fmt: skip
    fig.update_layout(margin={"l": 30, "r": 10, "t": 10, "b": 30}, font={"color": TEXT})
    return fig
