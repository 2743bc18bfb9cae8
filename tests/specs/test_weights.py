"""How many parameters a model has, and how many of them a decode step reads."""

import subprocess
import sys

import pytest

from kvlab.specs.weights import count, expected_distinct_experts


def dense(model_type, hidden, layers, heads, kv_heads, width, vocab, **more):
    return {
        "model_type": model_type, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": width, "vocab_size": vocab, **more,
    }  # fmt: skip


DEEPSEEK_V3 = dense(
    "deepseek_v3", 7168, 61, 128, 128, 18432, 129280, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
    moe_intermediate_size=2048, first_k_dense_replace=3, num_nextn_predict_layers=1,
)  # fmt: skip
MIXTRAL = dense("mixtral", 4096, 32, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2)
LLAMA_3_8B = dense("llama", 4096, 32, 32, 8, 14336, 128256)
SMOLLM2 = dense("llama", 576, 30, 9, 3, 1536, 49152, tie_word_embeddings=True)
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}

# the totals that the published checkpoints state (safetensors metadata, tied tensors once)
PUBLISHED_TOTALS = {
    "SmolLM2-135M": (134_515_008, SMOLLM2),
    "GPT-2": (124_439_808, GPT2),
    "Llama-3-8B": (8_030_261_248, LLAMA_3_8B),
    "Llama-2-7B": (6_738_415_616, dense("llama", 4096, 32, 32, 32, 11008, 32000)),
    "Llama-3.1-405B": (405_853_388_800, dense("llama", 16384, 126, 128, 8, 53248, 128256)),
    "Mistral-7B-v0.1": (7_241_732_096, dense("mistral", 4096, 32, 32, 8, 14336, 32000)),
    "Mixtral-8x7B": (46_702_792_704, MIXTRAL),
    "Qwen2.5-7B": (7_615_616_512, dense("qwen2", 3584, 28, 28, 4, 18944, 152064)),
    "Qwen3-0.6B": (596_049_920, dense("qwen3", 1024, 28, 16, 8, 3072, 151936, head_dim=128, tie_word_embeddings=True)),
    "Gemma-7B": (8_537_680_896, dense("gemma", 3072, 28, 16, 16, 24576, 256000, head_dim=256)),
    "Gemma-2-2B": (2_614_341_888, dense("gemma2", 2304, 26, 8, 4, 9216, 256000, head_dim=256)),
    "Phi-2": (2_779_683_840, dense("phi", 2560, 32, 32, 32, 10240, 51200)),
    "OPT-125M": (125_239_296, {"model_type": "opt", "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072,
                               "num_attention_heads": 12, "vocab_size": 50272, "max_position_embeddings": 2048}),
    "Pythia-1B": (1_011_781_632, dense("gpt_neox", 2048, 16, 8, 8, 8192, 50304)),
    "BLOOM": (176_247_271_424, {"model_type": "bloom", "hidden_size": 14336, "n_layer": 70, "n_head": 112,
                                "vocab_size": 250880}),
    "Mamba-130M": (129_135_360, {"model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24,
                                 "intermediate_size": 1536, "state_size": 16, "conv_kernel": 4,
                                 "time_step_rank": 48, "vocab_size": 50280}),
    "DeepSeek-V3": (671_026_404_352, DEEPSEEK_V3),
    "Phi-3-small": (7_392_272_384, dense("phi3small", 4096, 32, 32, 8, None, 100352, ff_intermediate_size=14336)),
    "Qwen-7B": (7_721_324_544, dense("qwen", 4096, 32, 32, None, 22016, 151936, kv_channels=128)),
    "Baichuan2-7B": (7_505_973_248, dense("baichuan", 4096, 32, 32, None, 11008, 125696)),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED_TOTALS)
def test_the_total_is_the_published_one(name):
    total, config = PUBLISHED_TOTALS[name]
    assert count(config).total == total


