"""What the GPU bench would measure: each row is run once in the interpreter at a small size, with a clock that lies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvlab.lab import bench_gpu, bench_gpu_engine, bench_gpu_models, bench_gpu_rows
from kvlab.lab import bench_gpu_time as clock
from kvlab.lab.kernels import configs, more_configs
from kvlab.lab.kernels.cost import attention_cost
from kvlab.lab.kernels.shapes import SHAPES, Shape
from kvlab.lab.small_model import small_model

CPU = torch.device("cpu")
MILLISECOND = 1e-3


def tiny(shape: Shape) -> Shape:
    """One KV head with two query heads, two sequences of 40 tokens."""
    return replace(shape, heads=2, kv_heads=1, context=40, batch=2)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One layer of small shapes, and a millisecond for whatever runs."""
    for name, shape in SHAPES.items():
        monkeypatch.setitem(SHAPES, name, tiny(shape))
    for name, value in {
        "B": 2,
        "CONTEXT": 160,
        "CHOSEN": 3,
        "COPIED": 5,
        "SSD": (4, 16, 1, 16),
        "DELTA": (4, 2, 16, 16),
        "HEADS": 3,
    }.items():
        monkeypatch.setattr(more_configs, name, value)
    monkeypatch.setattr(more_configs, "LLAMA", replace(SHAPES["llama-3-8b"], context=160))
    monkeypatch.setattr(bench_gpu_rows, "BATCHES", (2,))
    layers(monkeypatch, 1)
    for name, value in {"RAGGED": (20, 9, 1), "NEW": 9, "CHUNKS": 2, "WRITTEN": 3}.items():
        monkeypatch.setattr(configs, name, value)
    yield


def layers(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """`count` layers take `count` milliseconds."""
    monkeypatch.setattr(clock, "layers_for", lambda n_bytes, device, built=0: count)
    monkeypatch.setattr(clock, "l2_cache", lambda device: 2**20)
    monkeypatch.setattr(clock, "seconds", lambda run: (run() and 0) or count * MILLISECOND)


def measured(rows: dict) -> dict:
    return {name: run() for name, run in rows.items()}


def check_rates(found: dict, count: int = 1) -> None:
    """A layer took a millisecond, for the bytes of one."""
    for name, row in found.items():
        assert row["us"] == pytest.approx(1000) and row["layers"] == count, name
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / MILLISECOND / 1e9), name
        assert type(row["bytes"]) is int and row["bytes"] > 0 and row["tflops"] >= 0, name


def test_decodes_count_the_bytes_of_their_format(monkeypatch: pytest.MonkeyPatch) -> None:
    layers(monkeypatch, 2)
    found = measured(bench_gpu_rows.decode_rows(CPU))
    assert list(found) == [f"{fmt} x 2" for fmt in bench_gpu_rows.FORMATS]
    check_rates(found, 2)
    for fmt in bench_gpu_rows.FORMATS:
        assert found[f"{fmt} x 2"]["bytes"] == attention_cost(replace(SHAPES["llama-3-8b"], fmt=fmt)).bytes
    assert found["bf16 x 2"]["bytes"] > found["fp8_e4m3 x 2"]["bytes"] > found["int4 x 2"]["bytes"]


def test_targets_are_for_batches_of_8_and_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu_rows, "BATCHES", (1, 8))
    monkeypatch.setattr(bench_gpu_rows, "_decode", lambda shape, device: {})
    found = measured(bench_gpu_rows.decode_rows(CPU))
    aims = {name: row["target_of_copy"] for name, row in found.items() if row}
    assert aims == {"bf16 x 8": 0.8, "fp8_e4m3 x 8": 0.7, "int4 x 8": 0.55}


def rows_of_stages() -> dict:
    return {
        name: run for stage in bench_gpu_rows.STAGES for name, run in bench_gpu_rows.config_rows(stage, CPU).items()
    }


