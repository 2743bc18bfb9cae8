"""Drafters with a cache of their own: pages, storage and runner like the engine's, for a smaller network.

The drafter's entries follow the request's: before it drafts, it is cut back to what both agree on and computes what it
has not seen. What it computes on top of its own drafts is thrown away in the same way when a draft was wrong.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvlab.cache import KVCacheManager
from kvlab.engine.runner import Runner
from kvlab.engine.sampler import RowParams, draw, probabilities, uniform
from kvlab.engine.storage import PagedStorage
from kvlab.schedule import Chunk, Limits, Request, Step
from kvlab.specs.model import ModelSpec
from kvlab.specs.pages import cdiv
from kvlab.specs.pools import pool_layout
from kvlab.specs.rollback import RollbackPolicy
from kvlab.speculate.draft import NO_DRAFT, Draft
from kvlab.speculate.verify import drawing


@dataclass
class Shadow:
    """A request as its drafter's cache knows it: the tokens fed, drafts behind the certain ones."""

    request_id: str
    tokens: array = field(default_factory=lambda: array("i"))


class CachedProposer:
    """Drafts chains by running a network one token after the other.

    Args:
        engine: whose requests it drafts for.
        decoder: the network, as `kvlab.engine.runner.Runner` wants it. spec: what it caches.
        k: drafts of a request at most. drawn: see `SpeculationOptions`.

    Attributes:
        cache, storage, runner: its own.
    """

    def __init__(self, engine: Any, decoder: Any, spec: ModelSpec, k: int, drawn: bool = True) -> None:
        self.engine, self.drawn = engine, drawn
        limits = engine.limits
        own = Limits(
            limits.max_num_seqs, max(limits.max_batched_tokens, limits.max_num_seqs * (k + 1)), limits.max_model_len
        )
        layout = pool_layout(spec, engine.options.block_size)
        # a step back to the newest verified token is always possible
        rollback = RollbackPolicy(k + 1)
        self.cache = KVCacheManager(
            layout, _blocks(engine, layout, own, rollback), own.max_batched_tokens, None, rollback
        )
        self.storage = PagedStorage(layout, [pool.num_blocks for pool in self.cache.unit_pools], decoder.device)
        # layers keep the indices of the model that they come from
        views: list[Any] = [()] * (1 + max(layer.index for layer in spec.layers))
        for layer, parts in zip(spec.layers, self.storage.views(spec), strict=True):
            views[layer.index] = parts
        self.runner = Runner(decoder, self.cache, views, own)
        self.shadows: dict[str, Shadow] = {}

    @property
    def kv_bytes(self) -> int:
        """Bytes of its own cache."""
        return self.storage.allocated_bytes

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        """A chain for each request, drawn or the likeliest; empty where its own pool has no room."""
        ready = [(r, n) for r, n in zip(requests, counts, strict=True) if self._follow(r, n)]
        made: dict[str, list[int]] = {r.request_id: [] for r, _ in ready}
        seen: dict[str, list[Tensor]] = {r.request_id: [] for r, _ in ready}
        self._catch_up([r for r, _ in ready])
        for i in range(max((n for _, n in ready), default=0)):
            active = [r for r, n in ready if n > i]
            chunks = [self._rest(r.request_id, True) for r in active]
            order = sorted(range(len(active)), key=lambda j: chunks[j].count != 1)
            logits = self._run([chunks[j] for j in order])
            active = [active[j] for j in order]
            tokens, q = self._choose(active, [len(r.tokens) + i for r in active], logits)
            for j, (request, token) in enumerate(zip(active, tokens, strict=True)):
                made[request.request_id].append(token)
                self.shadows[request.request_id].tokens.append(token)
                if q is not None:
                    seen[request.request_id].append(q[j])
        return [self._draft(r, made, seen) for r in requests]

    def observe(
        self, step: Step, hidden: Tensor | None, certain: Sequence[Sequence[int]], picked: Sequence[Sequence[int]]
    ) -> None:
        """Learns what became of its drafts from the requests themselves."""

    def retain(self, request_ids: set[str]) -> None:
        """Gives back the pages of all other requests."""
        for request_id in self.shadows.keys() - request_ids:
            self.cache.free(request_id)
            del self.shadows[request_id]

    # what a request's drafter sees

    def _fed(self, request: Request) -> array:
        """The known tokens that its network is fed."""
        return request.tokens

    def _certain(self, request: Request, shadow: Shadow) -> int:
        """Entries of the shadow that the request's tokens agree with; its last known token is always computed again."""
        known, own = self._fed(request), shadow.tokens
        same = min(len(known), len(own))
        if own[:same] != known[:same]:
            same = next(i for i in range(same) if own[i] != known[i])
        return min(same, len(known) - 1)

    def _follow(self, request: Request, count: int) -> bool:
        """Whether the request's shadow is its known tokens, with slots for them and for `count` - 1 drafts."""
        shadow = self.shadows.setdefault(request.request_id, Shadow(request.request_id))
        computed = self.cache.computed.get(request.request_id, 0)
        if computed:
            try:
                self.cache.truncate(request.request_id, min(computed, self._certain(request, shadow)))
            except ValueError:
                # cut back further than its windows reach: its network begins again
                self.cache.free(request.request_id)
        known = self._fed(request)
        shadow.tokens = array("i", known)
        return self.cache.allocate(request.request_id, len(known) + count - 1)

    # running the network

    def _catch_up(self, requests: Sequence[Request]) -> None:
        """Computes what shadows have not seen, but for the last token, where it does not fit one step."""
        room = self.runner_tokens
        if sum(self._rest(r.request_id, True).count for r in requests) <= room:
            return
        for request in requests:
            while (rest := self._rest(request.request_id, False)).count > 1:
                count = min(rest.count - 1, room)
                self._run([Chunk(rest.request, rest.start, count, False)])

    @property
    def runner_tokens(self) -> int:
        """Tokens that one run of the network takes."""
        return len(self.runner.ids.array)

    def _rest(self, request_id: str, samples: bool) -> Chunk:
        shadow, start = self.shadows[request_id], self.cache.computed[request_id]
        return Chunk(shadow, start, len(shadow.tokens) - start, samples)  # type: ignore[arg-type]

    def _run(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """The logits [R, vocab] behind the chunks that sample; single tokens come first."""
        logits = self.runner.forward(self.runner.fill(Step(0, tuple(chunks))))
        for chunk in chunks:
            self.cache.advance(chunk.request.request_id, chunk.start + chunk.count)
        return logits

    def _choose(
        self, requests: Sequence[Request], positions: Sequence[int], logits: Tensor
    ) -> tuple[list[int], Tensor | None]:
        """(a token for each request, the distributions they were drawn from or None where all were chosen)."""
        rows: RowParams = self.engine.row_params(requests, positions, logits)
        token = logits.argmax(-1)
        if rows.greedy or not self.drawn:
            return token.tolist(), None
        q = probabilities(logits, rows)
        drawn = draw(q, uniform(rows.seed, rows.position, drawing(0)))
        return torch.where(rows.temperature > 0, drawn, token).tolist(), q

    def _draft(self, request: Request, made: dict[str, list[int]], seen: dict[str, list[Tensor]]) -> Draft:
        tokens, q = made.get(request.request_id), seen.get(request.request_id)
        if not tokens:
            return NO_DRAFT
        return Draft(tuple(tokens), (), torch.stack(q) if q and request.params.temperature > 0 else None)


def _blocks(engine: Any, layout: Any, limits: Limits, rollback: RollbackPolicy) -> tuple[int, ...]:
    """Units of the drafter's pools: for as many tokens as the engine's pools of full attention hold, and no more than
    `max_num_seqs` of the longest sequences fill."""
    longest = layout.sequence_pages(limits.max_model_len, limits.max_batched_tokens, rollback)
    most = layout.units([pages * limits.max_num_seqs for pages in longest])
    held = [
        (pool.num_blocks - 1) * group.block_size
        for pool, group in zip(engine.cache.pools, engine.groups, strict=True)
        if group.retention.rule == "all" and engine.options.pools == "per_kind"
    ]
    tokens = min(held, default=limits.max_num_seqs * limits.max_model_len)
    wanted = [
        cdiv(tokens, group.block_size) + limits.max_num_seqs * (rollback.slack // group.block_size + 1)
        for group in layout.groups
    ]
    return tuple(1 + min(a, b) for a, b in zip(most, layout.units(wanted), strict=True))
