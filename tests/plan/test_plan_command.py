"""`kvlab plan` as a user calls it: a process of its own, its output, its exit code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = {
    "model_type": "mistral", "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8, "head_dim": 32,
    "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 1000, "sliding_window": 64,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip


def kvlab(*words: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from kvlab.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_a_planner_without_network_or_files_asks_by_name():
    done = kvlab("plan", "llama-3.1-70b", "--context", "32k", "--gpu", "h200", "--tp", "2", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert (found["context"], found["kv_bytes"], found["kv_bytes_per_gpu"]) == (32768, 10_737_418_240, 5_368_709_120)


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_config_file_or_its_folder_is_a_target(config_file: Path, as_folder: bool):
    done = kvlab("plan", str(config_file.parent if as_folder else config_file), "--json", "--context", "1000")
    found = json.loads(done.stdout)
    assert found["model_type"] == "mistral"
    assert found["kv_bytes"] == 3 * 64 * 2 * 2 * 32 * 2
    assert found["layers"] == [{"kind": "sliding", "count": 3, "window": 64, "bytes_per_token": 256, "state_bytes": 0}]


def test_every_option_reaches_the_plan(config_file: Path):
    text = (
        "--context 2k --batch 5 --kv-dtype int8 --weight-dtype fp8 --state-dtype bf16 --conv-dtype fp32 --tp 2 --pp 3 "
        "--cp 4 --gpu mi300x --policy paged --block-size 32 --gpu-util 0.5 --reserve 1GB --image-tokens 7 "
        "--max-batched-tokens 64"
    )
    found = json.loads(kvlab("plan", str(config_file), *text.split(), "--json").stdout)
    want = {
        "context": 2048, "batch": 5, "kv_dtype": "int8", "weight_dtype": "fp8_e4m3", "state_dtype": "bf16",
        "conv_dtype": "fp32", "tp": 2, "pp": 3, "cp": 4, "num_gpus": 24, "policy": "paged", "block_size": 32,
    }  # fmt: skip
    assert {k: found[k] for k in want} == want
    assert found["hardware"]["gpu"] == "mi300x"
    assert (found["memory"]["gpu_util"], found["memory"]["reserve_bytes"]) == (0.5, 10**9)
    # window 64 + 64 in flight: 127 tokens, over at most 5 pages of 32
    assert found["policies"]["paged"]["groups"][0]["pages"] == 5
    mix = json.loads(kvlab("plan", str(config_file), "--prompt", "1k", "--output", "100", "--json").stdout)
    assert (mix["context"], mix["mix"]["prompt"], mix["mix"]["output"]) == (1124, 1024, 100)


def test_the_text_explains_itself(config_file: Path):
    done = kvlab("plan", str(config_file), "--context", "4k")
    assert done.returncode == 0
    assert "2 (K, V) x 3 layers x 2 KV heads x 32 x 2 bytes = 768 bytes per token" in done.stdout
    assert "768 x min(4,096, 64)  = 49,152" in done.stdout


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["no-such-model-at-all"], "no-such-model-at-all"),
        (["llama-3-8b", "--context", "twelve"], "context 'twelve'"),
        (["llama-3-8b", "--kv-dtype", "int3"], "kv_dtype 'int3'"),
        (["llama-3-8b", "--tp", "7"], "tp 7"),
        (["llama-3-8b", "--gpu", "abacus"], "gpu 'abacus'"),
        (["deepseek-v4-pro", "--policy", "vllm"], "not modelled"),
        (['{"model_type": "transformer9000"}'], "transformer9000"),
        (["{not json"], "not JSON"),
        (["{}"], "model_type"),
    ],
)
def test_what_cannot_be_sized_ends_with_code_2_and_one_line(words: list[str], reason: str):
    done = kvlab("plan", *words, "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert reason in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_planning_imports_nothing_heavy():
    code = (
        "import sys; from kvlab.cli import main; main(['plan', 'llama-3-8b', '--policy', 'vllm']); "
        "main(['plan', 'llama-3-8b', '--json']); from kvlab.plan.explore import explorer_state; explorer_state({}); "
        "outside = {m.partition('.')[0] for m in sys.modules} - set(sys.stdlib_module_names) - {'kvlab', '__main__'}; "
        "print(sorted(m for m in outside if not m.startswith(('_', 'sitecustomize'))), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    seen = set(done.stderr.strip().strip("[]").replace("'", "").split(", ")) - {""}
    assert not seen & {"torch", "numpy", "numba", "transformers", "gguf", "plotly", "anywidget"}, seen
