"""Parallel heads with meta tokens: what stands before every sequence is cached once for all."""

import pytest
import torch
from recomputed import TEXT, assert_paged_is_recomputed, tiny

from kvlab.engine import Engine, SamplingParams
from kvlab.lab.parity.paging import PagedSequences
from kvlab.models.reference import reference_forward

CONFIG = {
    "model_type": "kvlab_hymba",
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "vocab_size": 106,
    "num_meta_tokens": 5,
    "mamba_d_state": 7,
    "mamba_dt_rank": 3,
    "max_position_embeddings": 96,
}


@pytest.fixture(autouse=True)
def torch_forms(monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", "torch")


def test_paged_logits_are_those_of_the_whole_sequence_recomputed():
    assert_paged_is_recomputed(*tiny(CONFIG))


def test_each_layer_keeps_keys_and_a_state():
    model, _ = tiny(CONFIG)
    assert [[part.kind for part in layer.parts] for layer in model.spec.layers] == [["full", "recurrent"]] * 2


def test_meta_tokens_are_the_last_ids_and_move_every_logit():
    model, state = tiny(CONFIG)
    meta = list(model.config.meta_ids)
    assert meta == [101, 102, 103, 104, 105]
    bare, led = (reference_forward(model.config, state, torch.tensor(ids)) for ids in (TEXT, meta + TEXT))
    assert ((led[len(meta) :] - bare).abs().amax(-1) > 1e-3).all()


def test_the_engine_puts_meta_tokens_before_every_prompt():
    model, state = tiny(CONFIG)
    engine = Engine(model, kv_dtype="fp64", block_size=4, num_blocks=20, max_model_len=60, check=True)
    (got,) = engine.generate([TEXT], SamplingParams(max_tokens=6))
    ids = [*model.config.meta_ids, *TEXT]
    for _ in range(6):
        ids.append(int(reference_forward(model.config, state, torch.tensor(ids))[-1].argmax()))
    assert got.token_ids == ids[-6:]
    assert engine.generate([[]])[0].finish_reason == "error"


def test_what_meta_tokens_leave_in_the_cache_is_the_same_for_every_sequence():
    """Keys, values and the state after them: a prefix that all requests share."""
    model, _ = tiny(CONFIG)
    meta = list(model.config.meta_ids)
    cache = PagedSequences(model, 2, len(meta) + len(TEXT), block_size=len(meta))
    cache.step({0: meta + TEXT, 1: meta})
    attention, recurrent = (cache._views[1][part] for part in (0, 1))
    pages = [int(cache._tables[0][seq, 0]) for seq in (0, 1)]
    torch.testing.assert_close(*(attention.k[page] for page in pages), rtol=0, atol=1e-12)
    torch.testing.assert_close(*(attention.v[page] for page in pages), rtol=0, atol=1e-12)
    # a sequence that goes on from there: the state page of the other, copied
    other = PagedSequences(model, 1, len(meta) + len(TEXT), block_size=len(meta))
    other.step({0: meta})
    states = [v[1][1]["state"][int(t[1][s, 0])] for v, t, s in
              ((cache._views, cache._tables, 1), (other._views, other._tables, 0))]  # fmt: skip
    torch.testing.assert_close(*states, rtol=0, atol=1e-12)
    assert recurrent["conv"].shape[1] == 3 * 72


def test_a_vocabulary_of_nothing_but_meta_tokens_is_refused():
    with pytest.raises(ValueError, match="num_meta_tokens 106: must be less than vocab_size"):
        tiny(CONFIG | {"num_meta_tokens": 106})
