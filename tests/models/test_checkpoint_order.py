"""Weights that lie one behind the other in a file are used there; all others are joined by a copy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvlab.models.checkpoint import Checkpoint, save_in_order
from kvlab.models.weights import Source

SHAPES = {"q": (6, 5), "k": (2, 5), "v": (2, 5), "bias": (3,), "o": (5, 6), "half": (2, 5), "narrow": (2, 4)}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    made = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    return made | {"half": made["half"].half()}


def test_the_library_reads_what_was_written_in_another_order(tmp_path: Path, tensors: dict) -> None:
    save_in_order(tensors, tmp_path / "a.safetensors")
    read = load_file(tmp_path / "a.safetensors")
    assert read.keys() == tensors.keys() and all(torch.equal(read[n], t) for n, t in tensors.items())


def test_rows_in_order_are_one_mapped_tensor(tmp_path: Path, tensors: dict) -> None:
    save_in_order(tensors, tmp_path / "a.safetensors")
    checkpoint = Checkpoint([tmp_path / "a.safetensors"])
    joined = checkpoint.joined(["q", "k", "v"])
    assert joined is not None and torch.equal(joined, torch.cat([tensors[n] for n in "qkv"]))
    assert torch.equal(checkpoint.joined(["k", "v"]), torch.cat([tensors["k"], tensors["v"]]))
    source = Source(checkpoint, copy=False)
    taken = source.take_rows("qkv", {"q": 6, "k": 2, "v": 2}, 5)
    again = Source(checkpoint, copy=False).take_rows("qkv", {"q": 6, "k": 2, "v": 2}, 5)
    assert torch.equal(taken, joined) and taken.data_ptr() == again.data_ptr(), "a copy was made"
    assert source.named["k"].data_ptr() == taken[6:].data_ptr()


@pytest.mark.parametrize(
    "names",
    [["k", "q"], ["q", "v"], ["v", "bias"], ["o", "half"], ["half", "narrow"], ["narrow", "absent"], ["absent"]],
)
def test_anything_else_is_not_joined_in_place(tmp_path: Path, tensors: dict, names: list[str]) -> None:
    save_in_order(tensors, tmp_path / "a.safetensors")
    assert Checkpoint([tmp_path / "a.safetensors"]).joined(names) is None


def test_sorted_file_and_another_dtype_give_the_same_rows_by_a_copy(tmp_path: Path, tensors: dict) -> None:
    save_file(tensors, tmp_path / "sorted.safetensors")
    save_in_order(tensors, tmp_path / "ordered.safetensors")
    want = torch.cat([tensors[n] for n in "qkv"])
    for file, dtype in (("sorted", torch.float32), ("sorted", torch.float64), ("ordered", torch.float64)):
        source = Source(Checkpoint([tmp_path / f"{file}.safetensors"]), dtype, copy=False)
        assert torch.equal(source.take_rows("qkv", {"q": 6, "k": 2, "v": 2}, 5), want.to(dtype))


def test_wrong_shape_of_a_part_is_told_though_the_rows_lie_together(tmp_path: Path, tensors: dict) -> None:
    save_in_order(tensors, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="weight 'k': shape"):
        Source(Checkpoint([tmp_path / "a.safetensors"]), copy=False).take_rows("qkv", {"q": 6, "k": 3, "v": 1}, 5)


@pytest.mark.parametrize(
    "tensor", [torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.bfloat16), torch.ones(4, 3).T]
)
def test_what_cannot_be_written_is_told_by_name(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"tensor 'x' torch.*: must be contiguous fp32 or fp16"):
        save_in_order({"x": tensor}, tmp_path / "a.safetensors")
