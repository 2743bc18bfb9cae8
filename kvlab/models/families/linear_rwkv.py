"""RWKV-4. Source: transformers 5.24.0, models/rwkv/configuration_rwkv.py and modeling_rwkv.py.

What `rescale_every` asks for, weights halved and the stream with them, keeps fp16 in range and is not done here: but
for the eps of norms it changes nothing.
"""

from __future__ import annotations

from kvlab.models.facts import EmbeddingFacts, HeadFacts, ModelConfig, NormFacts
from kvlab.models.families.common import Family, Rename
from kvlab.models.families.reader import ConfigReader
from kvlab.models.modules.rwkv import RwkvLayerFacts


def rwkv(c: ConfigReader) -> ModelConfig:
    """A model of equal layers, each a running average and a feed-forward part."""
    hidden = c.hidden_size
    norm = NormFacts("layer", float(c.get("layer_norm_epsilon")), bias=True)
    layer = RwkvLayerFacts(c.get("attention_hidden_size") or hidden, c.get("intermediate_size") or 4 * hidden, norm)
    # the last norm is made without the config's eps
    head = HeadFacts(NormFacts("layer", 1e-5, bias=True), tied=bool(c.get("tie_word_embeddings")))
    return ModelConfig(
        c.config["model_type"],
        c.positive("vocab_size"),
        hidden,
        (layer,) * c.num_layers,
        c.positive("context_length"),
        EmbeddingFacts(norm=norm),
        head,
        c.token_ids(),
    )


_NAMES: list[Rename] = [
    (r"rwkv\.embeddings\.weight", [("model.embed_tokens.weight", None)]),
    (r"rwkv\.blocks\.0\.pre_ln\.(weight|bias)", [(r"model.embed_norm.\1", None)]),
    (r"rwkv\.ln_out\.(weight|bias)", [(r"model.norm.\1", None)]),
    (r"rwkv\.blocks\.(\d+\..*time_mix.*)", [(r"model.layers.\1", lambda t, c: t.flatten())]),
    (r"rwkv\.blocks\.(.*)", [(r"model.layers.\1", None)]),
    (r"head\.weight", [("lm_head.weight", None)]),
]
FAMILIES: dict[str, Family] = {
    "rwkv": Family(
        rwkv, {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": False, "context_length": 1024}, _NAMES
    ),
}  # fmt: skip
