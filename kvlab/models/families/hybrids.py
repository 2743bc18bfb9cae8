"""Two native families that no checkpoint needs, in Llama's frame.

`kvlab_hybrid`: attention and small states in any ratio; `layer_types` or a ratio says what each layer is.

    attention_layers : recurrent_layers   1 : 3 makes a period of three recurrent layers and then one of attention
    recurrent_kind                        "mamba2", "gated_delta" or "linear_attention"
    attention_kind                        "full_attention" or "sliding_attention" (with sliding_window)

With `layer_types` of sliding and full attention alone it is a model of windows with a few full layers (Goldfish's sort).

`kvlab_hymba`: attention heads and Mamba heads read the same input in every layer; what each gives is normed, weighted
and averaged. Learned meta tokens stand before every sequence. They are the last `num_meta_tokens` ids of the vocabulary
and ordinary first positions, which the engine puts in front of every prompt. Nothing before them differs from one
sequence to the next, so their pages and the state behind them are a prefix that all sequences can share. Source: Hymba
(arXiv 2411.13676), sections 2.1 and 2.3; its windows and shared layers are left out.
"""

from __future__ import annotations

from typing import Any

from kvlab.models.facts import Branch, LayerFacts, ModelConfig
from kvlab.models.families.common import Family, attention, gated_mlp, model, pre_norm_layer, rms
from kvlab.models.families.delta import gated_delta_net
from kvlab.models.families.linear import linear_mixer
from kvlab.models.families.mamba import mamba1, mamba2
from kvlab.models.families.reader import ConfigReader
from kvlab.specs.families.recurrent import hybrid_pattern

MIXERS = {
    "full_attention": lambda c: attention(c, rope=c.rope()),
    "sliding_attention": lambda c: attention(c, rope=c.rope(), window=c.positive("sliding_window")),
    "mamba2": lambda c: mamba2(c, float(c.get("rms_norm_eps"))),
    "gated_delta": gated_delta_net,
    "linear_attention": linear_mixer,
}


def hybrid(c: ConfigReader) -> ModelConfig:
    """A pre-norm decoder whose layers are what `layer_types`, or else the ratio, says.

    Raises:
        ValueError: a kind of layer that there is not.
    """
    kinds = c.get("layer_types") or hybrid_pattern(c.num_layers, c.config)
    if unknown := set(kinds) - set(MIXERS):
        raise ValueError(f"layer_types {sorted(unknown)[0]!r}: must be one of {', '.join(MIXERS)}")
    mixers = {kind: MIXERS[kind](c) for kind in dict.fromkeys(kinds)}
    norm, mlp = rms(c), gated_mlp(c)
    return model(c, [pre_norm_layer(mixers[kind], mlp, norm) for kind in c.per_layer("layer_types", tuple(kinds))])


def hymba(c: ConfigReader) -> ModelConfig:
    """Parallel heads: stream + (norm(attention(x)) + norm(mamba(x))) / 2, the weights of the norms what each counts.

    Raises:
        ValueError: as many meta tokens as ids, or more.
    """
    size, count = c.positive("vocab_size"), c.get("num_meta_tokens")
    if not 0 <= count < size:
        raise ValueError(f"num_meta_tokens {count}: must be less than vocab_size")
    norm, mlp = rms(c), gated_mlp(c)
    names = ("attention_output_norm", "mamba_output_norm")
    mixers = (attention(c, rope=c.rope()), mamba1(c, norm))
    heads = tuple(
        Branch(m, norm, post_norm=norm, post_norm_name=n, scale=0.5) for m, n in zip(mixers, names, strict=True)
    )
    layer = LayerFacts((heads, (Branch(mlp, norm, "post_attention_layernorm"),)))
    return model(c, [layer] * c.num_layers, meta_ids=tuple(range(size - count, size)))


_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False,
    "conv_bias": True, "mamba_bias": False, "n_groups": 1, "conv_kernel": 4, "expand": 2,
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "kvlab_hybrid": Family(hybrid, _DEFAULTS),
    "kvlab_hymba": Family(hymba, _DEFAULTS | {"num_meta_tokens": 0, "state_size": 16}),
}
