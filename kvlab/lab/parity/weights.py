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

SHARP = ("q_proj", "k_proj", "q_norm", "k_norm", "q_layernorm", "k_layernorm", "q_b_proj", "kv_a_layernorm", "kv_norm",
         "qkv_proj", "query_key_value", "Wqkv", "c_attn")  # fmt: skip
# by name, what weights are multiplied with. Queries and keys of a delta net come mostly of one sign out of these: where a
# query is nearly orthogonal to all that its state holds, the norm of what it reads leaves little but rounding
FACTORS = {"_attn.conv1d": 4.0}
# buffers that follow from the config (MiniMax's decays)
COMPUTED = ("slope_rate", "_decay")
# embeddings, of tokens and of positions
EMBEDDINGS = ("embed_tokens", "wte.", "wpe.", "embed_in.", "word_embeddings.", "rwkv.embeddings.")
ENTROPY_LIMIT = 0.5
TOO_SHARP = 0.35


def first_eps(facts: ModelConfig) -> float:
    """The eps of the first norm that reads the embedding, as it would be without a factor on the embedding."""
    norms = [facts.embedding.norm, *(b.norm for b in getattr(facts.layers[0], "branches", ())), facts.head.norm]
    return next((n.eps for n in norms if n is not None), 1e-6) / facts.embedding.scale**2


def randomize(oracle: Oracle, norm_eps: float, seed: int, ids: list[int]) -> float | None:
    """Fills the oracle's weights; the mean entropy of its attention over `ids`, as a fraction of log(keys seen); None for
    a model without attention.

    Queries and keys are scaled until that fraction is under a half, and not so small that rounding decides.

    Raises:
        RuntimeError: no scale brings it there (our own rule, so not a fault of the config).
    """
    sharpness = 1.6
    for _ in range(20):
        _fill(oracle, norm_eps, seed, sharpness)
        weights = oracle.attentions(ids)
        if not weights:
            return None
        fraction = entropy_fraction(weights)
        if TOO_SHARP < fraction < ENTROPY_LIMIT:
            return fraction
        sharpness *= 1.15 if fraction > TOO_SHARP else 0.8
    raise RuntimeError(f"parity weights: attention entropy stays at {fraction:.2f} of its maximum")


@torch.no_grad()
def _fill(oracle: Oracle, norm_eps: float, seed: int, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    stored = oracle.state()
    bare_norms = getattr(oracle.model.config, "use_qk_norm", False) and not any("q_norm" in name for name in stored)
    lengthless = oracle.model.config.head_dim if bare_norms else 0
    # some vectors that are learned by other means than gradients are buffers
    learned = [(n, b) for n, b in oracle.model.named_buffers() if n in stored and not n.endswith(COMPUTED)]
    buffers = [(n, b) for n, b in learned if b.is_floating_point()]
    _fill_tables(oracle, stored, generator)
    for name, tensor in sorted([*oracle.model.named_parameters(), *buffers]):
        noise = torch.randn(tensor.shape, generator=generator)
        sharp = sharpness if any(part in name for part in SHARP) else 1.0
        if any(part in name for part in EMBEDDINGS) and tensor.dim() == 2 and "per_layer" not in name:
            # small enough that the first norm's eps shows: mean square of 100 eps
            tensor.copy_(noise * 10 * math.sqrt(norm_eps))
        elif name.endswith(("A_log", "time_decay")) and tensor.dim() != 2:
            # states that remember some ten tokens: of a state with one token in it a norm leaves hardly more than signs
            tensor.copy_(0.5 * noise - 2)
        elif name.endswith("bias"):
            # a larger correction of the experts' scores would choose the same group for every token
            tensor.copy_(noise * (0.1 if name.endswith("e_score_correction_bias") else 0.5))
        elif tensor.dim() == 1:
            tensor.copy_(sharp * (1 + 0.3 * noise))
        else:
            factor = next((f for part, f in FACTORS.items() if part in name), sharp)
            tensor.copy_(factor * noise / math.sqrt(tensor.shape[-1]))
            if lengthless and name.endswith(("q_proj.weight", "k_proj.weight")):
                # norms without a weight leave only directions: few values of a head make them alike or opposite
                tensor.mul_((1.0 + torch.arange(len(tensor)) % lengthless)[:, None] ** -sharpness)
        behind = stored.get(name.split("in_proj.")[0] + "norm.weight") if "in_proj." in name else None
        if behind is not None:
            # Mamba-2's gates come first: so small that the eps of the norm behind them shows
            tensor[: len(behind)].mul_(0.05)


def _fill_tables(oracle: Oracle, stored: dict[str, Tensor], generator: torch.Generator) -> None:
    """Random experts for each token id where a table names them, no expert twice for one id."""
    for name, table in oracle.model.named_buffers():
        if name in stored and name.endswith("tid2eid"):
            experts = len(stored[name.replace("tid2eid", "weight")])
            order = torch.rand(len(table), experts, generator=generator).argsort(-1)
            table.copy_(order[:, : table.shape[1]])


def entropy_fraction(attentions: list[Tensor]) -> float:
    """Mean over layers, heads and queries of entropy / log(keys seen), of attention weights [Hq, T, T] per layer."""
    fractions = []
    for weights in attentions:
        seen = (weights > 0).sum(-1)
        entropy = -torch.xlogy(weights, weights).sum(-1)
        rows = seen > 1
        fractions.append((entropy[rows] / seen[rows].log()).mean())
    return float(torch.stack(fractions).mean())
