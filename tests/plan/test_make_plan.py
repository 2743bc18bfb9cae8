"""Whole plans: the golden table of models, the published facts, and what the JSON promises."""

import json
from pathlib import Path

import pytest

from kvlab.plan import make_plan
from kvlab.plan.policies import WASTE, sequence_bytes

CONFIGS = Path(__file__).parents[3] / "shared" / "configs"
EXPECTED = CONFIGS / "expected.json"


def published(name):
    if not EXPECTED.exists():
        pytest.skip("the published configs are not beside the repository")
    return json.loads((CONFIGS / name).read_text())


@pytest.mark.parametrize(
    ("name", "per_token"),
    [
        ("llama-3-8b", 131072), ("llama-3-70b", 327680), ("qwen3-0.6b", 114688), ("qwen3-4b", 147456),
        ("deepseek-v3", 70272), ("gpt-oss-120b", 36864),
    ],
)  # fmt: skip
def test_bytes_per_token_that_calculators_got_wrong(name, per_token):
    # LMCache#688, #694, #2132: hidden / heads for head_dim, and latents priced twice
    assert make_plan(name).to_json()["kv_bytes_per_token"] == per_token


def test_gpt_oss_is_two_numbers_not_one():
    found = make_plan("gpt-oss-120b", context="128k").to_json()
    assert found["fit"] == {"fixed_bytes": 4718592, "bytes_per_token": 36864, "exact_from_tokens": 128}
    assert found["kv_bytes"] == 4718592 + 36864 * 131072
    assert (found["kv_bytes_per_token_short"], found["kv_bytes_per_token_at_context"]) == (73728, 36864)


def test_mistral_v0_1_adds_nothing_beyond_its_window():
    short, long = (make_plan("mistral-7b-v0.1", context=n).to_json() for n in (1000, 8192))
    assert (short["kv_bytes_per_token_at_context"], long["kv_bytes_per_token_at_context"]) == (131072, 0)
    assert (long["kv_bytes_per_token"], long["kv_bytes_per_token_short"]) == (0, 131072)
    assert long["kv_bytes"] == 4096 * 131072


def test_every_published_config_agrees_with_its_expected_facts():
    if not EXPECTED.exists():
        pytest.skip("the published configs are not beside the repository")
    rows = json.loads(EXPECTED.read_text())["configs"]
    assert len(rows) > 80
    for name, want in rows.items():
        config = published(name)
        state = (want["fixed_state"] or {}).get("bytes_bf16_conv_k_minus_1_fp32_recurrent", 0)
        plan = make_plan(config, context="32k")
        for tokens, growing in want["total_kv_bytes_at_tokens"].items():
            assert sequence_bytes(plan.model, int(tokens), plan.settings("ideal")).total == growing + state, (
                name,
                tokens,
            )
        found = plan.to_json()
        assert found["kv_bytes"] == want["total_kv_bytes_at_tokens"]["32768"] + state, name
        assert found["kv_bytes_per_token"] == want["growing_bytes_per_token"], name
        assert found["kv_bytes_per_token_short"] == want["bytes_per_token_short_context"], name
        assert found["kv_state_bytes"] == state, name
        json.dumps(found, allow_nan=False)
        for policy, split in (found["policies"] | found["pools"]).items():
            if "error" not in split:
                all_parts = [split[f"{k}_bytes"] for k in ("useful", *WASTE)]
                assert min(all_parts) >= 0, (name, policy)
                assert sum(all_parts) == split["kv_bytes"] == sum(g["kv_bytes"] for g in split["groups"]), (
                    name,
                    policy,
                )


def test_the_json_holds_what_the_command_promises():
    found = make_plan("llama-3-8b", context="32k", batch=4, tp=2, gpu="h200", kv_dtype="fp8").to_json()
    assert found["layers"] == [{"kind": "full", "count": 32, "window": None, "bytes_per_token": 2048, "state_bytes": 0}]
    assert (found["context"], found["kv_bytes"], found["kv_bytes_per_gpu"]) == (32768, 2**31, 2**30)
    assert found["kv_bytes_batch"] == 2**33
    assert (found["kv_dtype"], found["policy"], found["num_gpus"]) == ("fp8_e4m3", "ideal", 2)
    assert found["weights_bytes"] == 2 * found["parameters"] == 2 * 8_030_261_248
    memory = found["memory"]
    assert memory["memory_bytes"] == 143_771 * 2**20
    assert memory["usable_bytes"] == memory["memory_bytes"] * 9 // 10
    free = memory["usable_bytes"] - found["weights_bytes_per_gpu"] - 2 * 2**30
    assert memory["free_for_kv_bytes"] == free
    assert found["max_concurrent"] == free // 2**30
    assert any("32,768 tokens" in row for row in found["assumptions"])


