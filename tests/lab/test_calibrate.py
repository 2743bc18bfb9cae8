"""Calibration on a machine whose steps take what a known clock says: the rates come back, the error is nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))
import speaking

from kvlab.lab import calibrate
from kvlab.simulate.clock import Machine, StepClock


def test_steps_are_told_with_what_they_computed(monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", "reference")
    steps = calibrate.timed_steps(speaking.model(), 2, 40, max_batched_tokens=64)
    shapes = [[(c.start, c.count, c.samples) for c in chunks] for chunks, _ in steps]
    # 64 of 80 prompt tokens, then the rest beside the first one's decode, then decodes of both
    assert shapes[:2] == [[(0, 40, True), (0, 24, False)], [(40, 1, True), (24, 16, True)]]
    assert sum(c[1] for step in shapes for c in step) == 2 * (40 + calibrate.NEW - 1)
    assert all(seconds > 0 for _, seconds in steps)


def test_a_machine_that_keeps_the_clock_is_measured_exactly(monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", "reference")
    model = speaking.model()
    true = Machine(1e9, 2e9, 3e-3, sequence_s=1e-3)
    clock = StepClock(calibrate.plan_of(model), true)
    real = calibrate.timed_steps

    # the longest prompt must fit the tiny model
    def exact(own, sequences, prompt, max_batched_tokens=512):
        steps = real(own, sequences, min(prompt, 200), max_batched_tokens)
        return [(chunks, clock.seconds(chunks)) for chunks, _ in steps]

    monkeypatch.setattr(calibrate, "timed_steps", exact)
    found = calibrate.measure(model, 1e9)
    assert found.overhead_s == pytest.approx(3e-3) and found.sequence_s == pytest.approx(1e-3)
    assert found.flops == pytest.approx(2e9)
    rows = calibrate.errors(model, found, [(2, 60), (5, 100)])
    assert max(abs(e) for row in rows for e in row["errors"]) < 1e-6
