"""Gemma 3n's layer: several residual streams of which a layer computes one and predicts the others (AltUp), a low-rank
residual (LAuReL), an embedding of the token for each layer, and gates of which few are above their cut.

The last layers have no keys and values of their own: they read those of the last layer of their kind that has.

Sources: AltUp (arXiv 2301.13310); LAuReL (arXiv 2411.07501); transformers 5.24.0 modeling_gemma3n.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.models import modules
from kvlab.models.facts import AttentionFacts, ModelConfig, NormFacts, fact
from kvlab.models.modules.activation import activation
from kvlab.models.modules.base import Place, StepContext, WholeContext
from kvlab.models.modules.norm import reference as norm
from kvlab.models.weights import Names, Scope

PER_LAYER = "per-layer inputs"
SMALLEST_SQUARE = 1e-5  # of a stream's mean square, before it is brought to the first stream's


@dataclass(frozen=True)
class AltUpFacts:
    """What stands around the layers.

    Attributes:
        streams: how many residual streams; a layer computes the first.
        width: of a token's input to each layer. vocabulary: rows of their table; ids beyond read row 0.
        norm: of the projection of the embedding to those inputs.
    """

    streams: int
    width: int
    vocabulary: int
    norm: NormFacts


@dataclass(frozen=True)
class AltUpLayerFacts:
    """One layer.

    Attributes:
        attention: its `source` is the layer whose keys and values it reads, None for its own.
        intermediate: width of the feed-forward part. sparsity: the share of a normal distribution below the cut that
            gates are reduced by; 0 for no cut.
        streams, width: as of `AltUpFacts`. rank: of the low-rank residual.
        scaled: whether a learned vector scales what the input to the layer meets.
    """

    attention: AttentionFacts
    norm: NormFacts
    intermediate: int
    streams: int
    width: int
    rank: int
    activation: str = fact("activation", "gelu_pytorch_tanh")
    sparsity: float = fact("off", 0.0)
    scaled: bool = fact("off", True)

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """The layer's tensors, attention apart."""
        n, norms = self.streams, ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                                  "post_feedforward_layernorm", "post_per_layer_input_norm", "altup.router_norm",
                                  "laurel.post_laurel_norm")  # fmt: skip
        return {f"{name}.weight": (hidden,) for name in norms} | {
            "altup.modality_router.weight": (n, hidden), "altup.prediction_coefs.weight": (n * n, n),
            "altup.correction_coefs.weight": (n, n), "altup.correct_output_scale": (hidden,),
            "laurel.linear_left.weight": (self.rank, hidden), "laurel.linear_right.weight": (hidden, self.rank),
            "mlp.gate_proj.weight": (self.intermediate, hidden), "mlp.up_proj.weight": (self.intermediate, hidden),
            "mlp.down_proj.weight": (hidden, self.intermediate), "per_layer_input_gate.weight": (self.width, hidden),
            "per_layer_projection.weight": (hidden, self.width),
        }  # fmt: skip


class AltUpLayer:
    """Call it on the streams [N, T, hidden] and the step; it returns the streams after the layer.

    Attributes:
        unchangeable: where its tensors' names begin that adapters cannot change; the products are its own.
    """

    unchangeable = ("mlp.",)

    def __init__(self, facts: AltUpLayerFacts, source: Scope, hidden: int, index: int) -> None:
        self.facts, self.index = facts, index
        self.attention = modules.build(facts.attention, source, hidden, Place(index))
        self.weights = {name: source.take(name, *shape) for name, shape in facts.shapes(hidden).items()}

    def __call__(self, streams: Tensor, step: StepContext) -> Tensor:
        inputs = step.memory[PER_LAYER][:, self.index]
        return _layer(self.facts, self.weights, streams, inputs, lambda x: self.attention(x, step))


def layer_reference(facts: AltUpLayerFacts, weights: Names, streams: Tensor, whole: WholeContext) -> Tensor:
    """The layer over a whole sequence, without a cache."""
    inputs = whole.memory[PER_LAYER][:, whole.layer]
    attend = lambda x: modules.reference(facts.attention, weights, x, whole)  # noqa: E731
    return _layer(facts, weights, streams, inputs, attend)


