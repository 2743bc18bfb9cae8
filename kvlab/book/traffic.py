"""Live traffic inside a notebook: a small model behind the real server on a free port, and a load sent to it.

The model has random weights: what it says means nothing, what it takes and how long it waits is real.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from kvlab.book.dashboard import Watch
from kvlab.engine import Engine
from kvlab.lab.replay import ReplayOptions, replay
from kvlab.serve.server import ServerThread
from kvlab.simulate import Objective, Trace, parse_recipe, synthetic

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SETTINGS = {"block_size": 16, "max_num_seqs": 32, "max_batched_tokens": 256, "max_model_len": 2048}
OBJECTIVE = Objective(ttft_s=0.5, tpot_s=0.05)


@cache
def small_model() -> Any:
    """A Llama of two narrow layers with random weights."""
    import torch

    from kvlab.models.load import empty_model

    model = empty_model(CONFIG, "fp32", torch.device("cpu"), "small")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, tensor in sorted(model.decoder.weights.named.items()):
            if tensor.dim() == 1:
                tensor.fill_(1.0)
            else:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / tensor.shape[-1] ** 0.5)
    return model


def small_server(num_blocks: int, **changes: Any) -> ServerThread:
    """A server over the small model whose pool has `num_blocks` - 1 pages, for a `with` block."""
    return ServerThread(Engine(small_model(), num_blocks=num_blocks, **(SETTINGS | changes)))


def send(server: ServerThread, load: str | Trace) -> tuple[dict[str, Any], Watch]:
    """What the client saw of `load` (a trace or a recipe), and what /metrics said meanwhile."""
    trace = synthetic(parse_recipe(load)) if isinstance(load, str) else load
    with Watch(server.url, every=0.05) as watch:
        report = replay(trace, ReplayOptions(server.url, objective=OBJECTIVE))
    return report, watch