def test_a_configuration_of_every_kernel_runs() -> None:
    first: dict[str, str] = {}
    rows = rows_of_stages()
    for name in rows:
        first.setdefault(name.split("/")[0], name)
    assert set(first) >= {
        "decode", "prefill", "prefill-ragged", "verify-tree", "closed-decode", "mla-decode", "ssd-decode", "delta-decode",
        "page-scores", "selected-decode", "write", "copy-pages",
    }  # fmt: skip
    check_rates(measured({name: rows[name] for name in first.values()}))


@pytest.mark.slow
def test_every_production_configuration_runs() -> None:
    check_rates(measured(rows_of_stages()))


def test_no_kernel_is_compiled_and_never_measured() -> None:
    """All configurations of `kvlab kernels` are in a stage; the merge is part of every decode."""
    names = {c.name for c in configs.configs()}
    left = {name for name in names - set(rows_of_stages()) if not name.startswith("merge/")}
    assert left == {name for name in left if name.startswith("decode/llama-3-8b/")}, left


def test_what_is_not_installed_is_named_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(shape, device):
        raise RuntimeError("no compiler here")

    monkeypatch.setitem(bench_gpu_rows.OTHERS, "flex contiguous", compiled)
    found = bench_gpu.measure(bench_gpu.Stage(bench_gpu_rows.against_rows, 60), CPU)
    assert list(found) == ["paged x 2", "sdpa contiguous x 2", "flex contiguous x 2", "flashinfer x 2", "vllm x 2"]
    check_rates({name: found[name] for name in ("paged x 2", "sdpa contiguous x 2")})
    assert found["flex contiguous x 2"] == {"not measured": "RuntimeError: no compiler here"}
    for name in ("flashinfer", "vllm"):
        assert found[f"{name} x 2"]["not measured"].startswith(f"ModuleNotFoundError: No module named '{name}'")


def test_models_add_up_their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu_models, "CONTEXT", 64)
    monkeypatch.setattr(bench_gpu_models, "BATCH", 1)
    gemma = bench_gpu_models.model_row("gemma-3-4b", CPU)
    assert {k["kind"]: k["layers"] for k in gemma["kinds"]} == {"sliding": 29, "full": 5}
    assert gemma["ms"] == pytest.approx(34) and gemma["bytes"] == sum(k["layers"] * k["bytes"] for k in gemma["kinds"])
    jamba = bench_gpu_models.model_row("jamba-1.5-mini", CPU)
    assert jamba["not measured"] == "layers without a decode kernel" and "ms" not in jamba


def eager(run, warm_up):
    hidden = warm_up().clone()
    return lambda: hidden.copy_(run()), hidden


def test_the_engine_compares_tokens_before_it_keeps_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAB_OPS", "torch")
    monkeypatch.setattr(bench_gpu_engine, "PROMPT", 20)
    monkeypatch.setattr(bench_gpu_engine, "OUTPUT", 5)
    found = bench_gpu_engine.decode_speed(small_model(), 3, "fp32", eager)
    assert found["same_tokens"] == found["tokens"] == 15
    assert found["eager_tokens_per_s"] > 0 and found["graph_tokens_per_s"] > 0

    def stale(run, warm_up):  # a graph whose result nobody wrote
        hidden = warm_up().clone()
        return lambda: None, hidden

    wrong = bench_gpu_engine.decode_speed(small_model(), 3, "fp32", stale)
    assert wrong["same_tokens"] < 15 and wrong["not measured"] and "graph_tokens_per_s" not in wrong


def test_a_model_is_taken_that_fits_the_card() -> None:
    assert bench_gpu_engine.fitting(140 * 10**9) == "llama-3-8b"
    assert bench_gpu_engine.fitting(24 * 10**9) == "llama-3.2-1b"
    assert bench_gpu_engine.fitting(10**9) == "smollm2-135m"
    made = bench_gpu_engine.random_model("smollm2-135m", torch.device("meta"))
    assert made.config.vocab_size == 49152 and made.decoder.dtype == torch.bfloat16


