"""Checkpoint directories: config.json and safetensors, mapped, never pickles."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


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
        for path in files:
            try:
                opened = safe_open(path, framework="pt")
                self._files.update(dict.fromkeys(opened.keys(), opened))
            except SafetensorError as error:
                raise ValueError(f"{path}: truncated, or not a safetensors file ({error})") from error

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files
