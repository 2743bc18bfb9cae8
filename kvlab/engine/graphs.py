"""Decode steps replayed as CUDA graphs: the launches of a forward, recorded once for each number of rows.

A graph launches again what was launched when it was captured, at the same addresses. So it can only stand for a
forward whose inputs lie in fixed buffers (the runner's do), whose host reads nothing back, and whose grid does not
depend on lengths: it is captured as if every sequence were the longest, and the kernels' programs behind a sequence's
end return at once. `pad_to` of the engine bounds how many graphs there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvlab.models.adapters import Deltas
from kvlab.models.modules.base import Views
from kvlab.ops.batch import AttentionBatch
from kvlab.ops.grouped_views import GroupedViews

if TYPE_CHECKING:
    from kvlab.engine.engine import Engine

# (forward on the step's batches, forward on batches that touch no page) -> (replays it, where its result lies)
Capture = Callable[[Callable[[], Tensor], Callable[[], Tensor]], tuple[Callable[[], Any], Tensor]]


def cuda_capture(run: Callable[[], Tensor], warm_up: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
    """`run` as a CUDA graph; it does not run for that. `warm_up` does: kernels compile and libraries allocate there."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            warm_up()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph.replay, out


class ReplayedDecoder:
    """A decoder whose forward is replayed where a step is all decodes; everything else it computes as it did.

    Args:
        decoder: whose layers are captured. The head is not part of a graph: it is two launches.
        longest: tokens of the longest sequence.
        capture: how; tests on machines without CUDA give another.
    """

    def __init__(self, decoder: Any, longest: int, capture: Capture = cuda_capture) -> None:
        self.decoder, self.longest, self.capture = decoder, longest, capture
        self.device, self.logits = decoder.device, decoder.logits
        self._graphs: dict[int, tuple[tuple[int, ...], Callable[[], Any], Tensor]] = {}

    @torch.inference_mode()
    def hidden_states(
        self, ids: Tensor, batches: Sequence[AttentionBatch], views: Views, deltas: Deltas | None = None
    ) -> Tensor:
        """As `Decoder.hidden_states`; of a replayed step the result is overwritten by the next of as many rows."""
        if deltas is not None or not all_decodes(batches[0]):
            return self.decoder.hidden_states(ids, batches, views, deltas)
        if len(ids) not in self._graphs:
            self._graphs[len(ids)] = self._captured(ids, batches, views)
        addresses, replay, hidden = self._graphs[len(ids)]
        assert addresses == _addresses(ids, batches), "a graph reads the buffers that it was captured with"
        replay()
        return hidden

    def _captured(
        self, ids: Tensor, batches: Sequence[AttentionBatch], views: Views
    ) -> tuple[tuple[int, ...], Callable[[], Any], Tensor]:
        # the host's numbers are those of the largest step of so many rows: padding is a sequence of length 0
        fixed = [
            replace(b, num_decodes=b.num_seqs, max_query_len=1, max_seq_len=self.longest, query_lens=(), ends=())
            for b in batches
        ]
        blank = [_blank(b) for b in fixed]
        found = self.capture(
            lambda: self.decoder.hidden_states(ids, fixed, views), lambda: self.decoder.hidden_states(ids, blank, views)
        )
        return _addresses(ids, batches), *found


def all_decodes(batch: AttentionBatch) -> bool:
    """Whether every live sequence of the step has one token and none ends in a tree."""
    return batch.tree is None and 0 < batch.num_decodes == len(batch.query_lens) and batch.num_tokens == batch.num_seqs


def replay_decodes(engine: Engine, capture: Capture = cuda_capture) -> None:
    """From now on `engine` replays its decode steps.

    Raises:
        ValueError: an engine whose decodes have work that depends on the host's knowledge of the step.
    """
    if engine.speculator is not None:
        raise ValueError("speculation: a step with drafts is no decode step, so there is nothing to replay")
    if any(isinstance(view, GroupedViews) for layer in engine.runner.views for view in layer):
        raise ValueError(f"kv dtype {engine.kv_dtype!r}: which groups a step closes is the host's to know")
    decoder = engine.runner.decoder
    engine.runner.decoder = ReplayedDecoder(decoder, engine.limits.max_model_len, capture)


def _blank(batch: AttentionBatch) -> AttentionBatch:
    """The step with padding alone: it reads and writes no page."""
    zeros = {name: torch.zeros_like(getattr(batch, name)) for name in ("query_start_loc", "seq_lens", "block_table")}
    return replace(batch, slot_mapping=torch.full_like(batch.slot_mapping, -1), **zeros)


def _addresses(ids: Tensor, batches: Sequence[AttentionBatch]) -> tuple[int, ...]:
    tensors = [ids]
    for b in batches:
        tensors += [b.query_start_loc, b.seq_lens, b.block_table, b.slot_mapping, b.positions]
    return tuple(t.data_ptr() for t in tensors)
