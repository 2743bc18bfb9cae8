"""compress for all sequences of a step at once, without host reads for decodes.

A token of a window that closes in this step lies in the step itself, in the open buffer (it came earlier, its window
was open), or in the overlap (its window had closed). Where is arithmetic on positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.compress.closed import Closed
from kvlab.ops.compress.reference import OPEN, Held


@dataclass(frozen=True, eq=False)
class _Step:
    """Per sequence [B]: its state's page, the position and row of its first token in the step, its length after it."""

    page: torch.Tensor
    start: torch.Tensor
    row: torch.Tensor
    end: torch.Tensor


def compress(
    rows: tuple[torch.Tensor, torch.Tensor], bias: torch.Tensor, held: Held, batch: AttentionBatch, ratio: int
) -> Closed:
    """See `kvlab.ops.compress.compress`."""
    first, end = batch.query_start_loc.long(), batch.seq_lens.long()
    step = _Step(batch.block_table[:, 0].long(), end - first.diff(), first[:-1], end)
    closing = _closing_rows(batch, ratio)
    sequence = (torch.searchsorted(first[1:], closing, right=True)).clamp_max(batch.num_seqs - 1)
    position = step.start[sequence] + closing - step.row[sequence]
    window = torch.div(position, ratio, rounding_mode="floor")
    dim = bias.shape[1] // (2 if "overlap_kv" in held else 1)
    own = [_inputs(new, held, name, step, (sequence, window), ratio) for name, new in zip(OPEN, rows, strict=True)]
    values, gates = own[0][..., -dim:], (own[1] + bias)[..., -dim:]
    if "overlap_kv" in held:
        where = (sequence, window - 1)
        early = [_earlier(new, held, name, step, where, ratio) for name, new in zip(OPEN, rows, strict=True)]
        none = (window == 0)[:, None, None]
        values = torch.cat((torch.where(none, 0, early[0]), values), dim=1)
        gates = torch.cat((torch.where(none, float("-inf"), early[1] + bias[:, :dim]), gates), dim=1)
    entries = (values * gates.softmax(1)).sum(1)
    _keep(rows, held, step, ratio, dim)
    return Closed(entries, sequence, window, (position + 1) % ratio == 0)


def _closing_rows(batch: AttentionBatch, ratio: int) -> torch.Tensor:
    """int64 [n]: every decode's row (whether it closes a window the device knows), and those of chunks that close one.

    Found once a step for all compressors of that ratio; for a step of decodes the host sends nothing.
    """
    key = ("closing rows", ratio)
    if key not in batch.memory:
        device, n = batch.seq_lens.device, batch.num_decodes
        found, row = torch.arange(n, device=device), n
        chunks: list[int] = []
        for count, end in zip(batch.query_lens[n:], batch.ends[n:], strict=True):
            start = end - count
            chunks += [row + p - start for p in range(start, end) if (p + 1) % ratio == 0]
            row += count
        if chunks:
            found = torch.cat((found, torch.tensor(chunks, dtype=torch.int64, device=device)))
        batch.memory[key] = found
    return batch.memory[key]


def _inputs(
    new: torch.Tensor, held: Held, name: str, step: _Step, where: tuple[torch.Tensor, torch.Tensor], ratio: int
) -> torch.Tensor:
    """Rows [n, ratio, F] of the tokens of windows where[1] of sequences where[0]: from the step, else the open buffer."""
    sequence, window = where
    position = window[:, None] * ratio + torch.arange(ratio, device=new.device)
    start = step.start[sequence][:, None]
    row = step.row[sequence][:, None] + position - start
    open_rows = held[name][step.page[sequence]].unflatten(-1, (ratio - 1, -1))
    # the last token of a window is never among those that wait
    column = torch.arange(ratio, device=new.device).clamp_max(ratio - 2)
    return torch.where(
        (position >= start)[..., None], new[row.clamp(0, len(new) - 1)], open_rows[:, column].to(new.dtype)
    )


def _earlier(
    new: torch.Tensor, held: Held, name: str, step: _Step, where: tuple[torch.Tensor, torch.Tensor], ratio: int
) -> torch.Tensor:
    """The first series [n, ratio, D] of windows where[1]: as `_inputs`, or from the overlap if closed before the step."""
    sequence, window = where
    closed = held[name.replace("open", "overlap")][step.page[sequence]].unflatten(-1, (ratio, -1))
    rows = _inputs(new, held, name, step, where, ratio)[..., : closed.shape[-1]]
    was_open = window >= torch.div(step.start[sequence], ratio, rounding_mode="floor")
    return torch.where(was_open[:, None, None], rows, closed.to(new.dtype))


def _keep(rows: tuple[torch.Tensor, torch.Tensor], held: Held, step: _Step, ratio: int, dim: int) -> None:
    """Puts what later steps need where it belongs: inputs of the window that is open now, and of the one before it."""
    sequence = torch.arange(len(step.page), device=step.page.device)
    current = torch.div(step.end, ratio, rounding_mode="floor")
    place = torch.arange(ratio - 1, device=step.page.device)
    position = current[:, None] * ratio + place
    fresh = (position >= step.start[:, None]) & (position < step.end[:, None])
    for name, new in zip(OPEN, rows, strict=True):
        if "overlap_kv" in held:
            overlap = held[name.replace("open", "overlap")]
            earlier = _earlier(new, held, name, step, (sequence, current - 1), ratio)
            overlap[step.page] = earlier.flatten(1).to(overlap.dtype)
        row = (step.row[:, None] + position - step.start[:, None]).clamp(0, len(new) - 1)
        old = held[name][step.page].unflatten(-1, (ratio - 1, -1))
        kept = torch.where(fresh[..., None], new[row].to(old.dtype), old)
        held[name][step.page] = kept.flatten(1)
