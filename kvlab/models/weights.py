"""Weights: where modules take their tensors from, by name, each checked and each used once.

Matrices that are multiplied with the same rows are taken as one (`take_rows`): fewer and larger products. A checkpoint
that holds them under the fused name, or one behind the other in a file, is used as it lies, mapped and not copied;
else, and where names of the checkpoint are mapped to others, the parts are joined once. `named` has every tensor under
its checkpoint name, a part as a view of the fused one, so that nothing is stored twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from kvlab.models.checkpoint import Checkpoint

# buffers that old checkpoints carry and that are computed here
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias",
                    ".attention.masked_bias", ".attention.rotary_emb.inv_freq")  # fmt: skip
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Source:
    """The tensors of a model, handed out in one dtype on one device.

    Args:
        tensors: checkpoint name -> tensor; None for a model whose tensors are filled in later (`fill`).
        copy: whether a tensor that already has the dtype and device is copied.

    Attributes:
        named: checkpoint name -> tensor or view of a fused tensor, of all that was taken.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor] | None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        copy: bool = True,
    ) -> None:  # fmt: skip
        self.dtype, self.device = dtype, torch.device(device)
        self.named: dict[str, Tensor] = {}
        self._tensors, self._copy = tensors, copy
        self._missing: list[str] = []
        self._used: set[str] = set()

    def scope(self, prefix: str) -> Scope:
        """This source for the names that begin with `prefix` and a dot."""
        return Scope(self, prefix + "." if prefix else "")

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`.

        Raises:
            ValueError: another shape than `shape`, or not a plain float type. A missing one is told by `finish`.
        """
        self.named[name] = self._placed(name, shape)
        return self.named[name]

    def take_table(self, name: str, *shape: int) -> Tensor:
        """The int64 tensor `name`, of indices; zeros for a model without tensors yet.

        Raises:
            ValueError: another shape than `shape`, or not of whole numbers.
        """
        if self._tensors is None or name not in self._tensors:
            if self._tensors is not None:
                self._missing.append(name)
            found = torch.zeros(shape, dtype=torch.int64, device=self.device)
        else:
            tensor = self._tensors[name]
            if tuple(tensor.shape) != tuple(shape):
                raise ValueError(_shape_message(name, tensor.shape, shape))
            if tensor.is_floating_point():
                raise ValueError(f"weight {name!r}: dtype {tensor.dtype}, expected whole numbers")
            self._used.add(name)
            found = tensor.to(self.device, torch.int64)
        self.named[name] = found
        return found

    def take_rows(self, fused: str, parts: Mapping[str, int], *columns: int) -> Tensor:
        """One tensor [sum of rows, *columns] whose row ranges are the tensors `parts` (name -> rows), in order.

        Args:
            fused: the name under which a checkpoint may hold them as one.
        """
        whole = (sum(parts.values()), *columns)
        if self._tensors is None:
            joined = torch.empty(whole, dtype=self.dtype, device=self.device)
        elif fused in self._tensors:
            joined = self._placed(fused, whole)
        else:
            pieces = [self._checked(name, (rows, *columns)) for name, rows in parts.items()]
            run = self._tensors.joined([*parts]) if isinstance(self._tensors, Checkpoint) and not self._copy else None
            joined = torch.cat([p.to(self.device, self.dtype) for p in pieces]) if run is None else run
            joined = joined.to(self.device, self.dtype)
        self.named.update(zip(parts, joined.split(list(parts.values())), strict=True))
        return joined

    def take_stack(self, stacked: str, parts: Sequence[Sequence[str]], *shape: int) -> Tensor:
        """The tensor `stacked`, [len(parts), *shape]; its i-th matrix is the tensors `parts[i]` one below the other
        where a checkpoint holds them so. Parts of one matrix have equal rows.
        """
        if self._tensors is None or parts[0][0] not in self._tensors:
            return self.take(stacked, len(parts), *shape)
        whole = torch.empty((len(parts), *shape), dtype=self.dtype, device=self.device)
        for matrix, names in zip(whole, parts, strict=True):
            for rows, name in zip(matrix.chunk(len(names)), names, strict=True):
                rows.copy_(self._checked(name, tuple(rows.shape)))
        self.named[stacked] = whole
        return whole

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds `name`; false for a model without tensors yet."""
        return self._tensors is not None and name in self._tensors

    def finish(self, *, unused: bool = False, ignored: Iterable[str] = ()) -> None:
        """Tells whether everything that was asked for was there and, unless `unused`, everything there was asked for.

        Raises:
            ValueError: how many tensors are missing, or the first that this architecture does not have.
        """
        if self._missing:
            first = ", ".join(sorted(self._missing)[:3])
            raise ValueError(f"weights: {len(self._missing)} of {len(self.named)} tensors are missing, such as {first}")
        if self._tensors is None or unused:
            return
        known = self._used | set(ignored)
        for name in self._tensors:
            if name not in known and not name.endswith(IGNORED_SUFFIXES):
                raise ValueError(f"weight {name!r}: this architecture has no such tensor")

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies every (checkpoint name, tensor) to the place that was handed out for it.

        Raises:
            ValueError: an unknown name or another shape.
        """
        for name, tensor in tensors:
            if name not in self.named:
                raise ValueError(f"weight {name!r}: this architecture has no such tensor")
            if tensor.shape != self.named[name].shape:
                raise ValueError(_shape_message(name, tensor.shape, self.named[name].shape))
            self.named[name].copy_(tensor)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors that were taken, tied embeddings once."""
        return sum(t.numel() * t.element_size() for t in self.named.values())

    def _placed(self, name: str, shape: Sequence[int]) -> Tensor:
        found = self._checked(name, shape)
        placed = found.to(self.device, self.dtype)
        return placed.clone() if self._copy and placed is found else placed.contiguous()

    def _checked(self, name: str, shape: Sequence[int]) -> Tensor:
        if self._tensors is None or name not in self._tensors:
            if self._tensors is not None:
                self._missing.append(name)
            return torch.empty(tuple(shape), dtype=self.dtype, device=self.device)
        tensor = self._tensors[name]
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(_shape_message(name, tensor.shape, shape))
        if tensor.dtype not in FLOATS:
            raise ValueError(f"weight {name!r}: dtype {tensor.dtype}, expected fp32, bf16, fp16 or fp64")
        self._used.add(name)
        return tensor


class Scope:
    """A source seen from within a layer or a module: names are relative to its prefix."""

    def __init__(self, source: Source, prefix: str) -> None:
        self.source, self.prefix = source, prefix

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensors that are handed out."""
        return self.source.dtype

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.source.device

    def scope(self, prefix: str) -> Scope:
        """A scope within this one; "" is this one."""
        return Scope(self.source, self.prefix + (prefix + "." if prefix else ""))

    def take(self, name: str, *shape: int) -> Tensor:
        """See `Source.take`."""
        return self.source.take(self.prefix + name, *shape)

    def take_table(self, name: str, *shape: int) -> Tensor:
        """See `Source.take_table`."""
        return self.source.take_table(self.prefix + name, *shape)

    def take_rows(self, fused: str, parts: Mapping[str, int], *columns: int) -> Tensor:
        """See `Source.take_rows`."""
        return self.source.take_rows(self.prefix + fused, {self.prefix + n: r for n, r in parts.items()}, *columns)

    def take_stack(self, stacked: str, parts: Sequence[Sequence[str]], *shape: int) -> Tensor:
        """See `Source.take_stack`."""
        full = [[self.prefix + name for name in names] for names in parts]
        return self.source.take_stack(self.prefix + stacked, full, *shape)

    def has(self, name: str) -> bool:
        """See `Source.has`."""
        return self.source.has(self.prefix + name)


class Names(Mapping[str, Tensor]):
    """The tensors of one layer or module by their names within it; what the plain forward reads from."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str = "") -> None:
        self.weights, self.prefix = weights, f"{prefix}." if prefix else ""

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[self.prefix + name]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return (name[len(self.prefix) :] for name in self.weights if name.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def scope(self, prefix: str) -> Names:
        """The names below `prefix`; "" is this one."""
        return Names(self.weights, f"{self.prefix}{prefix}") if prefix else self

    def linear(self, name: str, x: Tensor) -> Tensor:
        """`x @ weight.T`, plus the bias where there is one."""
        product = x @ self[name + ".weight"].T
        bias = self.get(name + ".bias")
        return product if bias is None else product + bias


def _shape_message(name: str, got: Sequence[int], expected: Sequence[int]) -> str:
    return f"weight {name!r}: shape {tuple(got)}, expected {tuple(expected)}"
