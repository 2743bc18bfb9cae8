"""Store new rows of any part that is no pair of keys and values: a latent, an index key, a shared key-value row."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvlab.ops.dispatch import backend
from kvlab.ops.views import SegmentViews
from kvlab.ops.write_rows import reference, torch_

PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def write_rows(rows: Mapping[str, torch.Tensor], views: SegmentViews, slot_mapping: torch.Tensor) -> None:
    """Writes row t of each tensor to slot `slot_mapping[t]` of the segment of its name; changes `views` in place.

    Args:
        rows: segment name -> [T, width].
        views: the part's pages, whose entries have one head.
        slot_mapping: int64 [T], page * block_size + offset; a row with -1 writes nothing. Slots differ.

    Raises:
        ValueError: a segment in a storage format with codes of its own.
    """
    for name, tensor in rows.items():
        stored = views[name]
        if stored.dtype not in PLAIN:
            raise ValueError(
                f"kv_dtype: {name} rows are stored in fp64, fp32, bf16 or fp16, not as {str(stored.dtype)[6:]}"
            )
        run = reference if backend(tensor) == "reference" else torch_
        run.write_rows(tensor, stored, slot_mapping)
