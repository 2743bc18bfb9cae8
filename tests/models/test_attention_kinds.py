"""Attention as each family does it: the paged decoder against the whole sequence recomputed without a cache, in fp64."""

import pytest
import torch
from recomputed import TEXT, assert_paged_is_recomputed, tiny

from kvlab.lab.parity.paging import PagedSequences
from kvlab.models.facts import AlibiFacts, TemperatureFacts
from kvlab.models.modules.attention import alibi_slopes, query_growth

BASE = {
    "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 64, "rope_theta": 100.0,
}  # fmt: skip
GPT = {
    "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64, "vocab_size": 101, "hidden_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 6,
}  # fmt: skip
LONG = {"rope_type": "longrope", "long_factor": [2.0, 3.0, 5.0, 9.0], "short_factor": [1.0, 1.1, 1.2, 1.3]}
KINDS = {
    "soft-caps, windows, offset norms": {
        "model_type": "gemma2", "head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": 3.0,
    },
    "two rotary bases, norms of heads": {"model_type": "gemma3_text", "head_dim": 10, "sliding_window": 4},
    "norms after, over all heads": {"model_type": "olmo3", "sliding_window": 6, "head_dim": 8},
    "side by side, unrotated full layers": {"model_type": "cohere2", "sliding_window": 3, "layer_norm_eps": 1e-5},
    "sinks, experts with biases": {
        "model_type": "gpt_oss", "head_dim": 8, "sliding_window": 4, "num_local_experts": 3, "num_experts_per_tok": 2,
        "swiglu_limit": 0.5,
    },
    "chunks, temperature": {
        "model_type": "llama4_text", "head_dim": 8, "attention_chunk_size": 5, "num_local_experts": 3,
        "intermediate_size_mlp": 20, "floor_scale": 3, "interleave_moe_layer_step": 2,
    },
    "partial interleaved rotation": {"model_type": "glm4", "head_dim": 8},
    "stretched by pair": {
        "model_type": "phi3", "rope_scaling": LONG, "original_max_position_embeddings": 7, "head_dim": 8,
    },
    "learned positions": {"model_type": "gpt2"} | GPT,
    "multi-query, side by side": {"model_type": "falcon"} | GPT,
    "ALiBi, six heads": {"model_type": "falcon", "alibi": True, "parallel_attn": False, "bias": True} | GPT,
    "ALiBi, norm of the embedding": {"model_type": "bloom"} | GPT,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_paged_logits_are_those_of_the_whole_sequence_recomputed(kind):
    assert_paged_is_recomputed(*tiny(BASE | KINDS[kind]))


def test_slopes_of_alibi_follow_the_paper():
    assert alibi_slopes(8, AlibiFacts()).tolist() == [2.0**-h for h in range(1, 9)]
    # six heads: four of the power of two below, two of every second one above
    assert alibi_slopes(6, AlibiFacts()).tolist() == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    assert alibi_slopes(2, AlibiFacts(max_bias=4, factor=0.5)).tolist() == [2.0**-3, 2.0**-5]


def test_queries_grow_by_whole_steps():
    growth = query_growth(TemperatureFacts(4, 0.5, offset=1), torch.arange(9), torch.float64).flatten()
    steps = [0, 0, 0, 1, 1, 1, 1, 2, 2]
    torch.testing.assert_close(growth, 1 + 0.5 * torch.tensor(steps, dtype=torch.float64).log1p())


def test_longrope_chooses_once_for_the_length_it_is_run_with():
    model, _ = tiny(BASE | KINDS["stretched by pair"])
    short = model.decoder.for_length(7)
    cut, full = TEXT[:7], TEXT[:12]

    def logits(decoder, ids):
        from dataclasses import replace

        return PagedSequences(replace(model, decoder=decoder), 1, len(ids)).step({0: ids})[0]

    # the same tokens in a longer sequence are rotated the same: nothing in the cache becomes wrong as it grows
    torch.testing.assert_close(logits(model.decoder, full)[:7], logits(model.decoder, cut), rtol=0, atol=1e-12)
    assert (logits(short, cut) - logits(model.decoder, cut)).abs().max() > 1e-3
    # one token more than the model was trained at needs the long divisors
    assert torch.equal(logits(model.decoder.for_length(8), cut), logits(model.decoder, cut))


def test_the_engine_chooses_by_its_max_model_len(monkeypatch):
    from kvlab.engine import Engine, SamplingParams

    monkeypatch.setenv("KVLAB_OPS", "torch")  # which tables it takes, whatever computes
    model, _ = tiny(BASE | KINDS["stretched by pair"], "fp32")
    tokens = {}
    for longest in (7, 20):
        engine = Engine(model, max_model_len=longest, num_blocks=9, block_size=4)
        engine.generate([TEXT[:5]], SamplingParams(1))
        tokens[longest] = engine.runner.decoder._positions._max_len
    assert tokens == {7: 7, 20: 20}
