"""Random schedules as data: how an engine is set up, who comes when, what happens to them. Drawn, run, and shrunk.

One that fails is made smaller while it still fails, and the error shows what is left as Python: the line
`run(Schedule("full", (Ask(3, 2),), tiers="disk"))` in a test of its own runs it again. (hypothesis draws related examples
one after another: of 50 schedules half had one request, and some features never met.)
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any
from unittest.mock import patch

from drafting import speculation
from kinds import ADAPTED, Kind, kind
from late_copies import LateCopier
from late_disk import AtOnce, LateDisk

from kvlab.cache.prefix import DESIGNS, EVICTIONS, PrefixOptions
from kvlab.engine import Engine, SamplingParams
from kvlab.engine.sampler import RowParams, sample
from kvlab.engine.tiers import TierOptions, swap_costs
from kvlab.plan.policies import default_block_size
from kvlab.schedule import Request, SchedulingPolicy
from kvlab.schedule.policy import ORDERS, VICTIMS
from kvlab.specs.pools import POOLS, pool_layout
from kvlab.specs.rollback import RollbackPolicy

OUTPUT = 4
LONGEST = 16 + OUTPUT
THEN = ["", "preempt", "preempt", "preempt", "abort", "back", "clear"]
MOST_STEPS = 400
"""No schedule here takes as many: one that does stands still."""


class Short:
    """Shown with the fields that are not as they are by default."""

    def __repr__(self) -> str:
        own = []
        for i, f in enumerate(fields(self)):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if value != f.default:
                own.append(repr(value) if i < 2 and len(own) == i else f"{f.name}={value!r}")
        return f"{type(self).__name__}({', '.join(own)})"


@dataclass(frozen=True, repr=False)
class Ask(Short):
    """One request, the steps after it, and what then happens.

    Attributes:
        text: which of the kind's texts. tokens: wanted of its answer. steps: that follow.
        then: "preempt", "abort" or "back" (a token is taken back) happens to request number `whom` of those alive,
            "clear" to the prefix cache.
    """

    text: int = 0
    tokens: int = 1
    steps: int = 0
    then: str = ""
    whom: int = 0
    priority: int = 0


@dataclass(frozen=True, repr=False)
class Schedule(Short):
    """An engine and its requests.

    Attributes:
        pages: tokens per page, in multiples of the smallest. room: pages, in tenths of what the longest text needs.
        tiers: "" none, "host", "small" (less than a request in host memory), "disk" (below a small host tier), "packed"
            (re-encoded row by row, in a type that loses nothing).
        looks: until a copy ends; -1: when somebody waits for it. Then the disk is late too, by random numbers of looks.
        drafts: "", "right", "wrong", "tree", or a method of `SpeculationOptions`.
    """

    kind: str
    asks: tuple[Ask, ...] = ()
    pages: int = 1
    pools: str = "per_kind"
    budget: int = 64
    seats: int = 4
    room: int = 60
    page_seed: int | None = None
    backwards: bool = False
    prefix: str = ""
    eviction: str = "lru"
    order: str = "fcfs"
    victim: str = "last"
    preempt: str = "recompute"
    tiers: str = ""
    looks: int = 0
    drafts: str = ""
    pad_to: int = 1


WAYS: dict[str, list[Any]] = {
    "pages": [1, 2, 4], "pools": list(POOLS), "budget": [64, 4, 8], "seats": [4, 1, 2], "room": [60, 10, 13, 17],
    "page_seed": [None, 1], "backwards": [False, True], "prefix": ["", *DESIGNS, *DESIGNS], "eviction": list(EVICTIONS),
    "order": list(ORDERS), "victim": list(VICTIMS), "preempt": ["recompute", "swap", "swap", "auto"],
    "tiers": ["", "host", "packed", "small", "disk", "disk", "packed"], "looks": [0, 2, -1],
    "drafts": ["", "right", "right", "wrong", "tree", "ngram", "lookahead"], "pad_to": [1, 4],
}  # fmt: skip
THEN = ["", "preempt", "preempt", "preempt", "abort", "back", "clear"]


def drawn(name: str, rng: random.Random) -> Schedule:
    """A schedule for a model of that kind."""
    texts = len(world(name).texts)
    asks = [
        Ask(rng.randrange(texts), rng.randint(1, OUTPUT), rng.randint(0, 3), rng.choice(THEN), rng.randrange(4), rng.randrange(3))
        for _ in range(rng.choice([2, 3, 3, 4]))
    ]  # fmt: skip
    return Schedule(name, tuple(asks), **{field: rng.choice(ways) for field, ways in WAYS.items()})


def simpler(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules with one thing less: a request, a feature, something of a request."""
    for i, ask in enumerate(schedule.asks):
        rest = (schedule.asks[:i], schedule.asks[i + 1 :])
        yield replace(schedule, asks=rest[0] + rest[1])
        for own in plainer(ask):
            yield replace(schedule, asks=(*rest[0], own, *rest[1]))
    yield from plainer(schedule, ("kind", "asks"))


