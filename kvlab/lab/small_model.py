"""A small random model, made in a moment and always the same: for experiments on schedules, tables and pages."""

from __future__ import annotations

import torch

from kvlab.models.load import LoadedModel, empty_model

CONFIG = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 64, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
    "rope_theta": 100.0, "tie_word_embeddings": False,
}  # fmt: skip


def small_model(seed: int = 1) -> LoadedModel:
    """A llama of 3 layers in fp32 whose weights `seed` fixes; without a tokenizer."""
    model = empty_model(CONFIG, "fp32", torch.device("cpu"), "small")
    fill(model, seed)
    return model


@torch.no_grad()
def fill(model: LoadedModel, seed: int) -> None:
    """Puts the weights of `seed` into the model, as a deploy of other weights would."""
    generator = torch.Generator().manual_seed(seed)
    for _, tensor in sorted(model.decoder.weights.named.items()):
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(1 + 0.1 * noise if tensor.dim() == 1 else noise * 1.5 / tensor.shape[-1] ** 0.5)
