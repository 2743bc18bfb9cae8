"""The engine's thread: it alone touches the engine, steps while requests are alive, and sleeps otherwise.

    asyncio: submit(jobs) -> Flow          engine thread: add, step, step, ...
             async for index, delta <----- tokens of a step, handed over once per step
             flow.stop(index)       -----> one has said enough
             flow.close()           -----> abort what is left

Calls reach the thread through one queue; tokens reach asyncio through `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlab.engine import Engine, SamplingParams
from kvlab.schedule import Event, Request, SparedTokens

log = logging.getLogger("kvlab.serve")

CLOSING_SECONDS = 30.0


@dataclass(frozen=True)
class Job:
    """One completion to make: token ids, how they go on, what else `Engine.add_request` takes by name, and of how many
    completions of its prompt, which stand side by side, it is one."""

    prompt: Sequence[int]
    params: SamplingParams
    extra: dict[str, Any] = field(default_factory=dict)
    n: int = 1


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one completion; with the last ones its finish reason, and what a prefix hit spared."""

    token_ids: list[int]
    finish_reason: str | None = None
    error: str = ""
    cached_tokens: int = 0


class Flow:
    """The completions of one call, as they come. Belongs to the asyncio loop that made it.

    Attributes:
        jobs: what was asked.
    """

    def __init__(self, owner: EngineLoop, jobs: Sequence[Job]) -> None:
        self.jobs, self._owner = tuple(jobs), owner
        self.home = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()
        self._accepted: asyncio.Future[None] = self.home.create_future()
        self._open = set(range(len(self.jobs)))

    async def accepted(self) -> None:
        """Returns once the engine has taken every job.

        Raises:
            ValueError: one of them was refused; none runs then.
        """
        await self._accepted

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        while self._open:
            index, delta = await self._queue.get()
            if index not in self._open:
                continue
            if delta.finish_reason is not None:
                self._open.discard(index)
            yield index, delta

    def stop(self, index: int) -> None:
        """Ends completion `index` as complete: a stop string is in its text, which only the reader of the flow sees."""
        if index in self._open:
            self._open.discard(index)
            self._owner.call(lambda: self._owner.stop_one(self, index))

    def close(self) -> None:
        """Ends what has not ended; may be called more than once."""
        if not self._accepted.done():
            self._accepted.cancel()
        self._owner.call(lambda: self._owner.end(self))

    def settle(self, error: Exception | None) -> None:
        """Called in the flow's own loop: the engine took the jobs, or said why not."""
        if self._accepted.cancelled() or self._accepted.done():
            return
        if error is None:
            self._accepted.set_result(None)
        else:
            self._open.clear()
            self._accepted.set_exception(error)

    def put(self, index: int, delta: Delta) -> None:
        """Called in the flow's own loop: tokens of completion `index`."""
        self._queue.put_nowait((index, delta))


@dataclass
class _Live:
    """A request of the engine and the completion it belongs to."""

    flow: Flow
    index: int
    request: Request
    sent: int
    cached: int = 0


