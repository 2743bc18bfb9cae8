"""A tiny model with weights of our own, and its paged logits against the whole sequence recomputed without a cache."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvlab.lab.parity import compare
from kvlab.models.load import LoadedModel, empty_model
from kvlab.models.reference import reference_forward

TEXT = [3, 17, 4, 4, 90, 55, 21, 8, 0, 100, 33, 34, 35, 2, 1, 77, 12, 60, 9, 5, 41]


def tiny(config: dict[str, Any], dtype: str = "fp64", seed: int = 7) -> tuple[LoadedModel, dict[str, Tensor]]:
    """A model of `config`, and its weights under the names that modules ask for; every vector random."""
    model = empty_model(config, dtype, "cpu", "tiny")
    rng = torch.Generator().manual_seed(seed)
    state = {}
    for name, place in model.decoder.weights.named.items():
        noise = torch.randn(place.shape, generator=rng, dtype=torch.float64)
        state[name] = 1 + 0.3 * noise if place.dim() == 1 else noise * (1.5 / math.sqrt(place.shape[-1]))
    model.decoder.weights.fill(state.items())
    return model, state


def assert_paged_is_recomputed(model: LoadedModel, state: dict[str, Tensor], atol: float = 1e-10) -> None:
    """Every way a sequence reaches the cache, odd lengths, pages of NaN: the same logits as without a cache."""
    texts = [TEXT, TEXT[4:15], TEXT[9:12]]
    expected = [reference_forward(model.config, state, torch.tensor(text)) for text in texts]
    for mode, run in compare.MODES.items():
        for got, wanted in zip(run(model, texts), expected, strict=False):
            torch.testing.assert_close(got, wanted, rtol=0, atol=atol, msg=lambda m, mode=mode: f"{mode}: {m}")
