"""Six seconds of `make soak`, dense, on a tiny model: cancels, pressure, prefixes; and that it notices what it watches for."""

from __future__ import annotations

import pytest
import speaking

from kvlab.engine import Engine
from kvlab.lab.soak import Soak, SoakOptions, soak


@pytest.mark.parametrize("seed", [0])
def test_six_seconds_of_load_leave_nothing_behind(seed):
    model = speaking.model()
    found = soak(model, SoakOptions(seconds=6, rate=20, burst=32, output=100, seed=seed))
    assert found["problems"] == []
    assert set(found["ends"]) <= {"length", "left early"} and found["ends"]["left early"] > 0
    assert found["requests"] > 30 and found["preemptions"] > 0 and found["hits"] > 0 and found["compared"] >= 1


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