def test_a_stage_stops_at_its_budget_and_says_what_it_left_out() -> None:
    now = [0.0]

    def row(name: str):
        def run() -> dict:
            now[0] += 4
            if name == "b":
                raise ValueError("does not fit")
            return {"name": name}

        return run

    stage = bench_gpu.Stage(lambda device: {name: row(name) for name in "abcd"}, 7)
    found = bench_gpu.measure(stage, CPU, lambda: now[0])
    assert found == {"a": {"name": "a"}, "b": {"not measured": "ValueError: does not fit"}, "left out": ["c", "d"]}
    # with a check of up to two minutes the whole run stays under eight
    assert sum(s.budget_s for s in bench_gpu.STAGES.values()) <= 360


NOW = {"commit": "c1", "device": "H200", "date": "today", "cuda": "13", "driver": "1", "versions": {}, "what": "all"}


def planted(**stages: dict) -> dict:
    """A result with these stages, all of NOW."""
    return {"stages": stages, "measured": {name: dict(NOW) for name in stages}, "seconds": {}}


def test_a_result_is_gone_on_with_where_it_stopped() -> None:
    assert bench_gpu.missing({}, NOW) == list(bench_gpu.NAMES)
    result = planted(check={"wrong": []}, copy={}, engine={})
    assert bench_gpu.missing(result, NOW)[:2] == ["decode", "against"]
    assert bench_gpu.missing(planted(check={"wrong": ["ssd"]}, copy={}), NOW)[:2] == ["check", "decode"]
    # what was measured stays measured after a commit, but kernels are checked again; so are those that no commit names
    for commit in ("c2", "c1+changes", "unknown"):
        assert bench_gpu.missing(result, NOW | {"commit": commit})[:2] == ["check", "decode"]
    result["measured"]["check"]["commit"] = "unknown"
    assert bench_gpu.missing(result, NOW | {"commit": "unknown"})[0] == "check"
    # another device has its own figures, and nothing that the interpreter checked counts there
    assert bench_gpu.missing(result, NOW | {"device": "B200"}) == list(bench_gpu.NAMES)


def test_each_stage_keeps_where_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file gone on with by another run: old stages keep their commit, driver and date, whatever stands on top."""
    path = tmp_path / "bench_gpu.json"
    path.write_text(json.dumps(NOW | planted(check={"wrong": []}, copy={"copy": {"gb_per_s": 4000.0}})))
    monkeypatch.setattr(bench_gpu, "measure", lambda stage, device: {"bf16 x 8": {"gb_per_s": 3000.0, "us": 1.0}})
    later = NOW | {"commit": "c2", "driver": "2", "date": "tomorrow"}
    result = bench_gpu.started(path, later)
    assert (result["commit"], result["measured"]["copy"]["commit"]) == ("c2", "c1")
    bench_gpu.run_stage("decode", CPU, result, later)
    assert {n: (m["commit"], m["driver"], m["date"]) for n, m in result["measured"].items()} == {
        "check": ("c1", "1", "today"), "copy": ("c1", "1", "today"), "decode": ("c2", "2", "tomorrow"),
    }  # fmt: skip
    # stages of which nobody knows where they are from belong to no device
    path.write_text(json.dumps(NOW | {"stages": {"check": {"wrong": []}}, "seconds": {"check": 1.0}}))
    assert bench_gpu.started(path, later)["stages"] == bench_gpu.started(path, later)["seconds"] == {}


def test_rows_say_their_share_of_the_copy() -> None:
    row = {"gb_per_s": 3000.0, "target_of_copy": 0.8}
    result = planted(copy={"copy": {"gb_per_s": 4000.0}}, decode={"bf16 x 8": dict(row), "left out": ["int4 x 8"]},
                     kernels={"write": dict(row)}, engine={"tokens": 3})  # fmt: skip
    result["measured"]["kernels"]["device"] = "another"
    bench_gpu.compared(result)
    assert result["stages"]["decode"]["bf16 x 8"]["of_copy"] == 0.75
    assert "of_copy" not in result["stages"]["kernels"]["write"], "another device's copy is no measure"
    assert result["stages"]["copy"]["copy"] == {"gb_per_s": 4000.0}
    del result["stages"]["decode"]["bf16 x 8"]["of_copy"], result["stages"]["copy"]
    bench_gpu.compared(result)
    assert "of_copy" not in result["stages"]["decode"]["bf16 x 8"]
