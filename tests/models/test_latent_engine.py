"""The engine over latents, index keys and compressed entries: chunked, batched, captured like any other model."""

import pytest
import test_compressed
import test_indexed_mla
import test_mla
import torch
from host_reads import NoHostReads
from recomputed import TEXT

from kvlab.engine import Engine, SamplingParams
from kvlab.models.reference import reference_forward

MODELS = {
    "latents": (test_mla, "queries from a latent, biases", 4),
    "chosen latents": (test_indexed_mla, "choices shared", 4),
    # a page holds whole entries of 3 and of 5 tokens
    "compressed entries": (test_compressed, "all three", 15),
}


def engine_of(name: str, **options):
    module, kind, block_size = MODELS[name]
    model, state = module.tiny(kind)
    options = {"num_blocks": 40, "max_num_seqs": 3, "max_batched_tokens": 7, "max_model_len": 60} | options
    return Engine(model, block_size=block_size, kv_dtype="fp64", **options), model, state


@pytest.mark.parametrize("name", MODELS)
def test_batched_and_chunked_tokens_are_those_of_whole_sequences(name):
    engine, model, state = engine_of(name)
    prompts = [TEXT[:9], TEXT[5:8], TEXT[3:16]]
    got = engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0))
    for prompt, completion in zip(prompts, got, strict=True):
        ids = list(prompt)
        for _ in range(8):
            ids.append(int(reference_forward(model.config, state, torch.tensor(ids))[-1].argmax()))
        assert list(completion.token_ids) == ids[len(prompt) :]
    assert engine.kv.predicted_bytes == engine.kv.allocated_bytes


@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_decodes_reads_nothing_back(name, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", "torch")
    engine, _, _ = engine_of(name, max_batched_tokens=60)
    for prompt in (TEXT[:9], TEXT[5:8], TEXT[3:16]):
        engine.add_request(prompt, SamplingParams(max_tokens=20))
    engine.step()
    engine.step()
    step = engine.scheduler.schedule(0.0)
    assert step.num_decodes == len(step.chunks) == 3
    inputs = engine.runner.fill(step)
    with NoHostReads():
        logits = engine.runner.forward(inputs)
    assert logits.shape[0] == 3 and logits.isfinite().all()
