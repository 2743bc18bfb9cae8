"""The engine: requests in, tokens out. It joins scheduler, cache, storage, runner and sampler into a step.

step: schedule -> fill and forward -> sample -> update
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakSet

import torch

from kvlab.cache import KVCacheManager
from kvlab.cache.kept import PageCopy
from kvlab.cache.waste import PoolUse, pool_use
from kvlab.engine.adapters import Adapters
from kvlab.engine.finite import RowCheck
from kvlab.engine.kv_formats import finished_views, kv_formats
from kvlab.engine.options import EngineOptions, engine_options
from kvlab.engine.prompts import end_ids, prompt_ids
from kvlab.engine.runner import Runner
from kvlab.engine.sampler import RowParams, sample
from kvlab.engine.sizing import describe, pool_sizes
from kvlab.engine.storage import KVUse, PagedStorage
from kvlab.engine.stream import Follower, Piece
from kvlab.engine.tiers import build_tiers
from kvlab.schedule import EventLog, Output, Request, SamplingParams, Scheduler, Step
from kvlab.specs.pools import pool_layout

log = logging.getLogger("kvlab.engine")


@dataclass(frozen=True)
class Completion:
    """What a request came to. `text` is "" without a tokenizer; `error` says why when the finish reason is "error"."""

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: str
    error: str = ""


class Engine:
    """A model with a paged cache and a scheduler.

    Args:
        model: what `kvlab.models.load.load_model` returns: spec, config, decoder, tokenizer (or None), name.
        options: see `EngineOptions`; its fields may also be given by name.

    Raises:
        ValueError: an option out of its range, an unknown dtype, a budget without room for a page.

    Attributes:
        events: the bounded event log; `events.subscribe(sink)` hears every event.
        cache: the block tables. storage: the bytes. scheduler: who waits and who runs.
        adapters: low-rank changes of the model that requests may ask for: `adapters.add(name, source)` gives the key.
    """

    def __init__(self, model, options: EngineOptions | None = None, **changes) -> None:
        self.options = engine_options(options, changes)
        self.model = model
        self.kv_dtype, self.spec = kv_formats(model, self.options.kv_dtype)
        self.limits = self.options.limits(model.config.max_position)
        self.layout = pool_layout(self.spec, self.options.block_size, self.options.pools)
        self.groups = self.layout.groups
        self.num_blocks = pool_sizes(self.layout, self.options, self.limits, model.decoder.device)
        self.events = EventLog(self.options.log_events)
        in_flight = min(self.limits.max_batched_tokens, self.limits.max_model_len)
        self.cache = KVCacheManager(
            self.layout, self.num_blocks, in_flight, self._page_order(), self.options.rollback, self.options.prefix
        )
        self.storage = PagedStorage(self.layout, self.num_blocks, model.decoder.device)
        self.requests: dict[str, Request] = {}
        self._followers: WeakSet[Follower] = WeakSet()
        self._arrived, self._peak = 0, (0, 0)
        # layers are mostly alike: each distinct part is asked once
        self._parts = Counter(part for _, part in self.spec.parts())
        assert self.kv.predicted_bytes == self.kv.allocated_bytes, f"the pool is not what was predicted: {self.kv}"
        self.tiers = build_tiers(self, self.options.tiers)
        self.scheduler = Scheduler(self.cache, self.limits, self.events, self.options.scheduling, self.tiers)
        views = self.storage.views(self.spec)
        views = finished_views(views, model, self.limits.max_model_len, self.options.kv_scales)
        decoder = model.decoder.for_length(self.limits.max_model_len)
        self.runner = Runner(decoder, self.cache, views, self.limits, self.options.pad_to)
        self.row_check = RowCheck(self.runner)
        self.adapters = Adapters(decoder)
        self.runner.deltas_of = self.adapters.deltas
        speculation = self.options.speculation
        self.speculator = None if speculation is None else speculation.attach(self)
        if self.options.check:
            self._poison()
        log.info("%s", self.describe())

    def add_request(self, prompt: str | Sequence[int], params: SamplingParams | None = None, **fields) -> str:
        """The id of the request, which waits from now on; `fields` are those of `Request`: priority, salt, adapter.

        Raises:
            ValueError: an empty or too long prompt, a token id the model does not have, a request that can never
                fit the pool. Other requests go on.
        """
        params = params or SamplingParams()
        self.adapters.check(fields.get("adapter", ""))
        request_id = str(self._arrived)
        self._arrived += 1
        now = time.monotonic()
        request = Request(
            request_id, prompt_ids(self.model, prompt), params, end_ids(self.model), arrival=now, **fields
        )  # fmt: skip
        self.scheduler.add(request, now)
        self.requests[request_id] = request
        return request_id

    def step(self) -> list[Output]:
        """The tokens that requests got in one step; an empty list when there is nothing to do, or only a prefill."""
        if not self.scheduler.has_work:
            return []
        drafting = self.speculator
        if drafting:
            drafting.propose(self.scheduler.running)
        step = self.scheduler.schedule(time.monotonic())
        if not step.chunks:
            # every request waits for pages that a copy still reads or writes
            self.tiers.wait()
            return []
        self.copy_pages(self.cache.take_copies())
        if drafting:
            drafting.begin(step)
        tokens = self.runner.run(step, lambda logits: self._pick(step, logits))
        spoiled = self.row_check.spoiled(step)
        for chunk in step.chunks:
            if chunk.keeps_state:
                self.copy_pages(self.cache.copies_for(chunk.request.request_id, chunk.start + chunk.count))
        self._note_peak(step)
        picked = drafting.settle(step, tokens) if drafting else [None if t < 0 else t for t in tokens]
        outputs = self.scheduler.update(step, picked, time.monotonic(), spoiled)
        for output in outputs:
            if output.finish_reason:
                del self.requests[output.request_id]
        if drafting:
            drafting.retain(r.request_id for r in self.scheduler.running)
        self._come_to_rest()
        if self.options.check:
            self.cache.check_invariants()
        return outputs

    def close(self) -> None:
        """Returns once all that was saved lies where it belongs, on disk too, and the disk's thread has ended. The engine
        may be used again. A process that ends without it waits for what was asked of the disk, but not for copies that a
        device has not ended: these are not saved."""
        if self.tiers:
            self.tiers.close()

    def _come_to_rest(self) -> None:
        """When nobody is alive nothing later would look after copies under way: what is saved is in host memory, and on
        its way to disk."""
        if self.tiers and not self.scheduler.has_work:
            self.tiers.wait()

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """What each prompt came to, in order. A prompt that is refused ends with "error"; the others go on. What was saved
        lies on disk by then.

        Raises:
            ValueError: one text instead of a list of prompts, each of whose letters would be a prompt; not one params each.
        """
        if isinstance(prompts, str):
            raise ValueError(f"prompts {prompts[:20]!r}: must be a list of prompts, as in generate([prompt])")
        every = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else params
        if len(every) != len(prompts):
            raise ValueError(f"params of {len(every)}: must be one for each of {len(prompts)} prompts")
        requests: list[Request | Completion] = []
        try:
            for prompt, own in zip(prompts, every, strict=True):
                requests.append(self._added(prompt, own))
            while any(isinstance(r, Request) and r.finish_reason is None for r in requests):
                self.step()
        except BaseException:
            for request in requests:
                self.abort(request.request_id)
            raise
        if self.tiers and not self.scheduler.has_work:
            self.tiers.drain()
        return [r if isinstance(r, Completion) else self._completion(r) for r in requests]

    def _added(self, prompt: str | Sequence[int], params: SamplingParams | None) -> Request | Completion:
        try:
            return self.requests[self.add_request(prompt, params)]
        except ValueError as refused:
            return Completion(str(self._arrived - 1), [], "", "error", str(refused))

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[Piece]:
        """The request's tokens and text as they come; leaving the loop early aborts the request.

        Raises:
            ValueError: as `add_request`, at once.
        """
        return self.follow(self.add_request(prompt, params))

    def follow(self, request_id: str) -> Iterator[Piece]:
        """The tokens and text of a live request as they come, stepping the engine for all; several may be followed.

        After `truncate` the pieces go on behind the tokens that stayed.
        """
        follower = Follower(self.requests[request_id], self.model.tokenizer, self.step, self.abort)
        self._followers.add(follower)
        return follower.pieces()

    def abort(self, request_id: str) -> bool:
        """Whether a live request was ended; its pages go back at once."""
        self.requests.pop(request_id, None)
        ended = self.scheduler.abort(request_id, time.monotonic())
        self._come_to_rest()
        return ended

    def stop(self, request_id: str, reason: str) -> bool:
        """Whether a live request was ended as complete, because of something in its text; `reason` is for the log."""
        self.requests.pop(request_id, None)
        ended = self.scheduler.stop(request_id, time.monotonic(), reason)
        self._come_to_rest()
        return ended

    def truncate(self, request_id: str, tokens: int) -> int:
        """The tokens of the request that stay computed after only its first `tokens` tokens were kept.

        The rest of its output is picked anew. Where a state had to go back to an older copy, the tokens since then
        are computed again in the next steps.

        Raises:
            ValueError: no live request of that id, a length outside its output, or a cache that cannot step back
                that far. Nothing has changed then.
        """
        restart = self.scheduler.truncate(request_id, tokens, time.monotonic())
        self.copy_pages(restart.copies)
        for follower in self._followers:
            if follower.request.request_id == request_id:
                follower.cut(tokens)
        return restart.computed

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copies pages as the cache manager asks for it."""
        self.storage.copy(copies)

    @property
    def kv(self) -> KVUse:
        """Bytes predicted, allocated, held in pages and used by entries, now and at the most."""
        held, used = self.cache.held_bytes, self._used_bytes({})
        predicted = self.layout.pool_bytes(self.num_blocks)
        return KVUse(
            predicted, self.storage.allocated_bytes, held, used, max(held, self._peak[0]), max(used, self._peak[1])
        )

    @property
    def pool_use(self) -> PoolUse:
        """What every byte of the pools is for, now: data, each kind of waste, free."""
        return pool_use(self.cache)

    def describe(self) -> str:
        """One line for people: the pool, its pages and the limits."""
        return describe(self)

    def _page_order(self) -> list[list[int]] | None:
        if self.options.page_seed is None:
            return None
        rng = random.Random(self.options.page_seed)
        return [rng.sample(range(1, n), n - 1) for n in self.num_blocks]

    def _poison(self) -> None:
        """Puts NaN into every page now, and into each page again when its last holder leaves."""
        self.storage.fill(255)
        for i, pool in enumerate(self.cache.pools):
            # groups that share page ids share their rows too, so one of them poisons for all
            pool.on_free = lambda blocks, group=i: self.storage.fill(255, group, blocks)

    def _pick(self, step: Step, logits: torch.Tensor) -> torch.Tensor:
        self.row_check.launch(step)
        if self.speculator:
            return self.speculator.pick(step, logits)
        requests = [chunk.request for chunk in step.sampling]
        return sample(logits, self.row_params(requests, [len(r.tokens) for r in requests], logits))

    def row_params(self, requests: Sequence[Request], positions: Sequence[int], logits: torch.Tensor) -> RowParams:
        """How to pick tokens of `requests` at `positions` from the rows of `logits` [R, vocab]."""
        return RowParams.of([r.params for r in requests], [self._seed(r) for r in requests], positions, logits)

    def _seed(self, request: Request) -> int:
        own = request.params.seed
        return (self.options.seed * 1_000_003 + int(request.request_id)) % 2**63 if own is None else own

    def _used_bytes(self, ends: dict[str, int]) -> int:
        """Bytes of the entries of all live requests, those in `ends` taken at that length."""
        lengths = [n for r in self.requests.values() if (n := ends.get(r.request_id, r.num_computed))]
        return sum(count * sum(map(part.bytes_at, lengths)) for part, count in self._parts.items())

    def _note_peak(self, step: Step) -> None:
        """Remembers the most bytes held and used, with this step's tokens written and no page given back yet."""
        used = self._used_bytes({chunk.request.request_id: chunk.start + chunk.count for chunk in step.chunks})
        self._peak = (max(self.cache.held_bytes, self._peak[0]), max(used, self._peak[1]))

    def _completion(self, request: Request) -> Completion:
        tokenizer = self.model.tokenizer
        text = "" if tokenizer is None else tokenizer.decode(request.output)
        return Completion(request.request_id, request.output, text, request.finish_reason or "", request.error)
