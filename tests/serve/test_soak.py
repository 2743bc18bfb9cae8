"""Six seconds of `make soak`, dense, on a tiny model: cancels, pressure, prefixes; and that it notices what it watches for."""

from __future__ import annotations

import pytest
import speaking

from kvlab.engine import Engine
from kvlab.lab.soak import Soak, SoakOptions, soak
from kvlab.serve.limits import ServerLimits


@pytest.mark.parametrize("seed", [0])
def test_six_seconds_of_load_leave_nothing_behind(seed):
    model = speaking.model()
    found = soak(model, SoakOptions(seconds=6, rate=20, burst=32, output=100, seed=seed))
    assert found["problems"] == []
    assert set(found["ends"]) <= {"length", "left early"} and found["ends"]["left early"] > 0
    assert found["requests"] > 30 and found["preemptions"] > 0 and found["hits"] > 0 and found["compared"] >= 1
    assert found["peak"]["running"] > 1 and found["peak"]["waiting"] > 1


def run(engine: Engine, fresh, **options) -> dict:
    return Soak(engine, fresh, SoakOptions(seconds=1.0, rate=20, prompt=20, output=6, compare=1, **options)).run()


def test_wrong_answer_is_a_problem():
    engine = speaking.engine()
    engine._seed = lambda request: 12345
    found = run(engine, speaking.engine, cancels=0)
    assert any("differs" in problem for problem in found["problems"])


def test_leaked_page_is_a_problem():
    engine = speaking.engine(check=False)
    free = engine.cache.free
    leaked = []

    def leaky(request_id, **more):
        if not leaked:
            leaked.append(engine.cache.pools[0].allocate(1))
        return free(request_id, **more)

    engine.cache.free = leaky
    engine.cache.check_invariants = lambda: None
    found = run(engine, speaking.engine)
    assert any("bytes of pages are held" in problem for problem in found["problems"])


def test_standstill_is_a_problem(monkeypatch):
    monkeypatch.setattr("kvlab.lab.soak.STALL_S", 1.0)
    engine = speaking.engine()
    engine.step = lambda: []
    found = run(engine, speaking.engine)
    assert any("deadlock" in problem for problem in found["problems"])


def refuse(*arguments, **more):
    raise ValueError("no request is taken")


TURNED_AWAY = {
    "full": (429, lambda patch, engine: patch(LIMITS, lambda **own: ServerLimits(max_waiting=0))),
    "too large": (413, lambda patch, engine: patch(LIMITS, lambda **own: ServerLimits(max_body_bytes=9))),
    "refused": (413, lambda patch, engine: patch(engine, "add_request", refuse)),
}
LIMITS = "kvlab.lab.soak.ServerLimits"


@pytest.mark.parametrize("name", TURNED_AWAY)
def test_whoever_is_turned_away_is_a_problem(monkeypatch, name):
    engine, (status, change) = speaking.engine(), TURNED_AWAY[name]
    change(monkeypatch.setattr, engine)
    problems = run(engine, speaking.engine, cancels=0)["problems"]
    assert any(problem.startswith(f"HTTP {status}: ") for problem in problems), problems


def test_a_run_that_shows_nothing_is_a_problem():
    """Nobody was compared and nobody gave way: nothing went wrong because nothing was asked."""
    problems = Soak(speaking.engine(), speaking.engine, SoakOptions(seconds=0)).run()["problems"]
    assert problems == ["preemptions 0: the run shows nothing", "compared 0: the run shows nothing"]


GROWTH = {
    "flat": (lambda i: 1000, []),
    "by a twenty-fifth": (lambda i: 1000 + 0.5 * i, []),
    "steadily": (lambda i: 1000 + 2 * i, ["memory grew"]),
    "steadily, and back for a moment": (lambda i: 1000 if i > 98 else 1000 + 2 * i, ["memory grew"]),
    "all at once": (lambda i: 1000 + 60 * (i > 74), ["memory grew"]),
    "while it warms up": (lambda i: 1000 - 700 * (i < 25), []),
    "for a moment": (lambda i: 1000 + 900 * (i == 90), []),
}


@pytest.mark.parametrize("name", GROWTH)
def test_memory_that_grows_is_a_problem(name):
    """Medians of a quarter each: neither one sample nor the start of a run decides."""
    size, wanted = GROWTH[name]
    one = Soak(None, None, SoakOptions(), memory=[(i / 2, int(size(i))) for i in range(100)])
    growth = one._check_memory()
    assert [problem[:11] for problem in one.problems] == wanted and (growth > 1.05) == bool(wanted)


def test_a_run_too_short_or_a_system_that_does_not_tell_says_nothing_of_memory():
    for memory in ([(i / 2, 1000 + 100 * i) for i in range(39)], [(i / 2, 0) for i in range(100)]):
        one = Soak(None, None, SoakOptions(), memory=memory)
        assert one._check_memory() is None and one.problems == []
