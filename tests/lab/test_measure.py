"""Measure: the engine's pool has the predicted bytes, tokens come out, and it can be refused or cancelled."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kvlab.lab import measure as module  # noqa: E402
from kvlab.lab.measure import CancelledError, measure  # noqa: E402
from kvlab.plan.explore import ATTENTION  # noqa: E402

TINY = {
    "model": "own", "attention": "gqa", "layers": 3, "query_heads": 4, "kv_heads": 2, "head_dim": 16, "context": 96,
    "batch": 3,
}  # fmt: skip


@pytest.fixture(autouse=True)
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of a made-up device: what this one does is no matter of a test."""
    monkeypatch.setattr(module, "device_rates", lambda device, dtype: module.Rates(1e9, 1e12))


@pytest.mark.parametrize(
    ("controls", "kv_bytes"),
    [
        # layers x pages (6 each of 3 sequences, and the null page) x 16 tokens x (k and v x 2 heads x 16 values)
        ({"kv_dtype": "bf16"}, 3 * 19 * 16 * 2 * 2 * 32),
        ({"kv_dtype": "fp8_e4m3"}, 3 * 19 * 16 * 2 * 2 * 16),
        # an fp32 scale for each token and head, of keys and of values
        ({"kv_dtype": "int8"}, 3 * 19 * 16 * 2 * 2 * (16 + 4)),
        # a window of 32: 3 pages at most while one token is in flight
        ({"attention": "sliding", "window": 32}, 3 * 10 * 16 * 2 * 2 * 32),
        ({"attention": "mqa"}, 3 * 19 * 16 * 2 * 1 * 32),
    ],
)
def test_measured_bytes_are_the_predicted_bytes(controls: dict, kv_bytes: int) -> None:
    found = measure({**TINY, **controls})
    assert found["measured"]["kv_bytes"] == found["predicted"]["kv_bytes"] == kv_bytes
    assert found["measured"]["tokens_per_s"] > 0
    assert 1 <= len(found["step_seconds"]) <= module.STEPS - 1
    assert "exactly the predicted" in found["sentence"] and found["factors"] == {"layers": 1.0, "width": 1}


@pytest.mark.parametrize("attention", ATTENTION)
def test_every_kind_of_shape_is_measured(attention: str) -> None:
    # a page of compressed entries covers 128 tokens
    found = measure(
        {**TINY, "context": 160, "attention": attention, "window": 32, "full_every": 3, "latent_dim": 24, "rope_dim": 8}
    )
    assert found["measured"]["kv_bytes"] == found["predicted"]["kv_bytes"] > 0
    assert found["measured"]["tokens_per_s"] > 0


def test_the_predicted_speed_is_bytes_over_the_devices_rate() -> None:
    found = measure(TINY)
    hidden, ffn, head = 64, 224, 16
    layer = 2 * hidden * hidden + 2 * hidden * 2 * head + 3 * hidden * ffn + 2 * hidden
    weights = 4 * (3 * layer + 4096 * hidden + hidden + 3 * hidden)  # the table is looked up: a row a token
    cache = 3 * 3 * 96 * 2 * 2 * head * 2
    assert found["predicted"]["tokens_per_s"] == pytest.approx(3 / ((weights + cache) / 1e9))


def test_what_the_engine_does_not_run_is_refused_before_anything_is_built() -> None:
    with pytest.raises(ValueError, match="the engine does not run this shape yet"):
        measure({"model": "qwen-7b"})
    with pytest.raises(ValueError, match=r"kivi2.*stores groups of tokens"):
        measure({**TINY, "kv_dtype": "kivi2"})


@pytest.mark.parametrize("attention", ["gqa", "mla"])
@pytest.mark.parametrize("kv_dtype", ["fp8_e5m2", "int8", "int4", "nvfp4", "mxfp4", "int3_had"])
def test_packed_formats_are_measured_too(monkeypatch: pytest.MonkeyPatch, attention: str, kv_dtype: str) -> None:
    monkeypatch.setenv("KVLAB_OPS", "torch")
    shape = {**TINY, "layers": 1, "attention": attention, "latent_dim": 24, "rope_dim": 8, "kv_dtype": kv_dtype}
    found = measure(shape)
    assert found["measured"]["kv_bytes"] == found["predicted"]["kv_bytes"] > 0


@pytest.mark.parametrize("enough", [True, False])
def test_a_first_step_that_compiles_for_long_can_be_left(monkeypatch: pytest.MonkeyPatch, enough: bool) -> None:
    begun, ended = threading.Event(), threading.Event()

    def compiles(engine) -> None:
        begun.set()
        ended.wait(60)
        raise ArithmeticError("the step failed")

    monkeypatch.setattr(module.Engine, "step", compiles)
    if not enough:  # nobody cancels: what the step raises is raised
        ended.set()
    with pytest.raises(CancelledError if enough else ArithmeticError):
        measure(TINY, cancelled=lambda: enough and begun.is_set())
    assert begun.is_set() and ended.is_set() != enough
    ended.set()


def test_a_measurement_waits_for_the_one_that_was_left_and_can_be_left_while_it_waits(monkeypatch) -> None:
    """What still compiles has the cores that rates are measured on; a step whose measurement was left is not made."""
    told, steps = [], []
    monkeypatch.setattr(module.Engine, "step", lambda engine: steps.append(engine))
    with module._compiling:
        with pytest.raises(CancelledError):
            measure(TINY, told.append, cancelled=lambda: bool(told))
        with pytest.raises(CancelledError):
            module.first_step(object(), lambda: True)
    assert told == ["waiting until what was cancelled has compiled"]
    with module._compiling:  # behind the thread that waited
        assert not steps


def test_it_stops_when_asked() -> None:
    asked = []

    def cancelled() -> bool:
        asked.append(True)
        return len(asked) > 5

    with pytest.raises(CancelledError):
        measure(TINY, cancelled=cancelled)
    assert len(asked) == 6


def test_it_tells_what_it_is_doing() -> None:
    told: list[str] = []
    measure(TINY, told.append)
    assert told[0].startswith("building all 3 layers") and told[1].startswith("filling")
    assert told[2].startswith("first step") and "decoding" in told[3]
