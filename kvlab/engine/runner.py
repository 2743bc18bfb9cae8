"""The runner: packs a step into one flat batch inside fixed buffers and runs the model on it.

Buffers are made once, at the size of the largest step: ids, positions, slots, block tables at full width, lengths.
A step writes into their beginnings. The forward of a step of decodes reads nothing back to the host, so that the same
shapes at the same addresses could be captured as a CUDA graph. On the CPU the host's buffers are the device's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvlab.cache import KVCacheManager
from kvlab.ops.batch import AttentionBatch
from kvlab.ops.tree import TreeMask, depths, tree_mask
from kvlab.schedule import Chunk, Limits, Step
from kvlab.specs.pages import cdiv


class FixedBuffer:
    """A host array and its mirror on the device; on the CPU they are one."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=pinned)
        self._device = torch.zeros(shape, dtype=dtype, device=device) if device.type != "cpu" else self._host
        self.array: np.ndarray = self._host.numpy()

    def upload(self, count: int) -> Tensor:
        """The first `count` rows on the device, holding what the host wrote; a copy may still be under way."""
        if self._device is not self._host:
            self._device[:count].copy_(self._host[:count], non_blocking=True)
        return self._device[:count]


class UploadFence:
    """Tells when the copies of a step have left the host's buffers.

    A step that reads its tokens back has its copies done; where a forward is called alone, the next step would write
    over rows that the device has yet to fetch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, torch.cuda.Event()

    def record(self) -> None:
        """Marks all copies queued so far."""
        self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Returns once the marked copies are done; at once when none were marked."""
        self._event.synchronize()


@dataclass(frozen=True)
class Inputs:
    """One step on the device: ids int64 [T], one batch per block table, rows int64 [R] whose logits are wanted."""

    ids: Tensor
    batches: tuple[AttentionBatch, ...]
    rows: Tensor


