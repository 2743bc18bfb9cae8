"""How many fit is a function of the length, and every length is in tokens: reports in which it was not."""

import pytest

from kvlab.cache import KVCacheManager
from kvlab.plan import make_plan
from kvlab.plan.plan import two_parameter_fit
from kvlab.plan.policies import ideal_bytes
from kvlab.plan.sharding import Sharding, stage_models
from kvlab.specs.formats import get_format
from kvlab.specs.layout import group_parts
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import Attention, CompressedEntries, MLALatent, OpenBuffer, StateArray

BF16 = get_format("bf16")
LENGTHS = ("1k", "32k", "256k")


def model_of(*parts, query_heads=16):
    return ModelSpec("m", "m", tuple(LayerSpec(i, (p,)) for i, p in enumerate(parts)), 2048, query_heads, 1000)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-3-27b", "kimi-linear-48b-a3b", "falcon-h1-7b", "llama-3-8b"])
def test_two_numbers_say_what_one_rate_cannot(name):
    """vllm#28228, #40691, #51041: "KV size: N tokens" came out between 4 and 93 KiB a token on one machine."""
    plans = [make_plan(name, context=length, gpu="b200") for length in LENGTHS]
    fit = two_parameter_fit(plans[0].model)
    rates = []
    for plan in plans:
        exact = ideal_bytes(plan.model, plan.context)
        # concurrent sequences times their length, as a log line would have it
        rates.append(plan.memory.free_bytes // exact * plan.context)
        assert plan.max_concurrent() == plan.memory.free_bytes // exact
        if plan.context >= fit["exact_from_tokens"]:
            assert fit["fixed_bytes"] + fit["bytes_per_token"] * plan.context == pytest.approx(exact, rel=0.01)
    if fit["fixed_bytes"]:
        assert max(rates) > 1.1 * min(rates), "a model of two numbers has no single rate"


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_what_fits_grows_with_the_shards_and_latents_do_not_shrink(tp):
    """tt-xla#5731: a budget that was not scaled by the shards; #5849: latents that were split."""
    heads = model_of(Attention(8, 128, 128, BF16))
    latent = model_of(MLALatent(512, 64, BF16))
    share = [stage_models(m, Sharding(tp=tp))[0] for m in (heads, latent)]
    assert ideal_bytes(share[0], 1000) * tp == ideal_bytes(heads, 1000)
    assert ideal_bytes(share[1], 1000) == ideal_bytes(latent, 1000)
    plan = make_plan(heads, context=1000, tp=tp, gpu="h100")
    assert plan.max_concurrent() == plan.memory.free_bytes // (1000 * 4096 // tp)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 1001])
def test_context_parallel_ranks_beyond_the_heads_are_never_empty(tokens):
    """LlamaFactory#10794: cp 4 over 2 KV heads passed an assertion and made empty shards. Here tokens are split."""
    model = model_of(Attention(2, 128, 128, BF16))
    assert ideal_bytes(model, tokens, cp=4) == -(-tokens // 4) * 2 * 2 * 128 * 2
    plan = make_plan(model, context=tokens, cp=4)
    assert 0 < plan.per_gpu().total <= plan.sequence().total


@pytest.mark.parametrize("ratio", [2, 4, 8])
def test_every_length_is_in_tokens_whatever_the_compression(ratio):
    """vllm-ascend#11383: slots, tokens and compressed tokens were mixed. One entry per `ratio` tokens changes the bytes
    of a page, and no length that anyone asks for or is told."""
    buffer = OpenBuffer((StateArray("x", ((8, 1),), 1, BF16),), ratio)
    spec = model_of(CompressedEntries(ratio, 64, BF16), buffer)
    manager = KVCacheManager(group_parts(spec, 64), [6, 3], 64)
    assert manager.groups[0].block_bytes == 64 // ratio * 128
    assert manager.too_long(320) == "" and manager.too_long(384) != ""
    assert manager.allocate("a", 192)
    assert [len(table) for table in manager.tables["a"]] == [3, 1]
    manager.advance("a", 192 + ratio - 1) if manager.allocate("a", 192 + ratio - 1) else None
    assert manager.truncate("a", 192).computed == 192
    assert spec.bytes_at(192) == 192 // ratio * 128