def plainer(value: Any, but: Collection[str] = ()) -> Iterator[Any]:
    """`value` with one field as it is by default, or where that is a number one nearer to it."""
    for f in fields(value):
        now = getattr(value, f.name)
        if f.name not in but and now != f.default:
            yield replace(value, **{f.name: f.default})
            if type(now) is int and type(f.default) is int and abs(now - f.default) > 1 and f.name not in WAYS:
                yield replace(value, **{f.name: now - 1})


def smallest(schedule: Schedule, fails: Callable[[Schedule], bool], tries: int = 300) -> Schedule:
    """A schedule that fails too and of which nothing can be left out, as far as so many tries can tell."""
    found = True
    while found:
        found = False
        for one in simpler(schedule):
            tries -= 1
            if tries < 0:
                return schedule
            if fails(one):
                schedule, found = one, True
                break
    return schedule


@dataclass(frozen=True)
class Text:
    """A prompt, how its tokens are picked, and the `OUTPUT` tokens that follow."""

    prompt: list[int]
    params: SamplingParams
    adapted: bool
    answer: list[int]


class World:
    """The texts of a kind: they share beginnings, and some go on from another's answer.

    The answers come from one calm run, and each is what the reference picks from the logits of one forward over it.
    """

    def __init__(self, model: Kind) -> None:
        self.model, self.texts = model, []
        first, second = ([(a * i * i + i) % model.vocab for i in range(20)] for a in (7, 5))
        for prompt, seed, adapted in (
            (first[:1], None, False), (first[:7], None, False), (first[:10], 1, False), (second[:11], None, False),
            (first[:7], None, True),
        ):  # fmt: skip
            self._add(prompt, seed, adapted)
        self._add([*self.texts[1].prompt, *self.texts[1].answer[:-1], 3], 2, False)
        self._add([*self.texts[3].prompt, *self.texts[3].answer, 4], None, False)

    def _add(self, prompt: list[int], seed: int | None, adapted: bool) -> None:
        adapted = adapted and self.model.name in ADAPTED
        params = SamplingParams(OUTPUT, 0.0 if seed is None else 0.8, seed=seed, ignore_eos=True)
        size = default_block_size(self.model.model.spec, 4)
        engine = Engine(self.model.model, num_blocks=60, block_size=size)
        key = engine.adapters.add("a", self.model.adapter[0]) if adapted else ""
        request = engine.requests[engine.add_request(prompt, params, adapter=key)]
        while engine.scheduler.has_work:
            engine.step()
        positions = list(range(len(prompt), len(prompt) + OUTPUT))
        logits = self.model.logits(request.tokens.tolist()[:-1], adapted)[len(prompt) - 1 :]
        rows = RowParams.of([params] * OUTPUT, [seed or 0] * OUTPUT, positions, logits)
        assert sample(logits, rows).tolist() == request.output
        self.texts.append(Text(prompt, params, adapted, request.output))


@cache
def world(name: str) -> World:
    """The texts of that kind, made once."""
    return World(kind(name))


