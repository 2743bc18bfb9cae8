"""Speculation attached to an engine: who drafts how much, and what became of it.

propose -> (the scheduler finds room) -> begin -> pick -> settle
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlab.schedule import Chunk, Request, Step, Verified
from kvlab.speculate.adapt import Acceptance, best_count
from kvlab.speculate.draft import NO_DRAFT, ROOT, Draft
from kvlab.speculate.options import SpeculationOptions
from kvlab.speculate.proposers import make_proposer
from kvlab.speculate.trees import check_branches, compact
from kvlab.speculate.verify import Drawn, pick, walk


class Speculator:
    """See `kvlab.engine.speculation.Speculator`.

    Attributes:
        proposer: who drafts.
        acceptance: what came of all drafts so far. per_request: of each live request's.
    """

    def __init__(self, engine: Any, options: SpeculationOptions) -> None:
        self.engine, self.options, self.cache = engine, options, engine.cache
        if self.cache.keeps_states and not options.keep_states:
            raise ValueError(
                f"keep_states: model {engine.model.name!r} has states, which cannot forget a wrong draft: they must be "
                "copied before drafts"
            )
        if options.branches:
            check_branches(engine)
        self.proposer = make_proposer(engine, options)
        engine.runner.tree_of = self._tree
        self.acceptance, self.per_request = Acceptance(), {}
        self._drafts: dict[str, Draft] = {}

    @property
    def kv_bytes(self) -> int:
        """Bytes of the proposer's own cache."""
        return self.proposer.kv_bytes

    def propose(self, running: Sequence[Request]) -> None:
        """Gives each running request its drafts for the next step."""
        ready, counts = [], []
        for request in running:
            request.drafts = ()
            most = min(self.options.k, request.max_total - 1 - len(request.tokens))
            # behind by more than a step with drafts can leave it, a request is still computing its prompt
            if most > 0 and request.num_missing <= 1 + self.options.k and request.num_computed:
                count = self._count(request, most)
                if count:
                    ready.append(request)
                    counts.append(count)
        self._drafts = {}
        drafts = self.proposer.propose(ready, counts) if ready else []
        for request, draft in zip(ready, drafts, strict=True):
            if draft.is_tree:
                check_branches(self.engine)
            request.drafts, self._drafts[request.request_id] = draft.tokens, draft

    def begin(self, step: Step) -> None:
        """Makes the copies of states that the step's drafts need; called before they are computed."""
        for chunk in step.chunks:
            if chunk.drafts:
                self.engine.copy_pages(self.cache.drafts.copies(chunk.request.request_id))

    def pick(self, step: Step, logits: Tensor) -> Tensor:
        """A token for each wanted row of `logits` [R, vocab]: see `kvlab.speculate.verify.pick`."""
        requests, positions = [], []
        for chunk in step.sampling:
            known, draft = len(chunk.request.tokens), self._draft(chunk)
            requests += [chunk.request] * (1 + len(chunk.drafts))
            positions += [known, *(known + depth for depth in draft.depths(len(chunk.drafts)))]
        return pick(logits, self.engine.row_params(requests, positions, logits), self._drawn(step, logits))

    def settle(self, step: Step, picked: Sequence[int]) -> list[int | Verified | None]:
        """What each sampling chunk got, with every state taken back to its verified tokens."""
        results: list[int | Verified | None] = []
        certain: list[list[int]] = []
        every: list[Sequence[int]] = []
        at = row = 0
        for chunk in step.chunks:
            path: list[int] = []
            own: Sequence[int] = ()
            known = row + chunk.count - len(chunk.drafts)
            if chunk.samples:
                own = picked[at : at + 1 + len(chunk.drafts)]
                at += len(own)
                path, token = walk(self._draft(chunk), own)
                last = None if token < 0 else token
                results.append(self._settle(chunk, path, last) if chunk.drafts else last)
            certain.append([*range(row, known), *(known + i for i in path)])
            every.append(own)
            row += chunk.count
        self.proposer.observe(step, self.engine.runner.hidden, certain, every)
        return results

    def retain(self, request_ids: Iterable[str]) -> None:
        """Forgets all other requests."""
        live = set(request_ids)
        self.proposer.retain(live)
        self.per_request = {r: seen for r, seen in self.per_request.items() if r in live}

    def _settle(self, chunk: Chunk, path: list[int], token: int | None) -> Verified:
        """What a chunk came to whose drafts `path` were right and were followed by `token`."""
        request = chunk.request
        for seen in (self.acceptance, self._seen(request)):
            seen.note(len(chunk.drafts), len(path))
        known, end = len(request.tokens), chunk.start + chunk.count
        compact(self.cache, self.engine.runner.views, request.request_id, known, path)
        verified = known + len(path)
        computed, copies = self.cache.drafts.settle(request.request_id, chunk.start, end, verified)
        self.engine.copy_pages(copies)
        self.cache.drafts.drop(request.request_id)
        return Verified((*(chunk.drafts[i] for i in path), token), computed)

    def _tree(self, chunk: Chunk) -> tuple[int, ...]:
        draft = self._draft(chunk)
        return draft.parents[: len(chunk.drafts)] if draft.is_tree else ()

    def _draft(self, chunk: Chunk) -> Draft:
        return self._drafts.get(chunk.request.request_id, NO_DRAFT)

    def _seen(self, request: Request) -> Acceptance:
        return self.per_request.setdefault(request.request_id, Acceptance())

    def _count(self, request: Request, most: int) -> int:
        if not self.options.adapt:
            return most
        seen, options = self._seen(request), self.options
        # where nothing is worth drafting, one token now and then tells whether that has changed
        return best_count(seen.rate, most, options.cost, options.fixed_cost) or int(len(request.tokens) % 8 == 0)

    def _drawn(self, step: Step, logits: Tensor) -> Drawn | None:
        """The drafts of the step that were drawn from a distribution, by the row that they follow."""
        rows, tokens, parts, first = [], [], [], 0
        for chunk in step.sampling:
            draft, count = self._draft(chunk), len(chunk.drafts)
            if count and draft.q is not None and chunk.request.params.temperature > 0:
                for node in range(ROOT, count):
                    children = [i for i in range(count) if draft.parent(i) == node]
                    if children:
                        rows.append(first + 1 + node)
                        tokens.append([chunk.drafts[i] for i in children])
                        parts.append(draft.q[children[0]])
            first += 1 + count
        if not rows:
            return None
        widest = max(map(len, tokens))
        padded = [own + [-1] * (widest - len(own)) for own in tokens]
        device = logits.device
        return Drawn(torch.tensor(rows, device=device), torch.tensor(padded, device=device), torch.stack(parts))