class Runner:
    """Fills the buffers and runs the decoder.

    Args:
        decoder: has hidden_states(ids, batches, views) -> [T, hidden] and logits(hidden) -> [R, vocab].
        views: of the cache, [layer][part].
        pad_to: rows and sequences of a step are padded to multiples of this.
    """

    def __init__(
        self, decoder, cache: KVCacheManager, views: Sequence[Sequence[Any]], limits: Limits, pad_to: int = 1
    ) -> None:  # fmt: skip
        self.decoder, self.cache, self.views, self.pad_to = decoder, cache, views, pad_to
        device = decoder.device
        tokens, seqs = self._padded(limits.max_batched_tokens), self._padded(limits.max_num_seqs)

        def fixed(*shape: int, dtype: torch.dtype = torch.int64) -> FixedBuffer:
            return FixedBuffer(shape, dtype, device)

        # with drafts more rows than sequences are wanted
        self.ids, self.positions, self.rows = fixed(tokens), fixed(tokens), fixed(max(tokens, seqs))
        self.query_start_loc = fixed(seqs + 1, dtype=torch.int32)
        self.seq_lens = fixed(seqs, dtype=torch.int32)
        self.slots = [fixed(tokens) for _ in cache.groups]
        longest = limits.max_model_len
        # as wide as the positions of the longest sequence; a state's table has one entry
        widths = [1 if g.retention.rule == "state" else cdiv(longest, g.block_size) for g in cache.groups]
        self.tables = [fixed(seqs, width, dtype=torch.int32) for width in widths]
        # what left the last layer in the last step [T, hidden], for those who draft from it or look for NaN
        self.hidden: Tensor | None = None
        # the parents of the last tokens that a chunk ends in, where they are a tree
        self.tree_of: Callable[[Chunk], tuple[int, ...]] = lambda chunk: ()
        # which rows of a step an adapter changes
        self.deltas_of: Callable[[Step], Any] = lambda step: None
        self._deltas: Any = None
        self._fence = UploadFence(device) if device.type == "cuda" else None
        # entries of each table row that the last step wrote
        self._written = [np.zeros(seqs, dtype=np.int64) for _ in cache.groups]

    def run(self, step: Step, pick: Callable[[Tensor], Tensor]) -> list[int]:
        """The tokens that `pick` takes from the step's logits [R, vocab]: one per sampling chunk and one per draft."""
        logits = self.forward(self.fill(step))
        return [] if logits is None else pick(logits).tolist()

    @torch.inference_mode()
    def forward(self, inputs: Inputs) -> Tensor | None:
        """Logits [R, vocab], None when no row is wanted; a step of decodes reads nothing back to the host."""
        # decoders of tests take three arguments
        deltas = () if self._deltas is None else (self._deltas,)
        self.hidden = hidden = self.decoder.hidden_states(inputs.ids, inputs.batches, self.views, *deltas)
        return self.decoder.logits(hidden.index_select(0, inputs.rows)) if len(inputs.rows) else None

    def fill(self, step: Step) -> Inputs:
        """The step's inputs, written into the fixed buffers."""
        if self._fence:
            self._fence.wait()
        self._deltas = self.deltas_of(step)
        row, wanted = 0, 0
        for i, chunk in enumerate(step.chunks):
            stop, end = row + chunk.count, chunk.start + chunk.count
            known = stop - len(chunk.drafts)
            self.ids.array[row:known] = chunk.request.tokens[chunk.start : end - len(chunk.drafts)]
            self.ids.array[known:stop] = chunk.drafts
            self.positions.array[row:stop] = np.arange(chunk.start, end)
            if tree := self.tree_of(chunk):
                # a token's position is its depth
                own = min(chunk.count, len(tree))
                self.positions.array[stop - own : stop] = np.array(depths(tree)[-own:]) + end - len(tree) - 1
            self.query_start_loc.array[i] = row
            self.seq_lens.array[i] = end
            self._fill_pages(i, row, chunk.request.request_id, chunk.start, end)
            row = stop
            if chunk.samples:
                # what follows the last known token, and what follows each draft
                self.rows.array[wanted : wanted + stop - known + 1] = np.arange(known - 1, stop)
                wanted += stop - known + 1
        self._fill_padding(row, len(step.chunks))
        return self._inputs(step, wanted)

    def _fill_pages(self, i: int, row: int, request_id: str, start: int, end: int) -> None:
        for g, (slots, table, written) in enumerate(zip(self.slots, self.tables, self._written, strict=True)):
            pages = self.cache.block_table(request_id, g)
            table.array[i, : len(pages)] = pages
            table.array[i, len(pages) : written[i]] = 0
            written[i] = len(pages)
            slots.array[row : row + end - start] = self.cache.slot_mapping(request_id, start, end, g)

    def _fill_padding(self, tokens: int, seqs: int) -> None:
        """Rows that no sequence owns (slot -1) and sequences without tokens (length 0, null pages)."""
        all_tokens, all_seqs = self._padded(tokens), self._padded(seqs)
        self.ids.array[tokens:all_tokens] = 0
        self.positions.array[tokens:all_tokens] = 0
        self.query_start_loc.array[seqs : all_seqs + 1] = tokens
        self.seq_lens.array[seqs:all_seqs] = 0
        for slots, table, written in zip(self.slots, self.tables, self._written, strict=True):
            slots.array[tokens:all_tokens] = -1
            table.array[seqs:all_seqs] = 0
            written[seqs:all_seqs] = 0

    def _inputs(self, step: Step, wanted: int) -> Inputs:
        tokens, seqs = self._padded(step.num_tokens), self._padded(len(step.chunks))
        shared = {
            "query_start_loc": self.query_start_loc.upload(seqs + 1),
            "seq_lens": self.seq_lens.upload(seqs),
            "positions": self.positions.upload(tokens),
            "num_seqs": seqs,
            "num_tokens": tokens,
            "max_query_len": max(chunk.count for chunk in step.chunks),
            "max_seq_len": max(chunk.start + chunk.count for chunk in step.chunks),
            "num_decodes": step.num_decodes,
            "query_lens": tuple(chunk.count for chunk in step.chunks),
            "ends": tuple(chunk.start + chunk.count for chunk in step.chunks),
            "tree": self._tree(step, seqs),
        }
        batches = tuple(
            AttentionBatch(block_table=table.upload(seqs), slot_mapping=slots.upload(tokens), **shared)
            for table, slots in zip(self.tables, self.slots, strict=True)
        )
        inputs = Inputs(self.ids.upload(tokens), batches, self.rows.upload(wanted))
        if self._fence:
            self._fence.record()
        return inputs

    def _tree(self, step: Step, seqs: int) -> TreeMask | None:
        trees = [self.tree_of(chunk) for chunk in step.chunks]
        return tree_mask(trees + [()] * (seqs - len(trees)), self.decoder.device) if any(trees) else None

    def _padded(self, count: int) -> int:
        return cdiv(count, self.pad_to) * self.pad_to
