"""Every command, every kind of wrong value: one line on stderr that names it, nothing on stdout, exit 2, no traceback."""

import json

import pytest
import torch
from safetensors.torch import save_file

from kvlab.cli import COMMANDS, main

LOAD = "random:n=2,prompt=4,output=2"
CSV = "num_prefill_tokens,num_decode_tokens\n"
FILES = {
    "binary": bytes(range(256)), "empty": b"", "nul.csv": CSV.encode() + b"1,\x002\n", "list.json": b"[1, 2]",
    "wide.csv": f'{CSV}1,"{"2" * 200_000}"\n'.encode(), "deep.jsonl": b'{"a":' + b"[" * 100_000,
    "deep.json": b"[" * 100_000,
    "endless.jsonl": b'{"timestamp": 0, "input_length": 1e15, "output_length": 1}',
    "infinite.jsonl": b'{"timestamp": 0, "input_length": 1e999, "output_length": 1}',
}  # fmt: skip

# what is wrong -> what the line says of it; paths are made in a folder of the test
TRACES = {
    "{folder}": "{folder}: Is a directory", "{folder}/none": "No such file", "{folder}/binary": "is no text in UTF-8",
    "{folder}/empty": "row 1: neither a JSON object", "{folder}/nul.csv": "row 2: ", "{folder}/wide.csv": "not CSV",
    "{folder}/deep.jsonl": "nested too deep", "{folder}/deep.json": "nested too deep",
    "{folder}/endless.jsonl": "must be from 1 to 16,777,216",
    "{folder}/infinite.jsonl": "must be a whole number", "random:n=x": "must be a whole number",
    "{folder}/list.json": "row 1: must be an object with a list of conversations",
    "random:rate=x": "must be a number", "random:what=1": "must be one of n, rate",
}  # fmt: skip
LOADS = {
    "--limit 0": "limit 0", "--limit x": "--limit", "--speed 0": "speed 0.0", "--rate nan": "rate nan",
    "--burstiness 0.5": "--burstiness: is of --rate", "--rate 1 --burstiness 0": "burstiness 0.0", "--clip x": "--clip 'x'",
    "--tokenizer x": "--tokenizer: counts ShareGPT's texts",
    "--clip 1": "clip 1", "--seed x": "--seed", "--slo-tpot 0": "--slo-tpot 0.0", "--what": "--what",
}  # fmt: skip
ENGINE = {
    "--dtype what": "dtype 'what'", "--device what": "device 'what'", "--kv-dtype what": "kv_dtype 'what'",
    "--block-size 0": "block_size 0", "--block-size x": "--block-size", "--num-blocks 1": "num_blocks 1",
    "--num-blocks 99999999999": "num_blocks 99999999999: take", "--kv-bytes x": "--kv-bytes 'x'", "--kv-bytes 0": "--kv-bytes '0'",
    "--kv-bytes 1": "kv_bytes 1", "--max-model-len 0": "--max-model-len '0'", "--max-model-len 1M": "max_model_len 1048576",
    "--max-num-seqs 0": "max_num_seqs 0", "--max-batched-tokens 0": "max_batched_tokens 0", "--order what": "--order",
    "--preempt swap": "--host-bytes", "--host-bytes x": "host_bytes", "--host-bytes 1": "must hold a unit",
    "--host-bytes 999999GiB": "cpu has",
    "--host-bytes 1MiB --disk-dir {folder}/binary --disk-bytes 1MiB": "is not a directory",
    "--model {folder}/none": "no such directory", "--model {folder}": "config.json", "--kv-dtype kivi2 --block-size 16":
    "must be a multiple of 32",
    "--preempt auto": "--host-bytes: is needed by --preempt auto", "--park-dtype int8": "--host-bytes: is needed by --park-dtype",
    "--park-dtype int8 --host-bytes 1MiB": "--park-dtype: needs --preempt swap or auto",
    "--park-dtype what --preempt swap --host-bytes 1MiB": "'what'",
    "--park-dtype int8 --preempt auto --host-bytes 1MiB": "--park-dtype: with --preempt auto give --link-rate",
    "--park-dtype int8 --preempt swap --host-bytes 1MiB --disk-dir x --disk-bytes 1MiB": "lossy pages are not saved",
    "--link-rate 1GB": "--link-rate: is of --preempt auto", "--victim cheapest --link-rate x": "--link-rate 'x'",
    "--victim cheapest --flop-rate 0": "--flop-rate 0.0", "--victim cheapest --flop-rate nan": "--flop-rate nan",
    "--victim cheapest --link-rate 1GB": "--victim cheapest: give both", "--draft-layers 0": "--draft-layers: is of",
    "--victim cheapest --flop-rate 1e9": "--victim cheapest: give both", "--speculate eagle --draft-tree 40,2": "at most 64",
    "--prefix-eviction what": "--prefix-eviction", "--prefix off --prefix-eviction lru": "--prefix-eviction: needs a prefix cache",
    "--prefix radix --prefix-ttl 3": "--prefix-ttl: is of --prefix-eviction ttl",
    "--prefix hash --prefix-eviction ttl --prefix-ttl 0": "ttl 0.0",
    "--speculate what": "--speculate 'what': must begin with one of", "--speculate ngram:0": "K must be from 1 to 64",
    "--speculate ngram:x": "K must be", "--speculate ngram:": "K must be", "--speculate ngram:9999": "K must be",
    "--adapt-k": "--adapt-k: is of --speculate", "--speculate ngram --draft-layers 2": "--draft-layers: is of --speculate draft",
    "--speculate draft": "--speculate draft: needs one of --draft-model and --draft-layers",
    "--speculate draft --draft-model x --draft-layers 2": "needs one of", "--speculate draft --draft-layers 2": "kept 2",
    "--speculate draft --draft-model {folder}/none": "no such directory", "--heads x": "--heads: is of --speculate medusa",
    "--speculate medusa --heads {folder}/none": "heads {folder}/none: no such file",
    "--speculate medusa --heads {folder}/binary": "{folder}/binary", "--speculate eagle": "eagle.safetensors",
    "--speculate eagle --draft-tree 2,x": "--draft-tree '2,x'", "--speculate lookahead --draft-tree 2": "--draft-tree: is of",
}  # fmt: skip
WRONG = {
    "doctor": {"what": "what"},
    "claims": {"what": "what", "--chapter x": "--chapter", "--chapter 999": "chapter 999"},
    "bench": {
        "": "what", "what": "what", "engine --repeats x": "--repeats", "engine --repeats 0": "--repeats 0",
        "prefix --repeats -1": "--repeats -1", "attention --repeats 0": "--repeats 0", "engine --only what": "load 'what'",
        "prefix --model x": "--model: is no option of bench prefix", "attention --model x": "--model: is no option",
        "prefix --only x": "--only: is no option", "attention --only what": "only what", "engine --model {folder}/none": "no such",
        "prefix --against transformers": "--against: is no option",
    },
    "kernels": {"--list --arch what": "arch 'what'", "--arch what": "arch 'what'", "--only what": "only 'what'"},
    "formats": {"what": "dtype 'what'", "--model {folder}/none": "no such"},
    "parity": {"": "config", "{folder}/none": "No such file", "{folder}": "config.json", "{folder}/binary": "not readable",
               "{folder}/list.json": "must hold a JSON object"},
    "plan": {"": "TARGET", "{folder}/binary": "not JSON", "{folder}/list.json": "must hold a JSON object", "{folder}": "config.json",
             "llama-3.1-8b --context x": "context 'x'", "llama-3.1-8b --batch 0": "batch '0'", "llama-3.1-8b --gpu x": "gpu 'x'"},
    "simulate": {"": "TRACE"} | TRACES | {f"{LOAD} {words}": said for words, said in LOADS.items()} | {
        f"{LOAD} --num-blocks 1": "num_blocks 1", f"{LOAD} --max-num-seqs 0": "max_num_seqs 0", f"{LOAD} --tp x": "tp 'x'",
        f"{LOAD} --max-model-len 0": "max_model_len '0'", f"{LOAD} --prefix x": "--prefix", f"{LOAD} --model x": "model 'x'",
    },
    "replay": {"": "TRACE"} | TRACES | {f"{LOAD} {words}": said for words, said in LOADS.items()} | {
        f"{LOAD} --url x": "url 'x'", f"{LOAD} --vocab 0": "vocab 0", f"{LOAD} --timeout 0": "timeout_s 0.0",
    },
    "serve": {f"--port 0 {words}": said for words, said in ENGINE.items()} | {
        "--port x": "--port", "--max-body x": "--max-body 'x'", "--max-waiting -1": "max_waiting -1", "--prefix x": "--prefix",
        "--prefix-ttl x": "--prefix-ttl",
        "--host 999.1.1.1 --port 0": "port 0 on 999.1.1.1",
    },
    "generate": {f"x {words}": said for words, said in ENGINE.items()} | {
        "": "prompt: give a text", "x --prompt-ids 1": "prompt: give a text", "x": "the model has no tokenizer",
        "--prompt-ids a": "--prompt-ids 'a'",
        "--prompt-ids ,": "prompt: must hold at least one token", "x --max-tokens 0": "max_tokens 0", "x --top-p 2": "top_p 2.0",
        "x --top-k -1": "top_k -1", "x --temperature nan": "temperature nan", "x --seed -1": "seed -1",
        "--prompt-ids 1,99999999": "token id 99999999",
    },
}  # fmt: skip