def engine_of(schedule: Schedule, directory: str, answers: dict[str, list[int]]) -> Engine:
    """The engine that `schedule` describes; `answers` are by request."""
    model = kind(schedule.kind)
    spec, s = model.model.spec, schedule
    block_size = default_block_size(spec, 1) * s.pages
    rollback = RollbackPolicy(4, 3, checkpoints_kept=3) if s.backwards else RollbackPolicy()
    layout = pool_layout(spec, block_size, s.pools)
    pages = layout.sequence_pages(LONGEST, s.budget, rollback)
    # drafts on states want a copy of each
    units = [2 + 4 * bool(s.drafts) + n * s.room // 10 for n in layout.units(pages)]
    unit = max(layout.page_bytes(g) for g in range(len(layout.groups)))
    host = unit * {"small": 3, "disk": max(3, sum(pages))}.get(s.tiers, 9 * sum(pages))
    disk = (directory, 1 << 20) if s.tiers == "disk" else ()
    # states are never re-encoded
    has_rows = any(hasattr(part, "format") for _, part in spec.parts())
    packed = "fp64" if s.tiers == "packed" and has_rows else None
    tiers = TierOptions(host, *disk, park_dtype=packed) if s.tiers else None
    engine = Engine(
        model.model, check=True, block_size=block_size, pools=s.pools, num_blocks=tuple(units), max_num_seqs=s.seats,
        max_batched_tokens=s.budget, page_seed=s.page_seed, pad_to=s.pad_to, rollback=rollback, tiers=tiers,
        prefix=PrefixOptions(s.prefix, s.eviction, ttl=1e-3) if s.prefix else None,
        scheduling=SchedulingPolicy(s.order, s.victim, s.preempt, swap_costs(model.model, 1e9, 1e12, 1e-6), patience=2),
        speculation=speculation(model, s.drafts, answers) if s.drafts else None,
    )  # fmt: skip
    if tiers and s.looks:
        engine.tiers.copier = LateCopier(engine.tiers.copier, None if s.looks < 0 else s.looks)
    if s.tiers == "disk":
        engine.tiers.saved.disk.pool = LateDisk(repr(s)) if s.looks else AtOnce()
    return engine


def happen(engine: Engine, ask: Ask) -> None:
    """What comes after a request's steps, to itself or another that is alive."""
    alive, running = list(engine.requests), engine.scheduler.running
    if ask.then == "clear" and engine.cache.prefix:
        engine.cache.prefix.clear()
    elif ask.then == "preempt" and running:
        engine.scheduler.preempt(running[ask.whom % len(running)].request_id, 0.0)
    elif ask.then == "abort" and alive:
        engine.abort(alive[ask.whom % len(alive)])
    elif ask.then == "back" and alive:
        go_back(engine, engine.requests[alive[ask.whom % len(alive)]])


def cool(engine: Engine) -> None:
    """What is saved is on disk alone, as if others had taken its places in host memory."""
    saved = engine.tiers.saved
    for name in [name for name, entry in saved._entries.items() if not entry.pins]:
        saved.write_down(name)
        saved.drop(name)


def go_back(engine: Engine, request: Request) -> None:
    """Takes the request's last token back once it has one, where the cache can."""
    while not request.output and not request.finish_reason:
        engine.step()
    if not request.finish_reason:
        try:
            engine.truncate(request.request_id, len(request.tokens) - 1)
        except ValueError as refused:
            assert "no copy" in str(refused) or "gave back its pages" in str(refused), refused


def finish(engine: Engine) -> None:
    """Steps until nobody is left."""
    for _ in range(MOST_STEPS):
        if not engine.scheduler.has_work:
            return
        engine.step()
    raise AssertionError(f"{len(engine.requests)} requests are alive after {MOST_STEPS} steps")


def run(schedule: Schedule) -> Counter:
    """What happened, by name.

    Raises:
        AssertionError: a request got other tokens than it gets alone, or something was left behind.
    """
    texts, answers, live, seen = world(schedule.kind).texts, {}, {}, Counter()
    # nobody pulls the plug here: a file need not reach the disk
    with tempfile.TemporaryDirectory() as directory, patch("os.fsync"):
        engine = engine_of(schedule, directory, answers)
        engine.events.subscribe(lambda event: seen.update(names_of(event)))
        key = engine.adapters.add("a", kind(schedule.kind).adapter[0]) if schedule.kind in ADAPTED else ""
        for ask in schedule.asks:
            text = texts[ask.text % len(texts)]
            params = SamplingParams(ask.tokens, text.params.temperature, seed=text.params.seed, ignore_eos=True)
            if schedule.tiers == "disk":
                cool(engine)
            name = engine.add_request(text.prompt, params, priority=ask.priority, adapter=key if text.adapted else "")
            answers[name], live[name] = text.answer[: ask.tokens], engine.requests[name]
            for _ in range(ask.steps):
                engine.step()
            happen(engine, ask)
        finish(engine)
        engine.close()
    for name, request in live.items():
        assert request.finish_reason in ("length", "abort"), request.error
        wanted = answers[name] if request.finish_reason == "length" else answers[name][: len(request.output)]
        assert request.output == wanted, f"request {name}: {request.output}, alone {wanted}"
    assert engine.kv.held_bytes == engine.pool_use.held == 0
    assert engine.kv.predicted_bytes == engine.kv.allocated_bytes
    assert not (engine.tiers and engine.tiers.in_flight)
    return seen


def names_of(event: Any) -> Iterable[str]:
    """What an event counts as."""
    yield event.kind
    if event.kind == "chunk" and "left" in event.reason:
        yield "part of a prompt"
    if event.kind == "load":
        yield f"load from {event.reason.partition(':')[0]}"
    if event.kind == "accept":
        yield "right draft" if event.tokens else "wrong draft"
    if event.kind == "finish" and event.reason.startswith("abort"):
        yield "abort"


def check(name: str, seed: int, count: int, runs: Callable[[Schedule], Iterable] = run) -> Counter:
    """What happened in `count` schedules of that seed, by name.

    Raises:
        AssertionError: one failed; the message ends with the smallest that does, as Python.
    """
    seen: Counter = Counter()

    def fails(schedule: Schedule) -> bool:
        try:
            runs(schedule)
        except Exception:
            return True
        return False

    for i in range(count):
        schedule = drawn(name, random.Random(f"{name} {seed} {i}"))
        try:
            seen.update(runs(schedule))
        except Exception as error:
            small = smallest(schedule, fails)
            raise AssertionError(f"{type(error).__name__}: {error}\nrun({small!r})\nas drawn: {schedule!r}") from error
    return seen
