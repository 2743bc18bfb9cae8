"""A tiny model that speaks: random weights in fp64, a tokenizer of 61 words, a chat template."""

from __future__ import annotations

import math

import torch
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import WordPiece
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from kvlab.engine import Engine
from kvlab.models.load import LoadedModel, from_state_dict
from kvlab.models.tokenizer import Tokenizer

VOCAB, HIDDEN, HEADS, DIM = 61, 24, 4, 6
CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 40,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": DIM, "max_position_embeddings": 256,
    "rope_theta": 100.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}w1 {{ m['role'] == 'user' and 'w2' or 'w3' }} {{ m['content'] }} w4 {% endfor %}"
    "{% if add_generation_prompt %}w1 w3{% endif %}"
)


def tokenizer() -> Tokenizer:
    """Words "w0" to "w60", each a token of that id."""
    backend = Backend(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.decoder = WordPiece(prefix="##", cleanup=False)
    return Tokenizer(backend, {"chat_template": TEMPLATE})


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights under which attention counts."""
    rng = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=rng, dtype=torch.float64) * 1.8 / math.sqrt(columns)

    found = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN) * 3, "model.norm.weight": torch.ones(HIDDEN)}
    shapes = {
        "self_attn.q_proj": (HEADS * DIM, HIDDEN), "self_attn.k_proj": (2 * DIM, HIDDEN),
        "self_attn.v_proj": (2 * DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * DIM),
        "mlp.gate_proj": (40, HIDDEN), "mlp.up_proj": (40, HIDDEN), "mlp.down_proj": (HIDDEN, 40),
    }  # fmt: skip
    for i in range(2):
        for name, shape in shapes.items():
            found[f"model.layers.{i}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{i}.{name}.weight"] = torch.ones(HIDDEN)
    return found


def model(speaks: bool = True) -> LoadedModel:
    """The tiny model, with its tokenizer when it `speaks`."""
    return from_state_dict(CONFIG, state(), "fp64", "cpu", tokenizer=tokenizer() if speaks else None, name="tiny")


def engine(**options) -> Engine:
    """An engine over it that checks its invariants after every step."""
    chosen = {"block_size": 4, "num_blocks": 65, "max_num_seqs": 4, "max_batched_tokens": 32, "check": True} | options
    return Engine(model(), **chosen)
