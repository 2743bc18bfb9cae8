"""compress as its recurrence: one token after the other enters the open window; a full one becomes an entry."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.compress.closed import Closed

OPEN = ("open_kv", "open_gate")
OVERLAPPING = (*OPEN, "overlap_kv", "overlap_gate")

Held = Mapping[str, torch.Tensor]


def compress(
    rows: tuple[torch.Tensor, torch.Tensor], bias: torch.Tensor, held: Held, batch: AttentionBatch, ratio: int
) -> Closed:
    """See `kvlab.ops.compress.compress`."""
    starts, found = batch.query_start_loc.tolist(), []
    dim = bias.shape[1] // (2 if "overlap_kv" in held else 1)
    for b, end in enumerate(batch.seq_lens.tolist()):
        page = int(batch.block_table[b, 0])
        for row in range(starts[b], starts[b + 1]):
            position = end - (starts[b + 1] - row)
            if (position + 1) % ratio:
                for name, new in zip(OPEN, rows, strict=True):
                    held[name][page].view(ratio - 1, -1)[position % ratio] = new[row].to(held[name].dtype)
                continue
            window = position // ratio
            kv, gate = (
                torch.cat((held[name][page].view(ratio - 1, -1).to(new.dtype), new[row : row + 1]))
                for name, new in zip(OPEN, rows, strict=True)
            )
            found.append((pooled(kv, gate, bias, _before(held, page, window, rows[0].dtype), dim), b, window))
            if "overlap_kv" in held:
                for name, whole in (("overlap_kv", kv), ("overlap_gate", gate)):
                    held[name][page] = whole[:, :dim].flatten().to(held[name].dtype)
    where = torch.tensor([f[1:] for f in found], dtype=torch.int64).reshape(-1, 2)
    entries = torch.stack([f[0] for f in found]) if found else rows[0].new_zeros(0, dim)
    return Closed(entries, where[:, 0], where[:, 1], torch.ones(len(found), dtype=torch.bool))


def _before(held: Held, page: int, window: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(values, gates) [ratio, D] of the first series of the window before; None for the first window."""
    if "overlap_kv" not in held or not window:
        return None
    kv, gate = held["overlap_kv"][page].to(dtype), held["overlap_gate"][page].to(dtype)
    return kv, gate


def pooled(
    kv: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    before: tuple[torch.Tensor, torch.Tensor] | None,
    dim: int,
) -> torch.Tensor:
    """One entry [dim] from values and gates [ratio, F] of a window, and of the first series of the one before."""
    values, gates = kv[:, -dim:], gate[:, -dim:] + bias[:, -dim:]
    if before is not None:
        earlier = [rows.reshape(-1, dim) for rows in before]
        values = torch.cat((earlier[0], values))
        gates = torch.cat((earlier[1] + bias[:, :dim], gates))
    return (values * gates.softmax(0)).sum(0)
