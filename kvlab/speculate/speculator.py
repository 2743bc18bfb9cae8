"""Speculation attached to an engine: who drafts how much, and what became of it.

propose -> (the scheduler finds room) -> begin -> pick -> settle
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlab.schedule import Request, Step, Verified
from kvlab.speculate.adapt import Acceptance, best_count
from kvlab.speculate.draft import NO_DRAFT, ROOT, Draft
from kvlab.speculate.options import SpeculationOptions
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
        self.proposer = _proposer(engine, options)
        engine.runner.keeps_hidden |= self.proposer.needs_hidden
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
        at = 0
        for chunk in step.sampling:
            own = picked[at : at + 1 + len(chunk.drafts)]
            at += len(own)
            results.append(self._settle(chunk, own) if chunk.drafts else None if own[0] < 0 else own[0])
        self.proposer.observe(step, self.engine.runner.hidden, results)
        return results

    def retain(self, request_ids: Iterable[str]) -> None:
        """Forgets all other requests."""
        live = set(request_ids)
        self.proposer.retain(live)
        self.per_request = {r: seen for r, seen in self.per_request.items() if r in live}

    def _settle(self, chunk, own: Sequence[int]) -> Verified:
        request = chunk.request
        path, token = walk(self._draft(chunk), own)
        for seen in (self.acceptance, self._seen(request)):
            seen.note(len(chunk.drafts), len(path))
        verified = len(request.tokens) + len(path)
        end = chunk.start + chunk.count
        computed, copies = self.cache.drafts.settle(request.request_id, chunk.start, end, verified)
        self.engine.copy_pages(copies)
        self.cache.drafts.drop(request.request_id)
        return Verified((*(chunk.drafts[i] for i in path), None if token < 0 else token), computed)

    def _draft(self, chunk) -> Draft:
        return self._drafts.get(chunk.request.request_id, NO_DRAFT)

    def _seen(self, request: Request) -> Acceptance:
        return self.per_request.setdefault(request.request_id, Acceptance())

    def _count(self, request: Request, most: int) -> int:
        if not self.options.adapt:
            return most
        seen = self._seen(request)
        # where nothing is worth drafting, one token now and then tells whether that has changed
        return best_count(seen.rate, most, self.options.cost) or int(len(request.tokens) % 8 == 0)

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


def _proposer(engine: Any, options: SpeculationOptions) -> Any:
    if callable(options.method):
        return options.method(engine)
    if options.method == "ngram":
        from kvlab.speculate.ngram import NGramProposer

        return NGramProposer(options.longest)
    if options.method == "draft":
        from kvlab.speculate.model import ModelProposer

        return ModelProposer(engine, options.draft, options.k, options.drawn)
    raise ValueError(f"method {options.method!r}: is not here yet")
