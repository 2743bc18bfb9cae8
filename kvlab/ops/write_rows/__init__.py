"""Store new rows of any part that is no pair of keys and values: a latent, an index key, a shared key-value row.

There is no kernel for it: torch encodes, then scatters each segment, on every backend. The one pass that rotates, encodes
and scatters is `kvlab.ops.write_kv`, for keys and values alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvlab.ops.dispatch import backend
from kvlab.ops.views import SegmentViews
from kvlab.ops.write_rows import reference, torch_
from kvlab.quant import get_codec


def write_rows(rows: Mapping[str, torch.Tensor], views: SegmentViews, slot_mapping: torch.Tensor) -> None:
    """Writes row t of each tensor to slot `slot_mapping[t]` of the segment of its name; changes `views` in place.

    Args:
        rows: segment name -> [T, width].
        views: the part's pages, whose entries have one head.
        slot_mapping: int64 [T], page * block_size + offset; a row with -1 writes nothing. Slots differ.
    """
    for name, tensor in rows.items():
        run = reference if backend(tensor) == "reference" else torch_
        codes, meta = get_codec(views.layout[name].format).encode(tensor)
        run.write_rows(codes, views[name], slot_mapping)
        if meta is not None:
            run.write_rows(meta, views[f"{name}_scale"], slot_mapping)
