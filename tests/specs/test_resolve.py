"""What `kvlab plan TARGET` understands, and the one line it answers when it does not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvlab.specs import resolve as module
from kvlab.specs.resolve import resolve

CONFIG = {"model_type": "opt", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_catalogue_name_and_hub_id_need_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "from_hub", lambda repo_id: pytest.fail("asked the hub"))
    assert resolve("Llama-3.1-70B").name == "llama-3.1-70b"
    assert resolve("Qwen/Qwen3-8B").source == "catalogue (config.json)"


def test_a_file_its_folder_and_a_path_object(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    for target in (file, tmp_path, str(tmp_path)):
        found = resolve(target)
        assert (found.name, found.config, found.source) == (tmp_path.name, CONFIG, str(file))
    other = file.rename(tmp_path / "tiny.json")
    assert resolve(str(other)).name == "tiny"


def test_a_folder_named_like_a_catalogue_model_needs_a_leading_dot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    assert resolve("gpt2").config["model_type"] == "gpt2"
    assert resolve("./gpt2").config["model_type"] == "opt"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "must hold a JSON object, holds a list"),
        ("{}", "no model_type"),
        ('{"model_type": 3}', "no model_type"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_what_is_no_config(tmp_path: Path, content: str | bytes, words: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=words) as error:
        resolve(file)
    assert "\n" not in str(error.value)


def test_a_checkpoint_given_by_mistake_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "weights.json"
    with file.open("wb") as out:
        out.truncate(2**30)  # sparse
    with pytest.raises(ValueError, match=r"1,073,741,824 bytes is no config.json"):
        resolve(file)


def test_missing_paths_say_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such file"):
        resolve(tmp_path / "none.json")
    with pytest.raises(ValueError, match=r"there is no config.json in this folder"):
        resolve(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ValueError, match="a GGUF file has none: name its model instead"):
        resolve(tmp_path)


def test_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no catalogue name, path or hub id .*; did you mean qwen3-8b"):
        resolve("qwen3-8")
    with pytest.raises(ValueError, match="must be a catalogue name"):
        resolve("  ")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as if it were not installed
    with pytest.raises(ValueError, match="hub ids need huggingface_hub"):
        resolve("some-org/some-model")


def test_an_unreachable_hub_answers_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_reachable", lambda endpoint: False)
    with pytest.raises(ValueError, match=r"not in the local hub cache, and https.* is not reachable") as error:
        resolve("some-org/some-model")
    assert "\n" not in str(error.value)
