"""From what a caller gives as a prompt to the token ids that a request is made of."""

from __future__ import annotations

import operator
from collections.abc import Sequence


def prompt_ids(model, prompt: str | Sequence[int]) -> list[int]:
    """The token ids of `prompt` behind the model's meta tokens; nothing stays nothing.

    Raises:
        ValueError: a text without a tokenizer, what is no whole number, an id that the model does not have.
    """
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError("prompt: the model has no tokenizer, give token ids")
        ids = list(model.tokenizer.encode(prompt))
    else:
        ids = _checked(prompt, model.config.vocab_size)
    return [*model.config.meta_ids, *ids] if ids else ids


def end_ids(model) -> tuple[int, ...]:
    """The tokens that end a request of this model unless it ignores them."""
    return model.config.eos_token_ids + (() if model.tokenizer is None else model.tokenizer.eos_ids)


def _checked(prompt: Sequence[int], vocab: int) -> list[int]:
    try:
        ids = [operator.index(token) for token in prompt]
    except TypeError as error:
        raise ValueError(f"prompt: must be a text or whole numbers, token ids ({error})") from None
    if bad := [token for token in ids if not 0 <= token < vocab]:
        raise ValueError(f"prompt: token id {bad[0]} must be at least 0 and below the vocabulary's {vocab}")
    return ids