def test_published_structures_agree_with_the_class_they_generalise():
    """Types that transformers lacks, in a shape where one that it has is the same model."""
    llama_70b = dense("llama", 8192, 80, 64, 8, 28672, 128256)
    block = {"attention": {"n_heads_in_group": 8}, "ffn": {"ffn_mult": 5.25}}
    nas = {**dense("nemotron-nas", 8192, 80, 64, None, None, 128256), "block_configs": [block] * 80}
    assert count(nas).total == count(llama_70b).total == 70_553_706_496

    glm = dense("glm", 4096, 40, 32, 2, 13696, 151552, head_dim=128)
    chatglm = {
        "model_type": "chatglm", "hidden_size": 4096, "num_layers": 40, "num_attention_heads": 32, "kv_channels": 128,
        "multi_query_attention": True, "multi_query_group_num": 2, "ffn_hidden_size": 13696, "add_qkv_bias": True,
        "padded_vocab_size": 151552,
    }  # fmt: skip
    assert count(chatglm).total == count(glm).total == 9_399_951_360

    lightning = dense("minimax", 64, 4, 4, 2, 96, 50, head_dim=16, num_local_experts=3, num_experts_per_tok=2)
    m1 = {**lightning, "model_type": "minimax_m1", "attn_type_list": [1, 0, 1, 0]}
    assert count(m1).total == count(lightning).total
    assert count({**m1, "attn_type_list": [0, 0, 0, 0]}).total > count(m1).total

    assert count(dense("xverse", 64, 2, 4, 4, 96, 50)).total == count(dense("llama", 64, 2, 4, 4, 96, 50)).total
    llama_biased = dense("llama", 64, 2, 4, 4, 96, 50, attention_bias=True)
    assert count(dense("internlm", 64, 2, 4, 4, 96, 50, bias=True)).total == count(llama_biased).total
    internlm2 = dense("internlm2", 4096, 32, 32, 8, 14336, 92544, bias=False)
    assert count(internlm2).total == count(dense("llama", 4096, 32, 32, 8, 14336, 92544)).total == 7_737_708_544


def test_nas_blocks_may_be_missing_or_one_matrix():
    blocks = [
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.5}},
        {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
    ]
    config = {**dense("nemotron-nas", 64, 2, 4, None, None, 50), "block_configs": blocks}
    # the network is 2/3 of 1.5 x 64 wide, rounded up to 256; a norm before each part; a final norm
    assert count(config).total == 3 * 64 * 256 + 64 * 64 + 2 * 64 + 64 + 2 * 50 * 64


def test_a_tied_table_is_counted_once_and_read_whole_as_the_output_matrix():
    got = count(SMOLLM2)
    assert (got.tied, got.embedding, got.lm_head, got.embedding_row) == (True, 49152 * 576, 49152 * 576, 576)
    # every parameter is read: the layers as weights, the table as the output matrix, and one row more per token
    assert got.read_always == got.total
    assert got.read_per_step(3) == got.total + 3 * 576


def test_an_untied_table_is_gathered_and_not_read_whole():
    got = count(LLAMA_3_8B)
    assert not got.tied
    assert got.read_per_step(1) == 8_030_261_248 - 128256 * 4096 + 4096


def test_positions_are_a_table_too():
    got = count(GPT2)
    assert got.embedding == (50257 + 1024) * 768
    assert got.embedding_row == 2 * 768


def test_rows_read_never_exceed_the_table():
    got = count(dense("llama", 64, 1, 4, 4, 96, 11))
    assert got.read_per_step(1000) == got.read_always + 11 * 64


def test_routed_experts_stand_apart():
    got = count(MIXTRAL)
    assert (got.num_experts, got.experts_per_token, got.moe_layers) == (8, 2, 32)
    assert got.per_expert == 3 * 4096 * 14336
    assert got.shared == 46_702_792_704 - 32 * 8 * got.per_expert
    assert got.active == 12_879_925_248
    # one token visits two experts of every layer; a large batch all eight
    assert got.read_per_step(1) == got.active - got.embedding + got.embedding_row
    assert got.read_per_step(10_000) == pytest.approx(got.total - got.embedding + 10_000 * 4096, rel=1e-12)


def test_deepseek_v3_routes_in_all_but_three_layers_and_says_what_it_leaves_out():
    got = count(DEEPSEEK_V3)
    assert (got.num_experts, got.experts_per_token, got.moe_layers) == (256, 8, 58)
    # 671B less the 248 experts that a token does not visit in each of 58 layers: the card's 37B
    assert got.active == 671_026_404_352 - 58 * 248 * 3 * 7168 * 2048 == 37_552_282_624
    assert got.notes == ("1 multi-token prediction layer(s) not included",)


@pytest.mark.parametrize(
    ("experts", "per_token", "batch", "distinct"),
    [(8, 2, 1, 2.0), (8, 2, 2, 3.5), (8, 8, 1, 8.0), (8, 8, 5, 8.0), (256, 8, 1, 8.0), (0, 0, 4, 0.0), (1, 1, 7, 1.0)],
)
def test_distinct_experts_of_small_batches(experts, per_token, batch, distinct):
    assert expected_distinct_experts(experts, per_token, batch) == pytest.approx(distinct, abs=1e-12)


