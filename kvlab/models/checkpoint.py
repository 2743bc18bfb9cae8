"""Checkpoint directories: config.json and safetensors, mapped, never pickles.

Tensors that lie one behind the other in a file can be had as one without a copy (`Checkpoint.joined`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def read_config(directory: Path) -> dict[str, Any]:
    """The parsed config.json of `directory`.

    Raises:
        ValueError: there is none, or it is not a JSON object.
    """
    return _read_object(directory / "config.json")


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a model directory holds a config.json and safetensors")
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    return parsed


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of `directory`: those its index names, or all.

    Raises:
        ValueError: none, an index that names a missing file, or only pickles (which can run code when read).
    """
    index = directory / INDEX
    if index.is_file():
        names = sorted(set(_read_object(index).get("weight_map", {}).values()))
        # a name from an index must stay inside the directory
        files = [directory / Path(name).name for name in names]
        if absent := [f.name for f in files if not f.is_file()]:
            raise ValueError(f"{directory}: its index names {', '.join(absent[:3])}, which is not there")
        return files
    files = sorted(directory.glob("*.safetensors"))
    if files:
        return files
    if any(f.suffix in PICKLES for f in directory.iterdir()):
        raise ValueError(f"{directory}: holds pickled weights only; they can run code when read, so none are: "
                         "convert them to safetensors")  # fmt: skip
    raise ValueError(f"{directory}: no safetensors file")


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of safetensors files by name, each mapped into memory when it is asked for.

    Raises:
        ValueError: a file that is truncated or not safetensors.
    """

    def __init__(self, files: list[Path]) -> None:
        from safetensors import SafetensorError, safe_open

        self._files: dict[str, Any] = {}
        self._maps: dict[str, _Map] = {}
        for path in files:
            try:
                opened = safe_open(path, framework="pt")
                self._files.update(dict.fromkeys(opened.keys(), opened))
                self._maps.update(dict.fromkeys(opened.keys(), _Map(path)))
            except SafetensorError as error:
                raise ValueError(f"{path}: truncated, or not a safetensors file ({error})") from error

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def joined(self, names: Sequence[str]) -> Tensor | None:
        """The tensors `names` as one, [sum of rows, ...], mapped; None where they do not lie one behind the other."""
        found = self._maps.get(names[0])
        return None if found is None else found.joined(names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files


class _Map:
    """One safetensors file, checked before by the library: where its tensors lie, and its bytes as one storage."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header: dict[str, Any] = {}
        self._storage: torch.UntypedStorage | None = None
        self._start = 0

    def joined(self, names: Sequence[str]) -> Tensor | None:
        """See `Checkpoint.joined`."""
        self._open()
        parts = [self._header.get(name) for name in names]
        if None in parts or any(a["data_offsets"][1] != b["data_offsets"][0] for a, b in pairwise(parts)):
            return None
        kinds = {(part["dtype"], *part["shape"][1:]) for part in parts}
        dtype = _DTYPES.get(parts[0]["dtype"])
        first = self._start + parts[0]["data_offsets"][0]
        if len(kinds) != 1 or dtype is None or first % dtype.itemsize:
            return None
        shape = (sum(part["shape"][0] for part in parts), *parts[0]["shape"][1:])
        strides = torch.empty(shape, device="meta").stride()
        return torch.empty(0, dtype=dtype).set_(self._storage, first // dtype.itemsize, shape, strides)

    def _open(self) -> None:
        if self._storage is not None:
            return
        with self._path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            self._header, self._start = json.loads(file.read(size)), 8 + size
        total = self._path.stat().st_size
        self._storage = torch.UntypedStorage.from_file(str(self._path), shared=False, nbytes=total)


def save_in_order(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes a safetensors file in which the tensors, contiguous fp32 or fp16, lie in the order given.

    The library's writer sorts them by name, which parts the rows that are multiplied together.

    Raises:
        ValueError: another dtype, or a tensor that is not contiguous.
    """
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.float16) or not tensor.is_contiguous():
            raise ValueError(f"tensor {name!r} {tensor.dtype}: must be contiguous fp32 or fp16")
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.numpy().data)
