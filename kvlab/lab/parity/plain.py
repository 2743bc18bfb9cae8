"""The oracle of native families: kvlab's own plain forward in fp64, because transformers has no class for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvlab.models.facts import ModelConfig
from kvlab.models.load import empty_model
from kvlab.models.reference import attention_weights, reference_forward

NATIVE = "kvlab_"
NOTE = "no class of transformers has this type: the oracle is kvlab's plain forward without a cache, in fp64"


class PlainOracle:
    """Stands where `kvlab.lab.parity.oracle.Oracle` stands for families that have a transformers model.

    Attributes:
        model: what `kvlab.lab.parity.weights` fills: named parameters, no buffers.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._facts = ModelConfig.from_hf(config)
        named = empty_model(config, "fp32", "cpu", "oracle").decoder.weights.named
        self._weights = {name: torch.zeros_like(tensor) for name, tensor in named.items()}
        self.model = SimpleNamespace(
            config=SimpleNamespace(), named_parameters=self._weights.items, named_buffers=lambda: []
        )

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Tensor:
        """fp32 [T, vocab] of the sequence `ids`."""
        return reference_forward(self._facts, self._doubled(), torch.tensor(ids)).float()

    @torch.inference_mode()
    def attentions(self, ids: list[int]) -> list[Tensor]:
        """Attention weights of each layer that has them, fp64 [Hq, T, T]."""
        return attention_weights(self._facts, self._doubled(), torch.tensor(ids))

    def state(self) -> dict[str, Tensor]:
        """The weights under their checkpoint names."""
        return self._weights

    def _doubled(self) -> dict[str, Tensor]:
        return {name: tensor.double() for name, tensor in self._weights.items()}
