"""A native family: attention and small states in any ratio, in Llama's frame. No checkpoint has it; `layer_types` or a
ratio says what each layer is.

    attention_layers : recurrent_layers   1 : 3 makes a period of three recurrent layers and then one of attention
    recurrent_kind                        "mamba2", "gated_delta" or "linear_attention"
    attention_kind                        "full_attention" or "sliding_attention" (with sliding_window)
"""

from __future__ import annotations

from typing import Any

from kvlab.models.facts import ModelConfig
from kvlab.models.families.common import Family, attention, gated_mlp, model, pre_norm_layer, rms
from kvlab.models.families.delta import gated_delta_net
from kvlab.models.families.linear import linear_mixer
from kvlab.models.families.mamba import mamba2
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


_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False,
    "conv_bias": True, "mamba_bias": False, "n_groups": 1, "conv_kernel": 4, "expand": 2,
}  # fmt: skip

FAMILIES: dict[str, Family] = {"kvlab_hybrid": Family(hybrid, _DEFAULTS)}
