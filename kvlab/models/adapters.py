"""Low-rank adapters (LoRA): small changes of a model's projections, chosen for each request.

A change belongs to a tensor of the checkpoint. Where it lies in what the model multiplies with, alone or as rows of a
fused matrix, its storage tells; the product of those rows is changed, before whatever follows it.

Source: Hu et al., LoRA, arXiv 2106.09685; file format of PEFT (`adapter_model.safetensors`, `adapter_config.json`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvlab.ops.linear import changed

_NAME = re.compile(r"(?:^|\.)(layers\.\d+\.[\w.]+?)\.lora_([AB])(?:\.\w+)?\.weight$")
PROJECTIONS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa",
    "in_proj", "out_proj", "x_proj", "in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "in_proj_a", "in_proj_b",
)  # fmt: skip
"""What can be changed: the last names of tensors that layers multiply with as they are."""


@dataclass(frozen=True, eq=False)
class Pair:
    """The change x -> B A x of one tensor; its scale is inside B.

    Attributes:
        name: of the tensor, within the model. target: the tensor, rows of what the model multiplies with.
    """

    name: str
    target: Tensor
    a: Tensor
    b: Tensor

    def first_row(self, weight: Tensor) -> int | None:
        """The row of `weight` [N, K] at which the tensor begins; None when it lies elsewhere."""
        if weight.dim() != 2 or weight.shape[1] != self.a.shape[1]:
            return None
        offset = self.target.storage_offset() - weight.storage_offset()
        return offset // weight.shape[1] if 0 <= offset < weight.numel() else None


@dataclass(frozen=True, eq=False)
class Adapter:
    """Changes of some layers' projections.

    Attributes:
        name: what people call it. digest: sha256 of its tensors and scale, as hex: the same name may get new weights.
        pairs: the changes, by the address of the storage that the changed tensor lies in.
    """

    name: str
    digest: str
    pairs: Mapping[int, Sequence[Pair]]

    @property
    def key(self) -> str:
        """What requests call it, and what keys of the prefix cache hold."""
        return f"{self.name}:{self.digest[:16]}"


def make_adapter(name: str, tensors: Mapping[str, Tensor], decoder, alpha: float | None = None) -> Adapter:
    """The adapter of these tensors, named as PEFT does, for `decoder`.

    Args:
        alpha: the change is scaled by alpha / r; None is r, no scaling.

    Raises:
        ValueError: a tensor that the model lacks or that cannot be changed, shapes that do not fit, A without B.
    """
    found: dict[str, dict[str, Tensor]] = {}
    digest = hashlib.sha256(repr(alpha).encode())
    for key in sorted(tensors):
        match = _NAME.search(key)
        if match is None:
            raise ValueError(f"adapter {name!r}: tensor {key!r} is no A or B of a layer's projection")
        found.setdefault(match[1], {})[match[2]] = tensors[key]
        digest.update(key.encode() + tensors[key].contiguous().view(torch.uint8).numpy().tobytes())
    pairs: dict[int, list[Pair]] = {}
    for place, both in found.items():
        target = _target(name, place, decoder)
        if both.keys() != {"A", "B"}:
            raise ValueError(f"adapter {name!r}: {place} needs both A and B")
        a, b = both["A"].to(decoder.device, decoder.dtype), both["B"].to(decoder.device, decoder.dtype)
        rank = len(a)
        if a.shape != (rank, target.shape[1]) or b.shape != (target.shape[0], rank):
            shapes = f"A {tuple(a.shape)}, B {tuple(b.shape)}"
            raise ValueError(f"adapter {name!r}: {place} has {shapes}, the weight {tuple(target.shape)}")
        pair = Pair(place, target, a, b * ((rank if alpha is None else alpha) / rank))
        pairs.setdefault(_storage(target), []).append(pair)
    return Adapter(name, digest.hexdigest(), pairs)


def read_adapter(name: str, path: str | Path, decoder) -> Adapter:
    """The adapter in a directory as PEFT writes it, or in a .safetensors file (its scale then is 1).

    Raises:
        ValueError: as `make_adapter`. OSError: no such file.
    """
    from safetensors.torch import load_file

    path, alpha = Path(path), None
    if path.is_dir():
        alpha = json.loads((path / "adapter_config.json").read_text(encoding="utf-8")).get("lora_alpha")
        path = path / "adapter_model.safetensors"
    return make_adapter(name, load_file(str(path)), decoder, alpha)


def _target(name: str, place: str, decoder) -> Tensor:
    """The tensor of the model that a change is of."""
    if ".experts." in place:
        raise ValueError(f"adapter {name!r}: {place} is of an expert; mixtures of experts cannot be changed")
    if place.rpartition(".")[2] not in PROJECTIONS:
        raise ValueError(f"adapter {name!r}: {place} must be one of {', '.join(PROJECTIONS)}")
    _, index, within = place.split(".", 2)
    layer = decoder.layers[int(index)] if int(index) < len(decoder.layers) else None
    if within.startswith(getattr(layer, "unchangeable", ())):
        raise ValueError(f"adapter {name!r}: {place} is not multiplied with as it is")
    target = decoder.weights.named.get(f"model.{place}.weight")
    if target is None or target.dim() != 2:
        raise ValueError(f"adapter {name!r}: the model has no projection {place}")
    return target


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Deltas:
    """The adapters of a step, each with its rows, int64."""

    def __init__(self, rows: Sequence[tuple[Adapter, Tensor]]) -> None:
        self.rows = rows
        self._made: set[Pair] = set()

    @contextmanager
    def active(self) -> Iterator[None]:
        """While it lasts, products of the adapters' rows are changed."""
        with changed(self._change):
            yield
        for adapter, _ in self.rows:
            left = [pair.name for pairs in adapter.pairs.values() for pair in pairs if pair not in self._made]
            assert not left, f"adapter {adapter.name!r}: {left[0]} was accepted and is not multiplied with as it is"

    def _change(self, x: Tensor, weight: Tensor, product: Tensor) -> None:
        """Adds each adapter's change to its rows of `product` [T, N], of `x` [T, K] with `weight` [N, K]."""
        storage = _storage(weight)
        for adapter, rows in self.rows:
            for pair in adapter.pairs.get(storage, ()):
                first = pair.first_row(weight)
                if first is not None:
                    self._made.add(pair)
                    change = x.index_select(0, rows) @ pair.a.T @ pair.b.T
                    product[:, first : first + change.shape[1]].index_add_(0, rows, change)
