"""What a model is made of, as facts: frozen records that the families write and the modules run by.

A layer is a sequence of steps, a step one or several branches that read the same residual stream and are added to it:

    stream = stream + sum(branch.scale * post_norm(module(pre_norm(stream))) for branch in step)

Each mechanism has its own record (`AttentionFacts`, `MLPFacts`, ...), and `kvlab.models.modules` has the module that
runs it. A fact says how parity's mutation test may change it, through `fact(how=...)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def fact(how: str, default: Any) -> Any:
    """A field whose change parity must notice.

    `how`: "scale" (times 1.1), "scale if set" (so, unless it is the default), "each scaled" (all items), "twice",
    "eightfold", "length" (one more, one less, without end), "other" (one more), "halved or doubled" (a divisor that
    stays one), "off" (to its default), "flip" (the other truth value), "activation" (another one), "one of a, b" (the
    other one), "keep" (not changed: shapes, names).
    """
    return field(default=default, metadata={"mutate": how})


@dataclass(frozen=True)
class NormFacts:
    """A norm over the last axis.

    Attributes:
        kind: "rms" or "layer".
        eps: added under the root.
        offset: added to the stored weight (Gemma stores weight - 1).
        weight, bias: whether it has them.
    """

    kind: str = "rms"
    eps: float = fact("twice", 1e-6)
    offset: float = fact("off", 0.0)
    weight: bool = True
    bias: bool = False


@dataclass(frozen=True)
class RopeFacts:
    """Rotary positions: base, and the rule that stretches them.

    Attributes:
        kind: "default", "linear", "llama3", "yarn" or "longrope".
        theta: the base.
        dim: values of a head that turn, the first ones; 0 means all.
        interleaved: value 2i pairs with 2i + 1; else value i with i + dim / 2.
        factor: by how much positions are stretched (1.0: not).
        low_freq_factor, high_freq_factor, original_max_position: of llama3; wavelengths above
            original_max_position / low_freq_factor are stretched in full, those below
            original_max_position / high_freq_factor not at all.
        attention_factor: what cosines and sines are multiplied with (yarn, longrope).
        beta_fast, beta_slow, truncate: of yarn, the rotations between which it blends, and whether bounds are whole.
        divisors: of longrope, one per pair. short_divisors: those of a model that is never run with more than
            `short_up_to` tokens.
    """

    kind: str = fact("off", "default")
    theta: float = fact("scale", 10_000.0)
    factor: float = fact("scale if set", 1.0)
    low_freq_factor: float = fact("scale if set", 0.0)
    high_freq_factor: float = fact("scale if set", 0.0)
    original_max_position: int = fact("eightfold", 0)
    dim: int = 0
    interleaved: bool = fact("flip", False)
    attention_factor: float = fact("scale if set", 1.0)
    beta_fast: float = fact("eightfold", 0.0)
    beta_slow: float = fact("eightfold", 0.0)
    truncate: bool = fact("off", False)
    divisors: tuple[float, ...] = fact("each scaled", ())
    short_divisors: tuple[float, ...] = ()
    short_up_to: int = 0


@dataclass(frozen=True)
class TemperatureFacts:
    """Queries grow with their position: times 1 + weight * log(1 + floor((position + offset) / floor)).

    Source: Llama 4 and Ministral 3, after arXiv 2501.19399.
    """

    floor: int = fact("length", 8192)
    weight: float = fact("scale", 0.1)
    offset: int = fact("off", 0)


@dataclass(frozen=True)
class AlibiFacts:
    """Scores fall with distance: head h of n loses factor * 2 ** (-max_bias * h / n) a token.

    Source: ALiBi (arXiv 2108.12409), section 3; for head counts that are no power of two see `alibi_slopes`.
    """

    max_bias: float = fact("scale", 8.0)
    factor: float = fact("scale", 1.0)


@dataclass(frozen=True)
class AttentionFacts:
    """Attention of query heads over the keys and values of KV heads.

    Attributes:
        key_dim, value_dim: values per head of queries and keys, and of values.
        scale: factor on scores before the softmax.
        rope: None where the layer does not rotate.
        window: tokens a query sees, itself included; 0 means all. chunk: a query at t sees (t // chunk) * chunk .. t.
        softcap: scores become cap * tanh(score / cap); 0 means none.
        qkv_bias, out_bias: of the projections.
        qk_norm: norm of each query and key head, or over all heads at once when `qk_norm_wide`.
        value_norm: norm of each value head, None for none.
        sinks: one learned logit per query head joins the softmax's denominator.
        temperature: how queries grow with their position, None for not.
        alibi: how scores fall with distance, None for not.
        output_gate: whether the sigmoid of a projection of its own (`gate_proj`) scales what the heads give.
        prefix: name of the module's tensors within the layer.
        source: the layer whose keys and values this one reads; None for its own.
    """

    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float = fact("scale", 1.0)
    rope: RopeFacts | None = None
    window: int = fact("length", 0)
    chunk: int = fact("length", 0)
    softcap: float = fact("scale", 0.0)
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: NormFacts | None = fact("off", None)  # noqa: RUF009
    qk_norm_wide: bool = False
    value_norm: NormFacts | None = fact("off", None)  # noqa: RUF009
    sinks: bool = fact("off", False)
    temperature: TemperatureFacts | None = fact("off", None)  # noqa: RUF009
    alibi: AlibiFacts | None = fact("off", None)  # noqa: RUF009
    output_gate: bool = fact("off", False)
    prefix: str = "self_attn"
    source: int | None = None


@dataclass(frozen=True)
class MLPFacts:
    """A feed-forward part: down(act(gate_scale * gate(x)) * up(x)), or down(act(up(x))) when not gated.

    Attributes:
        limit: gates are cut off above it, ups beyond +-limit; 0 means neither.
    """

    width: int
    activation: str = fact("activation", "silu")
    gated: bool = True
    bias: bool = False
    prefix: str = "mlp"
    gate_scale: float = fact("scale if set", 1.0)
    limit: float = fact("scale", 0.0)


@dataclass(frozen=True)
class Branch:
    """One module on the residual stream: its norms, and the factors on what it reads and adds.

    Attributes:
        module: the facts of the module.
        norm, post_norm: their facts, None for none. norm_name, post_norm_name: their names within the layer.
        scale: factor on the result before it is added. in_scale: factor on what the module reads, after the norm.
    """

    module: Any
    norm: NormFacts | None = None
    norm_name: str = "input_layernorm"
    post_norm: NormFacts | None = None
    post_norm_name: str = "post_attention_layernorm"
    scale: float = fact("scale", 1.0)
    in_scale: float = fact("scale if set", 1.0)


Step = tuple[Branch, ...]


@dataclass(frozen=True)
class LayerFacts:
    """One decoder layer: steps one after the other, each a tuple of parallel branches."""

    steps: tuple[Step, ...]

    @property
    def branches(self) -> tuple[Branch, ...]:
        """All branches in order."""
        return tuple(branch for step in self.steps for branch in step)


@dataclass(frozen=True)
class EmbeddingFacts:
    """From token ids to the residual stream.

    Attributes:
        scale: factor on the embedding.
        positions: rows of a learned position table, 0 for none; position p reads row p + position_offset.
        norm: after the embedding (BLOOM), None for none.
    """

    scale: float = fact("scale", 1.0)
    positions: int = 0
    position_offset: int = fact("keep", 0)
    norm: NormFacts | None = None


@dataclass(frozen=True)
class HeadFacts:
    """From the residual stream to logits.

    Attributes:
        norm: the last norm, None for none.
        tied: whether the embedding is the head's matrix.
        bias: whether logits have one.
        scale: factor on the logits. softcap: then cap * tanh(logits / cap); 0 means none.
    """

    norm: NormFacts | None = NormFacts()
    tied: bool = False
    bias: bool = False
    scale: float = fact("scale", 1.0)
    softcap: float = fact("scale", 0.0)


@dataclass(frozen=True)
class ModelConfig:
    """All that the decoder needs to know.

    Attributes:
        layers: one record per layer; usually `LayerFacts`, or the record of a layer with a mechanism of its own.
        max_position: longest sequence the model was made for, in tokens.
        eos_token_ids: tokens that end a text.
        meta_ids: learned tokens that stand before every prompt; the engine puts them there.
        extra: facts shared by all layers of a family with a mechanism of its own, else None.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[Any, ...]
    max_position: int
    embedding: EmbeddingFacts = EmbeddingFacts()
    head: HeadFacts = HeadFacts()
    eos_token_ids: tuple[int, ...] = ()
    meta_ids: tuple[int, ...] = ()
    extra: Any = None

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelConfig:
        """The facts of the model that `config`, a parsed config.json, stands for.

        Raises:
            ValueError: a family, rotary scaling or activation the engine does not run, or a missing field.
        """
        from kvlab.models.families import model_config

        return model_config(config)