def _layer(
    f: AltUpLayerFacts, w: Mapping[str, Tensor], streams: Tensor, inputs: Tensor, attend: Callable[[Tensor], Tensor]
) -> Tensor:
    n = f.streams
    # what each stream becomes is predicted from all of them, by the first one's word
    mix = (_modalities(f, w, streams[0]) @ w["altup.prediction_coefs.weight"].T).unflatten(-1, (n, n))
    predicted = torch.einsum("mth,tnm->nth", streams, mix) + streams
    active = predicted[0]
    x = norm(f.norm, w, "input_layernorm", active)
    low_rank = x @ w["laurel.linear_left.weight"].T @ w["laurel.linear_right.weight"].T
    laurel = x + norm(f.norm, w, "laurel.post_laurel_norm", low_rank)
    attended = active + norm(f.norm, w, "post_attention_layernorm", attend(x))
    middle = (attended + laurel) / math.sqrt(2)
    fed = _feed_forward(f, w, norm(f.norm, w, "pre_feedforward_layernorm", middle))
    computed = middle + norm(f.norm, w, "post_feedforward_layernorm", fed)
    # and corrected by as much as the computed one came out otherwise than predicted
    shares = _modalities(f, w, computed) @ w["altup.correction_coefs.weight"].T + 1
    corrected = predicted + shares.T[..., None] * (computed - active)
    first = corrected[0] * w["altup.correct_output_scale"] if f.scaled else corrected[0]
    gated = activation(f.activation)(first @ w["per_layer_input_gate.weight"].T) * inputs
    added = norm(f.norm, w, "post_per_layer_input_norm", gated @ w["per_layer_projection.weight"].T)
    return torch.cat((corrected[:1], corrected[1:] + added))


def _modalities(f: AltUpLayerFacts, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """How much each stream counts for a token, [T, N]."""
    scaled = norm(f.norm, w, "altup.router_norm", x) / x.shape[-1]
    return torch.tanh(scaled @ w["altup.modality_router.weight"].T)


def _feed_forward(f: AltUpLayerFacts, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    gate = x @ w["mlp.gate_proj.weight"].T
    if f.sparsity:
        deviations = NormalDist().inv_cdf(f.sparsity)
        cut = gate.mean(-1, keepdim=True) + gate.std(-1, keepdim=True, unbiased=False) * deviations
        gate = F.relu(gate - cut)
    return (activation(f.activation)(gate) * (x @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


class AltUp:
    """Makes the streams and the layers' inputs before the first layer, and one stream after the last."""

    def __init__(self, facts: AltUpFacts, source: Scope, config: ModelConfig) -> None:
        self.facts, self.layers, hidden = facts, config.num_layers, config.hidden_size
        wide = self.layers * facts.width
        shapes = {
            "embed_tokens_per_layer.weight": (facts.vocabulary, wide),
            "per_layer_model_projection.weight": (wide, hidden), "per_layer_projection_norm.weight": (facts.width,),
        }  # fmt: skip
        for i in range(facts.streams - 1):
            shapes |= {f"altup_{kind}projections.{i}.weight": (hidden, hidden) for kind in ("", "unembed_")}
        self.weights: Mapping[str, Tensor] = {name: source.take(name, *shape) for name, shape in shapes.items()}

    def enter(self, stream: Tensor, step: StepContext | WholeContext) -> Tensor:
        """Streams [N, T, hidden] of the embedding [T, hidden]; leaves the inputs [T, L, width] in the step's memory."""
        f, w = self.facts, self.weights
        ids = torch.where(step.ids < f.vocabulary, step.ids, 0)
        table = F.embedding(ids, w["embed_tokens_per_layer.weight"]) * f.width**0.5
        projected = (stream @ w["per_layer_model_projection.weight"].T) * stream.shape[-1] ** -0.5
        shape = (self.layers, f.width)
        projected = norm(f.norm, w, "per_layer_projection_norm", projected.unflatten(-1, shape))
        step.memory[PER_LAYER] = (projected + table.unflatten(-1, shape)) * math.sqrt(0.5)
        return self._all(stream, [stream] * (f.streams - 1), "altup_projections")

    def leave(self, streams: Tensor, step: StepContext | WholeContext) -> Tensor:
        """[T, hidden]: the mean of the first stream and of the others, projected."""
        return self._all(streams[0], list(streams[1:]), "altup_unembed_projections").mean(0)

    def _all(self, first: Tensor, others: list[Tensor], name: str) -> Tensor:
        """[N, T, hidden]: `first`, and each of the others projected and brought to the first one's size."""
        size, found = first.square().mean(-1, keepdim=True).sqrt(), [first]
        for i, other in enumerate(others):
            projected = other @ self.weights[f"{name}.{i}.weight"].T
            found.append(projected * size / projected.square().mean(-1, keepdim=True).clamp(min=SMALLEST_SQUARE).sqrt())
        return torch.stack(found)


class ReferenceAltUp(AltUp):
    """The same over whole sequences, by the tensors' names."""

    def __init__(self, facts: AltUpFacts, weights: Names, config: ModelConfig) -> None:
        self.facts, self.layers, self.weights = facts, config.num_layers, weights