class EngineLoop:
    """A thread around an engine.

    Args:
        together: told the ids of the requests that are one prompt's completions.

    Attributes:
        engine: touched by the thread alone once `start` was called.
        failure: what ended the thread, if it was not `stop`.
    """

    def __init__(self, engine: Engine, together: Callable[[Sequence[str]], object] = lambda ids: None) -> None:
        self.engine, self._together = engine, together
        self.failure: BaseException | None = None
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._live: dict[str, _Live] = {}
        self._spared = SparedTokens()
        self._stopping = False
        # jobs handed in and not ended, counted by the asyncio side's calls and the thread's answers
        self._count, self._lock = 0, threading.Lock()
        self._at_rest = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvlab-engine", daemon=True)
        engine.events.subscribe(self._hear)

    @property
    def num_live(self) -> int:
        """Completions asked for and not ended."""
        return self._count

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive() and not self._stopping

    def start(self) -> EngineLoop:
        """Itself, running."""
        self._thread.start()
        return self

    def stop(self, timeout: float = 10.0) -> None:
        """Aborts what is alive and ends the thread; a disk gets CLOSING_SECONDS more for what was saved.

        Raises:
            RuntimeError: a step took longer than `timeout` seconds.
        """
        if self._thread.is_alive():
            self.call(self._stop)
            if not self._at_rest.wait(timeout):
                raise RuntimeError(f"the engine's thread did not end within {timeout} s")
            self._thread.join(CLOSING_SECONDS)
            if self._thread.is_alive():
                log.warning("not all that was saved reached the disk in time; it is computed again when needed")

    def drop(self, reason: str) -> None:
        """Ends every completion under way; whoever waits for it is told the reason."""
        self.call(lambda: self._drop_live(reason))

    def submit(self, jobs: Sequence[Job]) -> Flow:
        """The flow of `jobs`' tokens; called inside an asyncio loop.

        Raises:
            RuntimeError: the thread has ended.
        """
        flow = Flow(self, jobs)
        with self._lock:
            if self._stopping or not self._thread.is_alive():
                raise RuntimeError(f"the engine has stopped ({self.failure or 'shutdown'})")
            self._count += len(flow.jobs)
            self._calls.put(lambda: self._begin(flow))
        return flow

    def call(self, function: Callable[[], None]) -> None:
        """Has `function` run in the engine's thread, between two steps."""
        self._calls.put(function)

    # in the thread

    def end(self, flow: Flow) -> None:
        """Aborts the requests of `flow` that are alive."""
        for request_id, live in list(self._live.items()):
            if live.flow is flow:
                # after a step that failed half-way the scheduler is not to be trusted with more
                if self.failure is None:
                    self.engine.abort(request_id)
                self._forget(request_id)

    def stop_one(self, flow: Flow, index: int) -> None:
        """Ends one completion of `flow` if it is alive."""
        for request_id, live in list(self._live.items()):
            if live.flow is flow and live.index == index:
                if self.failure is None:
                    self.engine.stop(request_id, "a stop string")
                self._forget(request_id)

    def _run(self) -> None:
        try:
            while True:
                self._take_calls(wait=not self.engine.requests)
                if self._stopping:
                    break
                if self.engine.requests:
                    self.engine.step()
                    self._hand_over()
        except BaseException as error:
            log.exception("the engine's thread ended")
            self.failure = error
        finally:
            self._end_all()
            self._at_rest.set()
            self._close_engine()

    def _close_engine(self) -> None:
        """What was saved reaches the disk; a failure there, or on a device that is in error, ends nothing else."""
        try:
            self.engine.close()
        except Exception:
            log.exception("what was saved did not all reach the disk")

    def _take_calls(self, wait: bool) -> None:
        try:
            while True:
                self._calls.get(block=wait)()
                wait = False
        except queue.Empty:
            pass

    def _begin(self, flow: Flow) -> None:
        ids: list[str] = []
        try:
            if self._stopping:
                raise ValueError("the engine has stopped")
            for index, job in enumerate(flow.jobs):
                ids.append(self.engine.add_request(job.prompt, job.params, **job.extra))
                request = self.engine.requests[ids[-1]]
                self._live[ids[-1]] = _Live(flow, index, request, request.num_prompt)
        except (ValueError, TypeError) as refused:
            taken = sum(live.flow is flow for live in self._live.values())
            self.end(flow)
            self._add_count(taken - len(flow.jobs))
            self._tell(flow, lambda error=refused: flow.settle(error))
        else:
            while ids:
                n = flow.jobs[-len(ids)].n
                self._together(ids[:n])
                ids = ids[n:]
            self._tell(flow, lambda: flow.settle(None))

    def _hand_over(self) -> None:
        """Gives each flow what its requests got in the last step, one call per asyncio loop."""
        news: dict[asyncio.AbstractEventLoop, list[tuple[Flow, int, Delta]]] = {}
        for request_id, live in list(self._live.items()):
            request = live.request
            if len(request.tokens) <= live.sent and not request.finish_reason:
                continue
            tokens, live.sent = request.tokens[live.sent :].tolist(), len(request.tokens)
            delta = Delta(tokens, request.finish_reason, request.error, live.cached)
            news.setdefault(live.flow.home, []).append((live.flow, live.index, delta))
            if request.finish_reason:
                self._forget(request_id)
        for home, items in news.items():
            self._post(home, lambda items=items: [flow.put(index, delta) for flow, index, delta in items])

    def _forget(self, request_id: str) -> None:
        if self._live.pop(request_id, None):
            self._add_count(-1)

    def _hear(self, event: Event) -> None:
        spared = self._spared.hear(event)
        if spared and (live := self._live.get(event.request_id)):
            live.cached = sum(spared.values())

    def _add_count(self, count: int) -> None:
        with self._lock:
            self._count += count

    def _stop(self) -> None:
        self._stopping = True

    def _end_all(self) -> None:
        """Tells every flow that waits, those included whose call nobody has taken yet."""
        with self._lock:
            self._stopping = True
        self._take_calls(wait=False)
        self._drop_live(f"the engine has stopped ({self.failure or 'shutdown'})")

    def _drop_live(self, error: str) -> None:
        for request_id, live in list(self._live.items()):
            if self.failure is None:
                self.engine.abort(request_id)
            self._forget(request_id)
            delta = Delta([], "error" if self.failure else "abort", error)
            self._tell(live.flow, lambda live=live, delta=delta: live.flow.put(live.index, delta))

    def _tell(self, flow: Flow, function: Callable[[], None]) -> None:
        self._post(flow.home, function)

    def _post(self, home: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
        try:
            home.call_soon_threadsafe(function)
        except RuntimeError:
            # its loop is closed: nobody reads any more
            for request_id, live in list(self._live.items()):
                if live.flow.home is home:
                    if self.failure is None:
                        self.engine.abort(request_id)
                    self._forget(request_id)
