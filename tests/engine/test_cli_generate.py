"""`kvlab generate` on a tiny model from a directory: what it prints, and how it fails."""

import json
import subprocess
import sys

import pytest

from kvlab.cli import main
from kvlab.engine import SamplingParams


@pytest.fixture(autouse=True)
def plain_operations(monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", "reference")


def generate(capsys, directory, *arguments):
    code = main(["generate", "--model", str(directory), *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_json_holds_tokens_bytes_and_speed(capsys, directory, tiny):
    code, out, err = generate(capsys, directory, "--prompt-ids", "5,3,8,1,40", "--max-tokens", "8", "--dtype", "fp64",
                              "--num-blocks", "12", "--block-size", "4", "--json")  # fmt: skip
    result = json.loads(out)
    assert (code, err) == (0, "")
    assert result["finish_reason"] == "length" and len(result["token_ids"]) == 8
    kv = result["kv"]
    # 3 layers, k and v, 2 heads, 6 values of 8 bytes; rows of 48 bytes need no padding
    page = 2 * 2 * 4 * 48
    assert kv["num_blocks"] == {"full": 12, "sliding7": 12}
    assert kv["predicted_bytes"] == kv["allocated_bytes"] == 12 * 3 * page
    # 12 tokens are in the cache at the end, 7 of them in the windows
    assert kv["used_bytes"] == (12 + 2 * 7) * 2 * 2 * 48
    # 3 pages in the full layer; a window that reads tokens 2 .. 8 is in 3 pages too
    assert kv["held_bytes"] == 3 * 3 * page
    assert result["tokens_per_s"] > 0 and result["first_token_s"] > 0


def test_greedy_tokens_are_the_references(capsys, directory, tiny):
    _, out, _ = generate(capsys, directory, "--prompt-ids", "5,3,8", "--max-tokens", "6", "--json", "--kv-bytes", "1MB",
                         "--dtype", "fp64")  # fmt: skip
    both = tiny("both")
    stored = {name: tensor.float().double() for name, tensor in both.state.items()}
    reference = type(both.reference)(both.config, stored)
    assert json.loads(out)["token_ids"] == reference.tokens([5, 3, 8], SamplingParams(6))


def test_without_json_the_ids_are_streamed_and_the_pool_is_told_when_it_was_chosen(capsys, directory):
    code, out, err = generate(capsys, directory, "--prompt-ids", "5,3,8", "--max-tokens", "4", "--max-num-seqs", "1")
    assert code == 0 and len(out.split()) == 4 and all(0 <= int(t) < 61 for t in out.split())
    assert err.startswith("kvlab: KV pool ") and "tokens a step" in err


def test_seeds_and_formats_do_what_they_say(capsys, directory):
    def tokens(*arguments):
        _, out, _ = generate(capsys, directory, "--prompt-ids", "5,3,8", "--json", "--num-blocks", "9", *arguments)
        return json.loads(out)

    warm = ("--temperature", "1.5", "--max-tokens", "10")
    first = tokens(*warm, "--seed", "1")["token_ids"]
    assert first == tokens(*warm, "--seed", "1", "--block-size", "5")["token_ids"]
    assert first != tokens(*warm, "--seed", "2")["token_ids"]
    assert tokens(*warm, "--top-k", "1")["token_ids"] == tokens("--max-tokens", "10")["token_ids"]
    wide, narrow = tokens()["kv"], tokens("--kv-dtype", "fp8")["kv"]
    # 6 fp32 values take rows of 32 bytes, 6 fp8 values rows of 16
    assert (narrow["dtype"], narrow["allocated_bytes"] * 2) == ("fp8_e4m3", wide["allocated_bytes"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "prompt: give a text, or --prompt-ids, not both"),
        (["text", "--prompt-ids", "1"], "prompt: give a text, or --prompt-ids, not both"),
        (["--prompt-ids", "1,x"], "--prompt-ids '1,x': must be whole numbers"),
        (["--prompt-ids", ""], "prompt: must hold at least one token"),
        (["--prompt-ids", "61"], "token id 61"),
        (["text"], "the model has no tokenizer"),
        (["--prompt-ids", "1", "--max-tokens", "0"], "max_tokens 0: must be at least 1"),
        (["--prompt-ids", "1", "--kv-dtype", "fp7"], "dtype 'fp7'"),
        (["--prompt-ids", "1", "--dtype", "int3"], "dtype 'int3'"),
        (["--prompt-ids", "1", "--kv-bytes", "0"], "bytes '0': must be a positive whole number"),
        (["--prompt-ids", "1", "--kv-bytes", "100"], "kv_bytes 100: two pages per group"),
        (["--prompt-ids", "1", "--num-blocks", "0"], "num_blocks 0: must be at least 2"),
        (["--prompt-ids", "1", "--device", "tpu9"], "device 'tpu9'"),
        (["--prompt-ids", "1", "--num-blocks", "3", "--max-tokens", "60"], "request can never fit: 60 tokens take"),
        (["--prompt-ids", "1", "--chat"], "--chat: needs a text prompt"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, directory, arguments, message):
    code, out, err = generate(capsys, directory, *arguments)
    lines = [line for line in err.splitlines() if not line.startswith("kvlab: KV pool")]
    assert (code, out, len(lines)) == (2, "", 1)
    assert lines[0].startswith("kvlab: ") and message in lines[0]


def test_generating_imports_neither_transformers_nor_gguf(directory):
    script = f"""
import sys
from kvlab.cli import main
options = ["--prompt-ids", "1", "--max-tokens", "2", "--num-blocks", "9"]
assert main(["generate", "--model", {str(directory)!r}, *options]) == 0
heavy = {{"transformers", "gguf", "plotly", "anywidget", "fastapi", "huggingface_hub"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_cache_and_schedule_need_the_standard_library_alone():
    script = """
import sys
import kvlab.cache, kvlab.schedule, kvlab.specs.pages
extra = {name.split(".")[0] for name in sys.modules} & {"torch", "numpy", "numba", "safetensors"}
assert not extra, extra
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