def test_distinct_experts_equal_the_mean_over_every_way_to_choose():
    from itertools import combinations, product

    choices = list(combinations(range(5), 2))
    visited = [len(set().union(*picks)) for picks in product(choices, repeat=3)]
    assert expected_distinct_experts(5, 2, 3) == pytest.approx(sum(visited) / len(visited), abs=1e-12)


@pytest.mark.parametrize("arguments", [(8, 9, 1), (8, 2, 0), (8, -1, 1)])
def test_impossible_routing_is_refused(arguments):
    with pytest.raises(ValueError, match="must be"):
        expected_distinct_experts(*arguments)


def test_zamba2_reads_its_shared_blocks_at_every_use():
    config = {
        **dense("zamba2", 64, 6, 4, 4, 96, 50), "num_mem_blocks": 2, "n_mamba_heads": 8, "mamba_d_state": 8,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid", "hybrid"],
    }  # fmt: skip
    got = count(config)
    # q, k, v from the doubled width, o back; gate, up, down; two norms. Four uses of two blocks: two read again
    block = 3 * 128 * 128 + 128 * 64 + 3 * 64 * 96 + 128 + 64
    assert got.reread == 2 * block
    assert got.read_always == got.total + got.reread


def test_a_wrapper_is_counted_by_its_text_part_and_says_so():
    text = {k: v for k, v in LLAMA_3_8B.items() if k != "model_type"}
    got = count({"model_type": "llava", "text_config": text, "vision_config": {"hidden_size": 1024}})
    assert got.total == 8_030_261_248
    assert got.notes == ("text part only: weights of vision or audio encoders are not included",)


def test_a_wrapper_that_ties_its_tables_ties_those_of_its_text_part():
    inner = {**dense("llama", 64, 2, 4, 2, 96, 50)}
    assert count({"model_type": "llava", "text_config": inner, "tie_word_embeddings": True}).tied
    own = {**inner, "tie_word_embeddings": False}
    assert not count({"model_type": "llava", "text_config": own, "tie_word_embeddings": True}).tied


def test_what_the_class_fills_in_is_said():
    got = count({"model_type": "gemma2", "hidden_size": 2304, "num_hidden_layers": 26})
    assert got.total == 2_614_341_888
    assert got.notes == (
        "not in the config, transformers' class default used: head_dim 256, intermediate_size 9216, "
        "num_attention_heads 8, num_key_value_heads 4, vocab_size 256000",
    )


def test_null_is_not_absent():
    """null KV heads mean one per query head; absent ones mean the class's number (8 for Mistral)."""
    config = dense("mistral", 4096, 2, 32, None, 96, 50)
    absent = {k: v for k, v in config.items() if k != "num_key_value_heads"}
    assert count(config).total - count(absent).total == 2 * 2 * 4096 * (32 - 8) * 128


def test_a_pattern_decides_the_depth_of_nemotron_h():
    config = {**dense("nemotron_h", 64, 52, 4, 2, 96, 50), "head_dim": 16}
    config["hybrid_override_pattern"] = "*-"
    attention, network, norms = 2 * 64 * 64 + 2 * 64 * 32, 2 * 64 * 96, 3 * 64
    assert count(config).total == attention + network + norms + 2 * 50 * 64


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "quux"}, "parameter count of model_type quux: not known"),
        ({"hidden_size": 64}, "model_type None: must be a string"),
        ({"model_type": "llama", "num_hidden_layers": 2}, "hidden_size None: must be in the config"),
        ({"model_type": "llama", "hidden_size": 64}, "num_hidden_layers None: must be in the config"),
        (dense("qwen", 64, 2, 4, 4, 96, None), "vocab_size None: must be in the config of model_type 'qwen'"),
        (dense("xverse", 64, 2, 4, 4, 96, 50, num_experts=4), "xverse with experts: not known"),
        (dense("chatglm", 64, 2, 4, None, 96, 50), "chatglm without multi_query_group_num: not known"),
    ],
)
def test_what_cannot_be_counted_is_named(config, message):
    with pytest.raises(ValueError, match=message):
        count(config)


def test_counting_imports_no_third_party_package():
    code = "import sys, kvlab.specs.weights as w; print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
