"""What most families share: the parts of a decoder from a config, with each family's differences as arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvlab.models.facts import (
    AttentionFacts,
    Branch,
    EmbeddingFacts,
    HeadFacts,
    LayerFacts,
    MLPFacts,
    ModelConfig,
    NormFacts,
    RopeFacts,
)
from kvlab.models.families.reader import ConfigReader

# (regular expression of a checkpoint name, canonical names it gives, and how each is cut from the tensor)
Cut = Callable[[Tensor, ConfigReader], Tensor]
Rename = tuple[str, Sequence[tuple[str, Cut | None]]]


# the norms of Gemma 2's layers, in order
SANDWICH = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A row of facts.

    Attributes:
        build: the facts of a model from its config.
        defaults: values of fields that a config.json may leave out.
        names: how its checkpoint names become those of the modules; the first rule that matches counts.
        ignored: regular expressions of checkpoint names that are passed over.
    """

    build: Callable[[ConfigReader], ModelConfig]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: Sequence[Rename] = ()
    ignored: Sequence[str] = ()


def rms(c: ConfigReader, **facts: Any) -> NormFacts:
    """The RMS norm of a config with `rms_norm_eps`."""
    return NormFacts(eps=float(c.get("rms_norm_eps")), **facts)


def layer_norm(c: ConfigReader, eps: str, **facts: Any) -> NormFacts:
    """A layer norm with a bias, its eps in the field of that name."""
    return NormFacts("layer", float(c.get(eps)), **{"bias": True} | facts)


def attention(c: ConfigReader, *, rope: RopeFacts | None, **facts: Any) -> AttentionFacts:
    """Grouped-query attention of the config's heads, scores scaled by head_dim ** -0.5 unless `facts` says otherwise."""
    query, kv, head_dim = c.heads()
    usual = {"scale": head_dim**-0.5, "key_dim": head_dim, "value_dim": head_dim}
    return AttentionFacts(query, kv, rope=rope, **usual | facts)


def gated_mlp(c: ConfigReader, **facts: Any) -> MLPFacts:
    """A gated feed-forward part of `intermediate_size`."""
    usual = {"width": c.positive("intermediate_size"), "activation": c.activation()}
    return MLPFacts(**usual | facts)


def pre_norm_layer(mixer: Any, feed_forward: Any, norm: NormFacts, scale: float = 1.0) -> LayerFacts:
    """Norm, mixer, add; norm, feed-forward, add."""
    first = Branch(mixer, norm, "input_layernorm", scale=scale)
    return LayerFacts(((first,), (Branch(feed_forward, norm, "post_attention_layernorm", scale=scale),)))


def post_norm_layer(mixer: Any, feed_forward: Any, norm: NormFacts) -> LayerFacts:
    """Mixer, norm, add; feed-forward, norm, add (OLMo 2)."""
    first = Branch(mixer, post_norm=norm)
    return LayerFacts(((first,), (Branch(feed_forward, post_norm=norm, post_norm_name="post_feedforward_layernorm"),)))


def sandwich_layer(mixer: Any, feed_forward: Any, norm: NormFacts, names: Sequence[str] = SANDWICH) -> LayerFacts:
    """A norm before and after the mixer, and before and after the feed-forward part, under those four names."""
    first = Branch(mixer, norm, names[0], norm, names[1])
    return LayerFacts(((first,), (Branch(feed_forward, norm, names[2], norm, names[3]),)))


def parallel_layer(mixer: Any, feed_forward: Any, norm: NormFacts, second: str = "input_layernorm") -> LayerFacts:
    """Mixer and feed-forward part side by side, of one norm or, under the name `second`, of one each."""
    return LayerFacts(((Branch(mixer, norm), Branch(feed_forward, norm, second)),))


def model(c: ConfigReader, layers: Sequence[Any], **facts: Any) -> ModelConfig:
    """A model of `layers` with the config's vocabulary, width and length; final RMS norm and tying by the config."""
    usual: dict[str, Any] = {
        "embedding": EmbeddingFacts(),
        "eos_token_ids": c.token_ids(),
    }
    if "max_position" not in facts:
        usual["max_position"] = c.positive("max_position_embeddings")
    if "head" not in facts:
        usual["head"] = HeadFacts(norm=rms(c), tied=bool(c.get("tie_word_embeddings")))
    sizes = {"vocab_size": c.positive("vocab_size"), "hidden_size": c.hidden_size}
    return ModelConfig(model_type=c.config["model_type"], layers=tuple(layers), **sizes, **usual | facts)
