"""Low-rank adapters (LoRA): a small change of the query and value projections, chosen for each request.

Source: Hu et al., LoRA, arXiv 2106.09685; file format of PEFT (`adapter_model.safetensors`, `adapter_config.json`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvlab.models.rope import rotate

_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:self_attn\.)?(q_proj|v_proj)\.lora_([AB])(?:\.\w+)?\.weight$")


@dataclass(frozen=True, eq=False)
class Adapter:
    """The change x -> scale * B A x of some layers' projections.

    Attributes:
        name: what people call it. digest: sha256 of its tensors and scale, as hex: the same name may get new weights.
        pairs: (layer, "q_proj" or "v_proj") -> (A [r, hidden], B [rows, r]), the scale inside B.
    """

    name: str
    digest: str
    pairs: Mapping[tuple[int, str], tuple[Tensor, Tensor]]

    @property
    def key(self) -> str:
        """What requests call it, and what keys of the prefix cache hold."""
        return f"{self.name}:{self.digest[:16]}"


def make_adapter(name: str, tensors: Mapping[str, Tensor], decoder, alpha: float | None = None) -> Adapter:
    """The adapter of these tensors, named as PEFT does, for `decoder`.

    Args:
        alpha: the change is scaled by alpha / r; None is r, no scaling.

    Raises:
        ValueError: a layer that the model lacks or that cannot be changed, shapes that do not fit, A without B.
    """
    sizes = _sizes(decoder)
    found: dict[tuple[int, str], dict[str, Tensor]] = {}
    digest = hashlib.sha256(repr(alpha).encode())
    for key in sorted(tensors):
        match = _NAME.search(key)
        if match is None:
            raise ValueError(f"adapter {name!r}: tensor {key!r} is no A or B of a q_proj or v_proj")
        found.setdefault((int(match[1]), match[2]), {})[match[3]] = tensors[key]
        digest.update(key.encode() + tensors[key].contiguous().view(torch.uint8).numpy().tobytes())
    pairs = {}
    for place, both in found.items():
        if place not in sizes:
            raise ValueError(f"adapter {name!r}: the model has no {place[1]} in layer {place[0]}")
        if both.keys() != {"A", "B"}:
            raise ValueError(f"adapter {name!r}: layer {place[0]}, {place[1]} needs both A and B")
        a, b = both["A"].to(decoder.device, decoder.dtype), both["B"].to(decoder.device, decoder.dtype)
        rank = len(a)
        if a.shape != (rank, sizes[place][1]) or b.shape != (sizes[place][0], rank):
            shapes = f"A {tuple(a.shape)}, B {tuple(b.shape)}"
            raise ValueError(f"adapter {name!r}: layer {place[0]}, {place[1]} has {shapes}, the weight {sizes[place]}")
        pairs[place] = (a, b * ((rank if alpha is None else alpha) / rank))
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


def _sizes(decoder) -> dict[tuple[int, str], tuple[int, int]]:
    """The shapes of the projections that can be changed."""
    found = {}
    for i, layer in enumerate(decoder.layers):
        qkv = getattr(layer, "qkv", None)
        # a norm between projection and rotation is not linear: the change could not be added behind it
        if type(layer).__name__ != "PlainLayer" or qkv.q_norm is not None:
            raise ValueError("adapters: need a model of plain layers without norms of queries and keys")
        rows = {"q_proj": qkv.num_heads, "v_proj": qkv.num_kv_heads}
        found |= {(i, name): (heads * qkv.head_dim, qkv.weight.shape[1]) for name, heads in rows.items()}
    return found


@dataclass(frozen=True)
class Deltas:
    """The adapters of a step, each with its rows, int64."""

    rows: Sequence[tuple[Adapter, Tensor]]

    def add(self, layer: int, x: Tensor, query: Tensor, value: Tensor, angles: tuple[Tensor, Tensor]) -> None:
        """Adds each adapter's change to its rows of `query` [T, Hq, D], rotated, and `value` [T, Hkv, D].

        Rotation is linear, so what is added behind it is what a changed weight would have given before it.

        Args:
            x: [T, hidden], what the projections read.
            angles: cosines and sines [T, D / 2].
        """
        for adapter, rows in self.rows:
            own = x.index_select(0, rows)
            for name, target in (("q_proj", query), ("v_proj", value)):
                pair = adapter.pairs.get((layer, name))
                if pair is None:
                    continue
                change = (own @ pair[0].T @ pair[1].T).unflatten(-1, target.shape[1:])
                if name == "q_proj":
                    change = rotate(change, *(table.index_select(0, rows) for table in angles), False)
                target.index_add_(0, rows, change)