def test_layers_are_listed_by_kind_and_every_layer_is_in_one():
    config = {
        "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 3072, "vocab_size": 1000,
        "use_sliding_window": True, "sliding_window": 128, "max_position_embeddings": 4096,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] + ["sliding_attention"] * 2,
        "tie_word_embeddings": True,
    }  # fmt: skip
    assert make_plan(config).to_json()["layers"] == [
        {"kind": "sliding", "count": 4, "window": 128, "bytes_per_token": 512, "state_bytes": 0},
        {"kind": "full", "count": 1, "window": None, "bytes_per_token": 512, "state_bytes": 0},
    ]


def test_states_follow_the_formats_asked_for():
    names = ("Qwen__Qwen3-Next-80B-A3B-Thinking.json",)
    config = published(*names)
    normal = make_plan(config).to_json()
    assert normal["kv_state_bytes"] == 36 * (24576 * 2 + 524288 * 4)
    small = make_plan(config, state_dtype="bf16", conv_dtype="fp8").to_json()
    assert small["kv_state_bytes"] == 36 * (24576 + 524288 * 2)


def test_open_buffers_are_counted_apart_and_in_the_paged_policy():
    config = published("deepseek-ai__DeepSeek-V4-Pro.json")
    found = make_plan(config, context="32k").to_json()
    assert found["kv_buffer_bytes"] > 0
    assert found["kv_bytes"] == 330694656
    assert found["policies"]["paged"]["useful_bytes"] == 330694656 + found["kv_buffer_bytes"]
    assert found["block_size"] == 128
    assert found["kv_bytes_per_token_at_context"] == 9848
    assert "not modelled" in found["policies"]["vllm"]["error"]
    with pytest.raises(ValueError, match="not modelled"):
        make_plan(config, policy="vllm")


def test_image_tokens_fill_cross_attention():
    config = published("meta-llama__Llama-3.2-90B-Vision-Instruct.json")
    without, image = (make_plan(config, image_tokens=n, context=1000).to_json() for n in (0, 1601))
    assert image["kv_bytes"] - without["kv_bytes"] == image["kv_encoder_bytes"] == 20 * 1601 * 4096
    assert image["kv_bytes_per_token"] == without["kv_bytes_per_token"] == 327680


def test_the_policy_named_is_the_policy_of_the_bytes():
    plans = {p: make_plan("llama-3-8b", context=1001, policy=p).to_json() for p in ("ideal", "paged", "vllm")}
    assert plans["ideal"]["kv_bytes"] == 1001 * 131072
    assert plans["paged"]["kv_bytes"] == plans["vllm"]["kv_bytes"] == 1008 * 131072
    for policy, found in plans.items():
        assert found["policy"] == policy
        assert found["kv_bytes"] == found["policies"][policy]["kv_bytes"]
        assert found["max_concurrent"] == found["policies"][policy]["max_concurrent"]
        assert found["kv_bytes_ideal"] == 1001 * 131072


def test_the_longest_context_fits_and_one_token_more_does_not():
    for policy in ("ideal", "paged", "vllm"):
        longest = make_plan("gpt-oss-20b", gpu="h100", batch=7, policy=policy).longest_context
        assert make_plan("gpt-oss-20b", gpu="h100", policy=policy, context=longest).max_concurrent() >= 7
        assert make_plan("gpt-oss-20b", gpu="h100", policy=policy, context=longest + 1).max_concurrent() < 7


def test_weights_that_do_not_fit_leave_room_for_none():
    found = make_plan("llama-3-70b", gpu="h100").to_json()
    assert found["memory"]["free_for_kv_bytes"] < 0
    assert (found["max_concurrent"], found["batch_fits"], found["longest_context"]) == (0, False, 0)
    assert found["timing"]["decode_full"] is None


