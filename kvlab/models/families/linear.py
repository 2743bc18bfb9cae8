"""Linear attention and its relatives: MiniMax's hybrid, and two native families that no checkpoint needs.

`kvlab_linear` and `kvlab_retnet` are configs of this project: every layer linear attention or retention, or attention
where `layer_types` says so, in Llama's frame. Sources: Transformers are RNNs (arXiv 2006.16236); RetNet (arXiv
2307.08621); for MiniMax transformers 5.24.0, models/minimax/modeling_minimax.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvlab.models.facts import ModelConfig, NormFacts
from kvlab.models.families.common import Family, attention, gated_mlp, model, pre_norm_layer, rms
from kvlab.models.families.delta import split_heads
from kvlab.models.families.moe import FAMILIES as MOE
from kvlab.models.families.moe import experts
from kvlab.models.families.reader import ConfigReader
from kvlab.models.modules.linear_attention import LinearAttentionFacts
from kvlab.models.modules.normed_layer import NormedBranch, NormedLayerFacts


def kinds(c: ConfigReader, usual: list[str]) -> tuple[str, ...]:
    """ "linear_attention" or "full_attention" per layer."""
    return c.per_layer("layer_types", tuple(c.get("layer_types") or usual))


def linear_mixer(c: ConfigReader) -> LinearAttentionFacts:
    """Linear attention without decay: elu(x) + 1 of queries and keys, divided by the sum of scores."""
    heads, _, width = c.heads()
    return LinearAttentionFacts(heads, width, width, positive=True, normalised=True)


def retention(c: ConfigReader) -> LinearAttentionFacts:
    """Retention: head h keeps 1 - 2 ** (-5 - h) of its state at each token; rotated, normed per head, gated."""
    heads, _, width = c.heads()
    decays = tuple(math.log1p(-(2.0 ** (-5 - h))) for h in range(heads))
    norm = NormFacts(eps=float(c.get("rms_norm_eps")), weight=False)
    return LinearAttentionFacts(
        heads, width, width, decays, decay=1.0, scale=width**-0.5, rope=c.rope(), norm=norm, gate="silu"
    )


def native(mixer: Callable[[ConfigReader], LinearAttentionFacts]) -> Callable[[ConfigReader], ModelConfig]:
    """A builder of Llama-like decoders with `mixer` in every layer that `layer_types` does not call full_attention."""

    def build(c: ConfigReader) -> ModelConfig:
        norm, mlp = rms(c), gated_mlp(c)
        mixers = {"linear_attention": mixer(c), "full_attention": attention(c, rope=c.rope())}
        usual = ["linear_attention"] * c.num_layers
        return model(c, [pre_norm_layer(mixers[kind], mlp, norm) for kind in kinds(c, usual)])

    return build


def lightning(c: ConfigReader, layer: int) -> LinearAttentionFacts:
    """Lightning attention of one layer: head h loses exp of 2 ** (-8 (h + 1) / heads), less the deeper the layer."""
    heads, _, width = c.heads()
    share = 1 - layer / (c.num_layers - 1 + 1e-5) + 1e-5
    decays = tuple(-(2 ** (-8 * (h + 1) / heads)) * share for h in range(heads))
    return LinearAttentionFacts(
        heads, width, width, decays, decay=1.0, activation=c.activation(), norm=NormFacts(eps=1e-6), norm_wide=True,
        gate="sigmoid",
    )  # fmt: skip


def minimax(c: ConfigReader) -> ModelConfig:
    """Lightning attention between layers of attention, experts after each, the stream normed on its way.

    Raises:
        ValueError: a MiniMax that transformers has no class for.
    """
    if c.config["model_type"] != "minimax":
        raise ValueError(
            f"model_type {c.config['model_type']!r}: the engine runs MiniMax as transformers has it, minimax"
        )
    usual = ["linear_attention" if i % 2 else "full_attention" for i in range(c.num_layers)]
    mixture, norm, layers = experts(c, "intermediate_size", normalise=True), rms(c), []
    for i, kind in enumerate(kinds(c, usual)):
        full = kind == "full_attention"
        mixer = attention(c, rope=c.rope()) if full else lightning(c, i)
        name = "full_attn" if full else "linear_attn"
        factors = [(float(c.get(f"{n}_alpha_factor")), float(c.get(f"{n}_beta_factor"))) for n in (name, "mlp")]
        first = NormedBranch(mixer, norm, "input_layernorm", *factors[0])
        layers.append(NormedLayerFacts((first, NormedBranch(mixture, norm, "post_attention_layernorm", *factors[1]))))
    return model(c, layers)


def _qkv(c: ConfigReader) -> tuple[int, list[int]]:
    heads, _, width = c.heads()
    return heads, [width] * 3


_LAYER = r"(model\.layers\.\d+\.self_attn\.)"
_NATIVE: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False,
}  # fmt: skip
_FACTORS = {f"{part}_{n}_factor": 1.0 for part in ("full_attn", "linear_attn", "mlp") for n in ("alpha", "beta")}

FAMILIES: dict[str, Family] = {
    "kvlab_linear": Family(native(linear_mixer), _NATIVE),
    "kvlab_retnet": Family(native(retention), _NATIVE),
    "minimax": Family(
        minimax,
        _NATIVE | _FACTORS | {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        [
            *MOE["mixtral"].names,
            (
                _LAYER + r"qkv_proj\.weight",
                [(rf"\1{n}_proj.weight", split_heads(_qkv, i)) for i, n in enumerate("qkv")],
            ),
            (_LAYER + r"out_proj\.weight", [(r"\1o_proj.weight", None)]),
            (_LAYER + r"output_gate\.weight", [(r"\1gate_proj.weight", None)]),
        ],
        # tables of the decay, computed here
        (r"\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$",),
    ),
}
