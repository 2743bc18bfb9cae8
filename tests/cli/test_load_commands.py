"""What `simulate` and `replay` print, and whose clock a simulation goes by."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from kvlab.cli import main
from kvlab.cli.load_report import print_summary
from kvlab.plan.plan import make_plan
from kvlab.schedule import Chunk, Request, SamplingParams
from kvlab.simulate.clock import Machine, StepClock
from kvlab.simulate.summary import Objective, Timed, summary

TINY = {
    "model_type": "llama", "num_hidden_layers": 1, "vocab_size": 40, "hidden_size": 64, "intermediate_size": 40,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256,
    "rope_theta": 100.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
MEASURED = Machine(1e9, 2e12, 0.25, sequence_s=0.5, source="measured in a test", name="this machine")
TRACE = "random:n=1,prompt=10,output=1"


@pytest.fixture
def calibrated(monkeypatch):
    model = SimpleNamespace(device=torch.device("cpu"), dtype="fp32", hf_config=TINY, name="tiny")
    monkeypatch.setattr("kvlab.lab.calibrate.measured", lambda: (model, MEASURED))
    monkeypatch.setattr("kvlab.engine.sizing.total_memory", lambda device: 64 * 2**30)


def simulated(capsys, *words: str) -> dict:
    assert main(["simulate", TRACE, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_table_has_every_percentile_of_every_latency(capsys):
    sent = [(1, 0.5), (3, 7.0), (700, 30.0), (40_000, 400.0)]
    times = [Timed(n, 3, 0.0, [first, first + 0.004, first + 1.5]) for n, first in sent]
    result = summary(times, Objective()) | {"replayed": {"skipped_rows": {}}}
    print_summary(result)
    *_, titles, percents, every, low, middle, high = capsys.readouterr().out.splitlines()
    assert titles.split() == ["prompt", "tokens", "requests", "TTFT", "s", "ITL", "ms", "E2E", "s"]
    assert percents.split() == ["p50", "p90", "p99"] * 3
    rows = {line.split()[0]: [float(x) for x in line.split()[1:]] for line in (every, low, middle, high)}
    for name, row in result["latency"].items():
        want = [
            row[key][p] * by for key, by in (("ttft_s", 1), ("itl_s", 1e3), ("e2e_s", 1)) for p in ("p50", "p90", "p99")
        ]
        assert rows[name] == [row["requests"], *(pytest.approx(v, rel=5e-3) for v in want)]
    # each number stands under its title, and the table fits a terminal
    assert len({len(line) for line in (percents, every, low, middle, high)}) == 1 and len(low) <= 80


def test_a_simulation_says_how_long_it_took_itself(capsys):
    found = simulated(capsys, "--model", "llama-3.1-8b")
    assert found["requests"] == 1 and 0 < found["wall_seconds"] < 600
    assert found["simulated"]["gpu"] == "h100-sxm"


def test_a_trace_on_the_machine_that_was_measured(capsys, calibrated):
    """One prompt is one step: its time by hand at the measured rates, with the measured model in the engine's types."""
    found = simulated(capsys, "--calibrate", "--num-blocks", "9")
    plan = make_plan(TINY, kv_dtype="fp32", weight_dtype="fp32")
    request = Request("0", [1] * 10, SamplingParams())
    assert (
        found["latency"]["all"]["ttft_s"]["p50"]
        == StepClock(plan, MEASURED).seconds([Chunk(request, 0, 10, True)])
        > 0.75
    )
    facts = found["simulated"]
    assert (facts["gpu"], facts["clock"], facts["bandwidth_bytes_per_s"]) == ("this machine", "measured in a test", 1e9)
    # another model at the same rates, in a pool of so many bytes
    other = simulated(capsys, "--calibrate", "--model", "llama-3.1-8b", "--kv-bytes", "1GiB")
    assert other["latency"]["all"]["ttft_s"]["p50"] > found["latency"]["all"]["ttft_s"]["p50"]
    assert 0 <= 2**30 - other["simulated"]["kv_pool_bytes_per_gpu"] < 2**24


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--calibrate --model llama-3.1-70b", "this machine has 64.00 GiB"),
        ("--calibrate --model llama-3.1-8b --kv-bytes 40GiB", "this machine has 64.00 GiB"),
        ("--model llama-3.1-8b --gpu h100 --kv-bytes 70GiB", "of each GPU for a cache"),
        ("--model llama-3.1-70b --gpu l40s --kv-bytes 1GiB", "the weights leave 0 B"),
    ],
)
def test_a_pool_that_does_not_fit_beside_the_weights_is_refused(capsys, calibrated, words, why):
    assert main(["simulate", TRACE, *words.split()]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--gpu h200", "--tp 2", "--reserve 1GiB", "--gpu-util 0.5", "--step-overhead-ms 1"])
def test_what_is_of_a_gpu_is_refused_where_this_machine_is_measured(capsys, calibrated, words):
    assert main(["simulate", TRACE, "--calibrate", *words.split()]) == 2
    said = capsys.readouterr()
    assert said.err == f"kvlab: {words.split()[0]}: is not taken with --calibrate, which measures this machine\n"


def test_sharegpts_own_file_is_counted_with_the_models_tokenizer(capsys, tmp_path):
    backend = Tokenizer(WordLevel({"w": 0, "?": 1}, unk_token="?"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.save(str(tmp_path / "tokenizer.json"))
    turns = [{"from": "human", "value": "one two three"}, {"from": "gpt", "value": "four five"}]
    (tmp_path / "sharegpt.json").write_text(json.dumps([{"id": "a", "conversations": turns}] * 3, indent=1))
    trace = [
        "simulate",
        str(tmp_path / "sharegpt.json"),
        "--tokenizer",
        str(tmp_path),
        "--rate",
        "2",
        "--limit",
        "2",
        "--json",
    ]
    assert main(trace) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert (found["requests"], found["prompt_tokens"], found["output_tokens"]) == (2, 6, 4)
    assert told.err == f"kvlab: texts are counted with the tokenizer of {tmp_path.name}\n"


def test_without_a_trace_the_rates_and_the_clocks_error_are_told(capsys, monkeypatch):
    monkeypatch.setattr("kvlab.lab.calibrate.print_calibration", lambda as_json: print("rates", as_json) or 0)
    assert main(["simulate", "--calibrate", "--json"]) == 0
    assert capsys.readouterr().out == "rates True\n"
