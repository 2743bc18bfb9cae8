"""Lossy formats through the compiled kernels, pools too small: each request gets the tokens of a calm run, exactly."""

import pytest
import torch
from kinds import fill

from kvlab.cache.prefix import PrefixOptions
from kvlab.engine import Engine, SamplingParams
from kvlab.engine.tiers import TierOptions
from kvlab.models.load import empty_model
from kvlab.schedule import SchedulingPolicy

GREEDY = SamplingParams(8, ignore_eos=True)
SMALL = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 97,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 100.0, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("kv_dtype", ["int4", "kivi2", "kvquant3", "mxfp4", "fp8_e5m2"])
def test_lossy_formats_give_the_same_tokens_under_pressure(kv_dtype):
    """What a format costs in quality it costs once: swapped, saved, loaded or not, the tokens are those of a calm run."""
    model = empty_model(SMALL, "fp32", torch.device("cpu"), "small")
    fill(model)
    prompts = [[(i * i + 7 * n) % 97 for i in range(9 + 5 * n)] for n in range(5)]
    prompts += [prompt + prompt[:7] for prompt in prompts[:3]]
    calm = Engine(model, kv_dtype=kv_dtype, num_blocks=200, block_size=32, check=True)
    expected = [calm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    engine = Engine(
        model, kv_dtype=kv_dtype, num_blocks=tuple(8 for _ in calm.num_blocks), block_size=32, check=True,
        max_batched_tokens=16, tiers=TierOptions("1MiB"), scheduling=SchedulingPolicy(preempt="swap"),
        prefix=PrefixOptions(),
    )  # fmt: skip
    requests = []
    for prompt in prompts:
        requests.append(engine.requests[engine.add_request(prompt, GREEDY)])
        engine.step()
        engine.scheduler.preempt(requests[len(requests) // 2].request_id, 0.0)
    while engine.scheduler.has_work:
        engine.step()
    assert [r.output for r in requests] == expected
    assert engine.events.counts["swap_in"] > 0
