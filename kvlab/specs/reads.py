"""What a decode step reads of a sequence's cache, and what the sequence keeps: not the same for sparse attention.

A layer with an indexer scores every index key and then reads the best few entries; a window reads what it keeps; one
that compresses reads its entries, all of them or the best few. Open buffers are read when they fill, one entry's worth
of inputs per `ratio` tokens; here they count as read, since a step that closes a window reads all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.specs.model import ModelSpec
from kvlab.specs.parts import CacheSpec


@dataclass(frozen=True)
class DecodeReads:
    """Bytes for one sequence, without page rounding.

    Attributes:
        read: of its cache that a decode step reads, the new token's own entries included. resident: that it keeps.
    """

    read: int
    resident: int


def decode_reads(model: ModelSpec, tokens: int, top_k: int | None = None) -> DecodeReads:
    """The bytes of a step whose new token is number `tokens`, over all layers.

    Args:
        top_k: entries that an indexer keeps for each token (`index_topk`); needed where a layer has index keys.

    Raises:
        ValueError: tokens not positive, or a layer with index keys and no `top_k`.
    """
    if tokens < 1:
        raise ValueError(f"tokens {tokens}: must be positive")
    chosen = None  # a layer without index keys and with latents reads the choice of the last one that has some
    read = resident = 0
    for layer in model.layers:
        if any(part.kind == "index" for part in layer.parts):
            if top_k is None or top_k < 1:
                raise ValueError(f"top_k {top_k}: layer {layer.index} has an indexer, it must be positive")
            chosen = top_k
        sparse = _chosen_part(layer.parts)
        for part in layer.parts:
            limit = chosen if part is sparse else None
            read += _entries(part, tokens, limit) * part.entry_bytes + part.fixed_bytes
            resident += part.retained(tokens) * part.entry_bytes + part.fixed_bytes
    return DecodeReads(read, resident)


def _chosen_part(parts: tuple[CacheSpec, ...]) -> CacheSpec | None:
    """The part that an indexer's choice applies to: entries of the same stride as the index keys, or latents."""
    ratios = {part.retention for part in parts if part.kind == "index"}
    for part in parts:
        if part.kind in ("mla", "compressed") and (part.retention in ratios if ratios else part.kind == "mla"):
            return part
    return None


def _entries(part: CacheSpec, tokens: int, limit: int | None) -> int:
    kept = part.retained(tokens)
    return kept if limit is None else min(kept, limit)