def test_quantized_rows_count_their_scales():
    # 8 heads x (128 codes + one fp32 scale), keys and values, 32 layers
    assert make_plan("llama-3-8b", kv_dtype="int8").to_json()["kv_bytes_per_token"] == 32 * 2 * 8 * (128 + 4)
    found = make_plan("llama-3-8b", weight_dtype="mxfp4").to_json()
    assert found["weights_bytes"] == 8_030_261_248 // 2 + 8_030_261_248 // 32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": "0"}, "context '0': must be a positive whole number of tokens"),
        ({"context": "12q"}, "context '12q'"),
        ({"batch": 0}, "batch 0: must be a whole number of at least 1"),
        ({"tp": "two"}, "tp 'two': must be a whole number"),
        ({"tp": 5}, "tp 5: must divide the 32 query heads"),
        ({"kv_dtype": "int3"}, "kv_dtype 'int3': must be one of"),
        ({"gpu": "z80"}, "gpu 'z80': must be one of"),
        ({"policy": "magic"}, "policy 'magic': must be one of"),
        ({"gpu_util": 0}, "gpu_util 0: must be above 0"),
        ({"gpu_util": "nan"}, "gpu_util 'nan': must be above 0"),
        ({"reserve": "2 apples"}, "reserve '2 apples'"),
        ({"prompt": 10}, "prompt and output: give both"),
        ({"prompt": 10, "output": 10, "context": 21}, "must be left out, or be prompt [+] output = 20"),
        ({"image_tokens": -1}, "image_tokens -1: must be a whole number of at least 0"),
        ({"colour": "red"}, "option 'colour': must be one of"),
    ],
)
def test_bad_options_are_refused_with_name_value_and_rule(options, message):
    with pytest.raises(ValueError, match=message):
        make_plan("llama-3-8b", **options)


def test_k_is_1024_everywhere():
    plan = make_plan("llama-3-8b", prompt="1k", output="1k", max_batched_tokens="8k")
    assert (plan.context, plan.options.max_batched_tokens) == (2048, 8192)


def test_the_default_context_stays_within_the_models_positions():
    assert make_plan("llama-3-8b").context == 8192
    assert make_plan("llama-2-7b").context == 4096
    assert any("beyond" in row for row in make_plan("llama-2-7b", context="8k").to_json()["assumptions"])


def test_a_config_that_says_too_little_for_the_weights_is_still_sized_and_nothing_is_guessed():
    config = {"model_type": "baichuan", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8}
    plan = make_plan(config, context=100)
    found = plan.to_json()
    assert found["kv_bytes"] == 100 * 4 * 2 * 512 * 2
    for key in ("weights_bytes", "max_concurrent", "batch_fits", "longest_context", "timing", "mix"):
        assert found[key] is None, key
    assert any("number of weights unknown" in row for row in found["assumptions"])
    assert "What fits" not in plan.explain() and "number of weights unknown" in plan.explain()


def test_a_quantized_checkpoint_is_pointed_out_and_counted_as_asked():
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100,
        "intermediate_size": 128, "quantization_config": {"quant_method": "fp8"},
    }  # fmt: skip
    wide, narrow = (make_plan(config, weight_dtype=f).to_json() for f in ("bf16", "fp8"))
    assert wide["weights_bytes"] == 2 * narrow["weights_bytes"]
    assert any("published quantized (fp8); weights are counted in bf16" in row for row in wide["assumptions"])


def test_scales_that_are_found_from_data_are_named_beside_the_pool():
    """Llama 3 8B: 32 layers, keys and values of 8 heads of 128."""
    rows = make_plan("llama-3-8b", kv_dtype="fp8_e5m2").to_json()["assumptions"]
    sizes = f"{32 * 2 * 4:,} bytes per tensor, {32 * 2 * 8 * 4:,} bytes per head, {32 * 2 * 8 * 128 * 4:,} bytes per channel"
    assert any(sizes in row for row in rows)
    for other in ("bf16", "fp8_e4m3_row"):
        assert not any("calibrated" in row for row in make_plan("llama-3-8b", kv_dtype=other).to_json()["assumptions"])
