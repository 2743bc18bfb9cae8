"""Ragged batches over state pages full of NaN: what tests of recurrences drive an operation with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvlab.ops.batch import AttentionBatch, make_batch

# a step: sequence -> its next tokens; sequences join late, chunks are odd, decodes and chunks mix, one is a lone token
SCHEDULE = ({0: 5}, {0: 1, 1: 7}, {0: 1, 1: 1}, {0: 3, 1: 1, 2: 1}, {0: 1, 1: 2, 2: 9}, {0: 1, 1: 1, 2: 1})

Op = Callable[[list[Tensor], AttentionBatch], Tensor]


def lengths() -> list[int]:
    """Tokens of each sequence of `SCHEDULE` at its end."""
    return [sum(step.get(seq, 0) for step in SCHEDULE) for seq in range(3)]


def run_schedule(op: Op, inputs: Sequence[Sequence[Tensor]], padded: Sequence[int] = (0, 2, 1)) -> list[Tensor]:
    """What `op` gives for every token of each sequence, put together again.

    Args:
        inputs: per sequence, its tensors of one row per token.
        padded: rows that belong to no sequence, taken in turn.
    """
    table = torch.tensor([[3], [1], [2]], dtype=torch.int32)  # page 0 is the null page, 4 is nobody's
    done, pieces = [0, 0, 0], [[], [], []]
    for i, step in enumerate(SCHEDULE):
        order = sorted(step, key=lambda seq: (step[seq] != 1, seq))
        pad = padded[i % len(padded)]
        rows = []
        for tensors in zip(*inputs, strict=True):
            new = [tensors[seq][done[seq] : done[seq] + step[seq]] for seq in order]
            rows.append(torch.cat([*new, torch.full((pad, *tensors[0].shape[1:]), float("nan")).to(tensors[0])]))
        for seq in order:
            done[seq] += step[seq]
        batch = make_batch([step[s] for s in order], [done[s] for s in order], table[order], 1000, pad)
        out = op(rows, batch)
        assert not out[len(out) - pad :].any(), "padded rows give zeros"
        for seq, piece in zip(order, out[: len(out) - pad].split([step[s] for s in order]), strict=True):
            pieces[seq].append(piece)
    return [torch.cat(p) for p in pieces]


def poisoned(elements: int, dtype: torch.dtype) -> Tensor:
    """Five pages of NaN, strided as a segment of wider pages is."""
    return torch.full((5, elements + 16), float("nan"), dtype=dtype)[:, 8 : 8 + elements]
