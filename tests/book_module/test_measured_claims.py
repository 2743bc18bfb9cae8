"""The relations behind the claims that were measured, and the library facts that the ledger quotes."""

from __future__ import annotations

import inspect

import pytest


class ConcatenatingCache:
    """Keeps keys by concatenation, as the guide's sketch does."""

    def __init__(self) -> None:
        self.k = None

    def append(self, torch, k):
        self.k = k if self.k is None else torch.cat([self.k, k], dim=2)
        return self.k


def test_a_concatenated_cache_grows_by_one_along_the_sequence() -> None:
    torch = pytest.importorskip("torch")
    cache, tokens = ConcatenatingCache(), [torch.randn(1, 3, 1, 7) for _ in range(5)]
    for i, token in enumerate(tokens):
        grown = cache.append(torch, token)
        assert grown.shape == (1, 3, i + 1, 7)
    assert torch.equal(grown, torch.cat(tokens, dim=2))


def test_concatenation_moves_what_was_there() -> None:
    torch = pytest.importorskip("torch")
    cache = ConcatenatingCache()
    before = cache.append(torch, torch.randn(1, 3, 4, 7))
    after = cache.append(torch, torch.randn(1, 3, 1, 7))
    assert after.data_ptr() != before.data_ptr() and torch.equal(after[:, :, :4], before)


def test_transformers_caches_unless_told_not_to() -> None:
    transformers = pytest.importorskip("transformers")
    assert transformers.LlamaConfig().use_cache is True
    defaults = transformers.GenerationConfig._get_default_generation_params()
    assert defaults["use_cache"] is True


def test_transformers_does_not_speculate_by_default_and_has_learned_sparse_attention() -> None:
    transformers = pytest.importorskip("transformers")
    assert inspect.signature(transformers.GenerationMixin.generate).parameters["assistant_model"].default is None
    from transformers.models.deepseek_v32 import modeling_deepseek_v32

    assert inspect.isclass(modeling_deepseek_v32.DeepseekV32Indexer)
