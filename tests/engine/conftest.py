"""Tiny random models in fp64, and a reference that knows nothing of caches, pages, batches or kvlab's operations.

The reference recomputes everything for every token: a dense masked attention over the whole sequence, one sequence
at a time, from the checkpoint's own tensors.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvlab.engine import SamplingParams
from kvlab.engine.sampler import RowParams, sample
from kvlab.models.load import from_state_dict

# tests import the helper modules beside them
sys.path.insert(0, str(Path(__file__).parent))

HEADS, KV_HEADS, DIM, HIDDEN, MLP, VOCAB = 4, 2, 6, 24, 40, 61
WINDOW = 7
KINDS = {
    "full": {"model_type": "llama", "num_hidden_layers": 2},
    "window": {"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": WINDOW},
    "both": {
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "sliding_window": WINDOW,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def config_of(kind: str, **changes) -> dict:
    common = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "max_position_embeddings": 128,
        "rope_theta": 100.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    return common | KINDS[kind] | changes


def random_state(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights under which attention is sharp and every bias and norm counts."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return torch.randn(*shape, generator=rng, dtype=torch.float64) * scale

    def matrix(rows, columns):
        return normal(rows, columns, scale=1.8 / math.sqrt(columns))

    state = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN),
        "model.norm.weight": 1 + normal(HIDDEN, scale=0.3),
        "lm_head.weight": matrix(VOCAB, HIDDEN),
    }
    sizes = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, rows in sizes.items():
            state[f"{layer}self_attn.{name}_proj.weight"] = matrix(rows, HIDDEN)
            if config["model_type"] == "qwen2":
                state[f"{layer}self_attn.{name}_proj.bias"] = normal(rows, scale=0.5)
        state[f"{layer}self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * DIM)
        state[f"{layer}mlp.gate_proj.weight"] = matrix(MLP, HIDDEN)
        state[f"{layer}mlp.up_proj.weight"] = matrix(MLP, HIDDEN)
        state[f"{layer}mlp.down_proj.weight"] = matrix(HIDDEN, MLP)
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"{layer}{name}.weight"] = 1 + normal(HIDDEN, scale=0.3)
    return state


class DenseReference:
    """Logits and tokens by brute force."""

    def __init__(self, config: dict, state: dict[str, torch.Tensor]) -> None:
        self.config, self.state = config, state
        types = config.get("layer_types") or ["sliding_attention"] * config["num_hidden_layers"]
        window = config.get("sliding_window") or 10**9
        self.windows = [window if kind == "sliding_attention" else 10**9 for kind in types]
        self.layers: list[dict[str, torch.Tensor]] = [{} for _ in types]
        for name, tensor in state.items():
            if name.startswith("model.layers."):
                _, _, i, own = name.split(".", 3)
                self.layers[int(i)][own] = tensor
        self.known: dict[tuple, list[int]] = {}

    def tokens(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """The `max_tokens` tokens after `prompt`, each from a forward over everything before it."""
        key = (tuple(prompt), params)
        if key not in self.known:
            ids = list(prompt)
            for _ in range(params.max_tokens):
                logits = self.logits(ids)[-1:]
                rows = RowParams.of([params], [params.seed or 0], [len(ids)], logits)
                ids.append(int(sample(logits, rows)))
            self.known[key] = ids[len(prompt) :]
        return self.known[key]

    def logits(self, ids: list[int]) -> torch.Tensor:
        x = self.state["model.embed_tokens.weight"][torch.tensor(ids)]
        for i, window in enumerate(self.windows):
            w = self.layers[i]
            x = x + self._attention(self._norm(x, w["input_layernorm.weight"]), w, window)
            h = self._norm(x, w["post_attention_layernorm.weight"])
            gate = h @ w["mlp.gate_proj.weight"].T
            x = x + (gate * torch.sigmoid(gate) * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
        return self._norm(x, self.state["model.norm.weight"]) @ self.state["lm_head.weight"].T

    def _attention(self, h, w, window):
        def heads(name):
            bias = w.get(f"self_attn.{name}_proj.bias", 0.0)
            return (h @ w[f"self_attn.{name}_proj.weight"].T + bias).view(len(h), -1, DIM)

        q, k, v = self._rope(heads("q")), self._rope(heads("k")), heads("v")
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        distance = torch.arange(len(h))[:, None] - torch.arange(len(h))
        seen = (distance >= 0) & (distance < window)
        scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(DIM)
        out = torch.einsum("hts,shd->thd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)
        return out.flatten(1) @ w["self_attn.o_proj.weight"].T

    def _rope(self, x):
        frequency = self.config["rope_theta"] ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
        angle = torch.arange(len(x), dtype=torch.float64)[:, None, None] * frequency
        a, b = x[..., : DIM // 2], x[..., DIM // 2 :]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    def _norm(self, x, weight):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


class Tiny:
    """A tiny model of one kind with its reference; `model(dtype)` builds it for the engine."""

    def __init__(self, kind: str, **changes) -> None:
        self.kind, self.config = kind, config_of(kind, **changes)
        self.state = random_state(self.config)
        self.reference = DenseReference(self.config, self.state)
        self.window = self.config.get("sliding_window") or 0
        self._models: dict[str, object] = {}

    def model(self, dtype: str = "fp64"):
        if dtype not in self._models:
            self._models[dtype] = from_state_dict(self.config, self.state, dtype, "cpu")
        return self._models[dtype]


_TINY: dict[str, Tiny] = {}


@pytest.fixture
def tiny():
    """tiny(kind): the `Tiny` of that kind, made once."""
    return lambda kind: _TINY.setdefault(kind, Tiny(kind))


@pytest.fixture(params=KINDS)
def every_tiny(request) -> Tiny:
    """Each kind in turn: full attention, windows alone, both."""
    return _TINY.setdefault(request.param, Tiny(request.param))


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    """A model directory of kind "both", in fp32, without a tokenizer."""
    path, both = tmp_path_factory.mktemp("model"), Tiny("both")
    (path / "config.json").write_text(json.dumps(both.config))
    save_file({name: tensor.float() for name, tensor in both.state.items()}, str(path / "model.safetensors"))
    return path
