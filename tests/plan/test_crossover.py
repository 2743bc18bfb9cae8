"""Where the bytes of two caches cross: found by halving, here by asking every length."""

from __future__ import annotations

import pytest

from kvlab.plan.crossover import crossings, first_smaller
from kvlab.specs.families import from_config

BASE = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 32, "head_dim": 8}


def full(heads: int):
    return from_config({"model_type": "llama", "num_key_value_heads": heads, **BASE})


def windowed(window: int):
    config = {"model_type": "mistral", "num_key_value_heads": 4, "sliding_window": window, **BASE}
    return from_config(config)


def recurrent():
    config = {"model_type": "mamba2", "num_hidden_layers": 3, "hidden_size": 32, "head_dim": 8, "num_heads": 8}
    return from_config(config | {"state_size": 16, "n_groups": 1, "conv_kernel": 4, "expand": 2, "vocab_size": 32})


def by_asking(model, than, longest):
    answers = [model.bytes_at(n) < than.bytes_at(n) for n in range(1, longest + 1)]
    return [n + 1 for n in range(1, longest) if answers[n] != answers[n - 1]]


@pytest.mark.parametrize(
    ("model", "than"),
    [
        (windowed(37), full(4)), (full(1), windowed(37)), (recurrent(), full(4)), (full(2), recurrent()),
        (windowed(11), windowed(37)), (full(4), full(2)), (recurrent(), windowed(101)),
    ],
)  # fmt: skip
def test_crossings_are_those_that_asking_every_length_finds(model, than) -> None:
    assert crossings(model, than, 503) == by_asking(model, than, 503)


def test_a_window_is_cheaper_from_the_first_token_it_does_not_keep() -> None:
    assert first_smaller(windowed(37), full(4)) == 38


def test_what_is_always_smaller_is_so_from_the_first_token_and_what_never_is_gives_none() -> None:
    assert first_smaller(full(2), full(4)) == 1
    assert first_smaller(full(4), full(2)) is None
    assert first_smaller(full(4), full(4)) is None


def test_a_length_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="longest 0"):
        crossings(full(1), full(2), 0)
