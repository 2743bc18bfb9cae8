"""A draft model: any model of the same vocabulary, with a cache of its own."""

from __future__ import annotations

from typing import Any

from kvlab.models.load import LoadedModel
from kvlab.speculate.cached import CachedProposer


class ModelProposer(CachedProposer):
    """Drafts with `model`.

    Raises:
        ValueError: another vocabulary, a shorter length than the engine's, or states, which cannot be cut back.
    """

    def __init__(self, engine: Any, model: LoadedModel, k: int, drawn: bool = True) -> None:
        wanted, have = engine.model.config.vocab_size, model.config.vocab_size
        if have != wanted:
            raise ValueError(f"draft {model.name!r}: its vocabulary has {have} tokens, {engine.model.name!r} {wanted}")
        if model.config.max_position < engine.limits.max_model_len:
            raise ValueError(
                f"draft {model.name!r}: was made for {model.config.max_position} tokens, max_model_len is "
                f"{engine.limits.max_model_len}"
            )
        if any(part.retention.rule == "state" for _, part in model.spec.parts()):
            raise ValueError(f"draft {model.name!r}: keeps states, which cannot be cut back when a draft was wrong")
        super().__init__(engine, model.decoder.for_length(engine.limits.max_model_len), model.spec, k, drawn)
