"""The adapters that an engine has, and which rows of a step each of them changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from kvlab.models.adapters import Adapter, Deltas, make_adapter, read_adapter
from kvlab.schedule import Step


class Adapters:
    """Adapters by key; several may run in one batch, beside requests without one."""

    def __init__(self, decoder) -> None:
        self._decoder = decoder
        self._known: dict[str, Adapter] = {}

    def add(self, name: str, source: str | Path | Mapping[str, torch.Tensor], alpha: float | None = None) -> str:
        """The key by which requests ask for the adapter from now on: its name, and a digest of its weights.

        The same name with other weights is another key; requests that run keep theirs, and no cached page is shared.

        Args:
            source: a directory or file (see `kvlab.models.adapters.read_adapter`), or tensors.
            alpha: of given tensors.

        Raises:
            ValueError: it does not fit the model.
        """
        if isinstance(source, str | Path):
            adapter = read_adapter(name, source, self._decoder)
        else:
            adapter = make_adapter(name, source, self._decoder, alpha)
        self._known[adapter.key] = adapter
        return adapter.key

    def check(self, key: str) -> None:
        """Refuses a request whose adapter is not here.

        Raises:
            ValueError: names the adapters that are.
        """
        if key and key not in self._known:
            raise ValueError(f"adapter {key!r}: must be one of {', '.join(self._known) or 'none, none is loaded'}")

    def deltas(self, step: Step) -> Deltas | None:
        """What changes which rows of a step; None when no request of it has an adapter."""
        rows: dict[str, list[int]] = {}
        row = 0
        for chunk in step.chunks:
            if chunk.request.adapter:
                rows.setdefault(chunk.request.adapter, []).extend(range(row, row + chunk.count))
            row += chunk.count
        if not rows:
            return None
        device = self._decoder.device
        return Deltas([(self._known[key], torch.tensor(found, device=device)) for key, found in rows.items()])
