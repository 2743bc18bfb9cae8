"""Random weights under which every mechanism counts.

With default initialisation scores are near zero, attention is near uniform and biases are exactly zero: a wrong
rotation or a missing bias would move the logits by less than the tolerance. Here scores are large enough that the
mean entropy of attention is under half of its maximum, and every vector is random.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvlab.lab.parity.oracle import Oracle
from kvlab.models.facts import ModelConfig

SHARP = ("q_proj", "k_proj", "q_norm", "k_norm", "q_b_proj", "kv_a_layernorm")
ENTROPY_LIMIT = 0.5


def first_eps(facts: ModelConfig) -> float:
    """The eps of the first norm that reads the embedding, as it would be without a factor on the embedding."""
    norms = [facts.embedding.norm, *(b.norm for b in getattr(facts.layers[0], "branches", ())), facts.head.norm]
    return next((n.eps for n in norms if n is not None), 1e-6) / facts.embedding.scale**2


def randomize(oracle: Oracle, norm_eps: float, seed: int, ids: list[int]) -> float | None:
    """Fills the oracle's weights; the mean entropy of its attention over `ids`, as a fraction of log(keys seen); None for
    a model without attention.

    Queries and keys are scaled up until that fraction is under a half.

    Raises:
        RuntimeError: no scale brings it there (our own rule, so not a fault of the config).
    """
    for attempt in range(8):
        _fill(oracle, norm_eps, seed, 1.6 * 1.15**attempt)
        weights = oracle.attentions(ids)
        if not weights:
            return None
        fraction = entropy_fraction(weights)
        if fraction < ENTROPY_LIMIT:
            return fraction
    raise RuntimeError(f"parity weights: attention entropy stays at {fraction:.2f} of its maximum")


@torch.no_grad()
def _fill(oracle: Oracle, norm_eps: float, seed: int, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    stored = oracle.state()
    # some vectors that are learned by other means than gradients are buffers
    buffers = [(n, b) for n, b in oracle.model.named_buffers() if n in stored and b.is_floating_point()]
    for name, tensor in sorted([*oracle.model.named_parameters(), *buffers]):
        noise = torch.randn(tensor.shape, generator=generator)
        sharp = sharpness if any(part in name for part in SHARP) else 1.0
        if "embed_tokens" in name:
            # small enough that the first norm's eps shows: mean square of 100 eps
            tensor.copy_(noise * 10 * math.sqrt(norm_eps))
        elif name.endswith("bias"):
            tensor.copy_(noise * 0.5)
        elif tensor.dim() == 1:
            tensor.copy_(sharp * (1 + 0.3 * noise))
        else:
            tensor.copy_(sharp * noise / math.sqrt(tensor.shape[-1]))


def entropy_fraction(attentions: list[Tensor]) -> float:
    """Mean over layers, heads and queries of entropy / log(keys seen), of attention weights [Hq, T, T] per layer."""
    fractions = []
    for weights in attentions:
        seen = (weights > 0).sum(-1)
        entropy = -torch.xlogy(weights, weights).sum(-1)
        rows = seen > 1
        fractions.append((entropy[rows] / seen[rows].log()).mean())
    return float(torch.stack(fractions).mean())
