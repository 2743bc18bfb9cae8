"""Models on the kernels' path: the cache write turns the keys, and the model says what it says where they are turned before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tolerances import assert_close

from kvlab.lab.paged_run import PagedRun
from kvlab.lab.small_model import CONFIG, fill
from kvlab.models.load import LoadedModel, empty_model
from kvlab.ops.write_kv import triton_

# a plain layer; one that norms heads; half of each head turns; windows beside full layers, soft caps; interleaved pairs, of
# a part of each head too
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"model_type": "qwen3"},
    "stablelm": {"model_type": "stablelm", "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    "gemma2": {"model_type": "gemma2", "sliding_window": 4, "query_pre_attn_scalar": 12},
    "cohere": {"model_type": "cohere", "logit_scale": 0.1, "use_qk_norm": False, "layer_norm_eps": 1e-5},
    "glm4": {"model_type": "glm4", "partial_rotary_factor": 0.5, "head_dim": 12},
}
IDS = [(7 * i * i + 3) % 64 for i in range(11)]


def model_of(name: str) -> LoadedModel:
    model = empty_model(CONFIG | {"num_hidden_layers": 2} | MODELS[name], "fp32", torch.device("cpu"), name)
    fill(model, 1)
    return model


def read(model: LoadedModel, kv_dtype: str) -> torch.Tensor:
    """The stream after a prompt of nine tokens and two decodes."""
    run = PagedRun(model, kv_dtype, len(IDS))
    return torch.cat([run.read(ids) for ids in (IDS[:9], IDS[9:10], IDS[10:])])


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each launch of the write kernel turned keys."""
    found: list[bool] = []
    launch = triton_.write_launch
    monkeypatch.setattr(triton_, "write_launch", lambda *args: found.append(args[4] is not None) or launch(*args))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_write_turns_the_keys_of_every_layer(
    name: str, writes: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(name)
    late = read(model, "fp32")
    assert writes == [True] * (3 * 2), "three steps of two layers"
    monkeypatch.setenv("KVLAB_OPS", "torch")
    assert_close(name, read(model, "fp32"), late, "fp32")
    assert len(writes) == 6


def test_keys_of_a_format_of_groups_are_turned_by_the_write_too(writes: list[bool], monkeypatch) -> None:
    """What is written is the recent window, here all of it."""
    model = model_of("llama")
    late = read(model, "kivi4")
    assert writes == [True] * 6
    monkeypatch.setenv("KVLAB_OPS", "torch")
    assert_close("kivi4", read(model, "kivi4"), late, "fp32")