TINY = {
    "model_type": "llama", "num_hidden_layers": 1, "vocab_size": 40, "hidden_size": 64, "intermediate_size": 40,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256,
    "rope_theta": 100.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
LAYER = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64), "self_attn.o_proj": (64, 64),
         "mlp.gate_proj": (40, 64), "mlp.up_proj": (40, 64), "mlp.down_proj": (64, 40),
         "input_layernorm": (64,), "post_attention_layernorm": (64,)}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bad")
    for name, data in FILES.items():
        (path / name).write_bytes(data)
    (path / "config.json").write_text("[1]")
    (path / "tiny").mkdir()
    (path / "tiny" / "config.json").write_text(json.dumps(TINY))
    state = {f"model.layers.0.{name}.weight": torch.ones(shape) for name, shape in LAYER.items()}
    state |= {"model.embed_tokens.weight": torch.ones(40, 64), "model.norm.weight": torch.ones(64)}
    save_file(state, str(path / "tiny" / "model.safetensors"))
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_one_line_that_names_it(command, folder, capsys, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", "torch")
    # kernels are compiled, or would be
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    wrong = []
    for words, said in WRONG[command].items():
        small = "" if "--model" in words or command not in ("serve", "generate") else " --model {folder}/tiny"
        code = main([command, *(words + small).format(folder=folder).split()])
        told = capsys.readouterr()
        lines = told.err.splitlines()
        if code != 2 or told.out or len(lines) != 1 or said.format(folder=folder) not in lines[0]:
            wrong.append((words, code, told.err[-300:], told.out[-100:]))
    assert not wrong
