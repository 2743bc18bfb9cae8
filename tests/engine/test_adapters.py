"""Adapters: each request gets the tokens of the model with its own change, and no page of another one's. fp64, exact."""

import json

import pytest
import torch
from kinds import ADAPTED, kind
from safetensors.torch import save_file

from kvlab.cache import PrefixOptions
from kvlab.cache.prefix import DESIGNS
from kvlab.engine import Engine, SamplingParams
from kvlab.models.reference import reference_forward
from kvlab.plan.policies import default_block_size

PROMPT, PARAMS = [(7 * i + 3) % 61 for i in range(19)], SamplingParams(8)
HIDDEN, ROWS = 24, {"q_proj": 24, "v_proj": 12}


def tensors(seed, rank=3, layers=(0, 1), names=("q_proj", "v_proj")):
    """An adapter's tensors as PEFT names them."""
    rng = torch.Generator().manual_seed(seed)
    found = {}
    for layer in layers:
        for name in names:
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
            found[f"{base}A.weight"] = torch.randn(rank, HIDDEN, generator=rng, dtype=torch.float64)
            found[f"{base}B.weight"] = torch.randn(ROWS[name], rank, generator=rng, dtype=torch.float64) * 0.3
    return found


def merged(tiny, own, scale=1.0):
    """The tokens of a model whose weights have the change in them, by the reference that knows no engine."""
    state = dict(tiny.state)
    for key, a in own.items():
        if "lora_A" in key:
            name = key.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
            state[name] = state[name] + scale * own[key.replace("lora_A", "lora_B")] @ a
    return type(tiny.reference)(tiny.config, state).tokens(PROMPT, PARAMS)


def generate(engine, adapters):
    """The tokens of the prompt under each adapter, all in one batch."""
    ids = [engine.add_request(PROMPT, PARAMS, adapter=key) for key in adapters]
    requests = [engine.requests[i] for i in ids]
    while engine.scheduler.has_work:
        engine.step()
    return [request.output for request in requests]


@pytest.mark.parametrize("design", DESIGNS)
def test_one_prompt_under_a_b_and_none_in_one_batch(tiny, design):
    llama, a, b = tiny("full"), tensors(1), tensors(2)
    engine = Engine(llama.model(), num_blocks=60, block_size=4, check=True, prefix=PrefixOptions(design))
    keys = [engine.adapters.add("a", a), engine.adapters.add("b", b), ""]
    wanted = [merged(llama, a), merged(llama, b), llama.reference.tokens(PROMPT, PARAMS)]
    assert len({tuple(tokens) for tokens in wanted}) == 3
    counters = engine.cache.prefix.counters
    assert generate(engine, keys) == wanted
    # everybody computed the same tokens in the same step, and nobody took another one's pages
    assert (counters.hits, counters.adopted) == (0, 0)
    assert generate(engine, keys) == wanted
    # the prompt's four whole pages, and of what was said the two pages that were there already
    assert (counters.hits, counters.adopted) == (3 * 16, 3 * 2)


def test_another_order_chunking_and_preemption_change_nothing(tiny):
    llama, a, b = tiny("full"), tensors(1), tensors(2)
    engine = Engine(llama.model(), num_blocks=24, block_size=2, max_batched_tokens=30, check=True)
    keys = ["", engine.adapters.add("b", b), engine.adapters.add("a", a)]
    assert generate(engine, keys) == [llama.reference.tokens(PROMPT, PARAMS), merged(llama, b), merged(llama, a)]
    assert engine.events.counts["preempt"]


def test_the_same_name_with_other_weights_is_another_adapter(tiny):
    """vllm#30931: the name alone was the key."""
    llama = tiny("full")
    engine = Engine(llama.model(), num_blocks=60, block_size=4, check=True, prefix=PrefixOptions())
    first, second = engine.adapters.add("a", tensors(1)), engine.adapters.add("a", tensors(2))
    assert first != second and first.startswith("a:")
    assert generate(engine, [first]) == [merged(llama, tensors(1))]
    assert generate(engine, [second]) == [merged(llama, tensors(2))]
    assert engine.cache.prefix.counters.hits == 0


def test_a_directory_as_peft_writes_it_has_its_scale(tiny, tmp_path):
    llama, own = tiny("full"), tensors(4, rank=2, layers=(1,), names=("q_proj",))
    save_file(own, str(tmp_path / "adapter_model.safetensors"))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 6}))
    engine = Engine(llama.model(), num_blocks=60, block_size=4, check=True)
    key = engine.adapters.add("scaled", tmp_path)
    assert generate(engine, [key]) == [merged(llama, own, scale=3.0)] != [merged(llama, own)]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [({"model.layers.0.mlp.lora_A.weight": torch.zeros(1)}, "mlp must be one of q_proj"),
     ({"model.norm.lora_A.weight": torch.zeros(1)}, "no A or B"),
     ({"layers.9.self_attn.q_proj.lora_A.weight": torch.zeros(1, HIDDEN)}, "no projection layers.9.self_attn.q_proj"),
     ({"layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(1, HIDDEN)}, "both A and B"),
     ({"layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(1, 5),
       "layers.0.self_attn.q_proj.lora_B.weight": torch.zeros(24, 1)}, "A \\(1, 5"),
     ({"layers.0.mlp.experts.3.up_proj.lora_A.weight": torch.zeros(1, 5)}, "mixtures of experts cannot")],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tiny, changed, reason):
    engine = Engine(tiny("full").model(), num_blocks=9)
    with pytest.raises(ValueError, match=reason):
        engine.adapters.add("bad", changed)
    with pytest.raises(ValueError, match=r"adapter 'x'.*none is loaded"):
        engine.add_request(PROMPT, PARAMS, adapter="x")
    assert not engine.scheduler.has_work


@pytest.mark.parametrize("name", ADAPTED)
def test_every_projection_of_every_kind_of_layer(name):
    """Beside the model itself in one batch, and again from cached pages, which nobody shares."""
    design = DESIGNS[ADAPTED.index(name) % 2]
    one = kind(name)
    own, weights = one.adapter
    prompt, params = [(7 * i + 3) % one.vocab for i in range(20)], SamplingParams(4, ignore_eos=True)
    wanted = [prompt[:], prompt[:]]
    for _ in range(params.max_tokens):
        for ids, used in zip(wanted, (weights, one.model.decoder.weights.named), strict=True):
            with torch.inference_mode():
                ids.append(int(reference_forward(one.model.config, used, torch.tensor(ids))[-1].argmax()))
    size = default_block_size(one.model.spec, 3)
    engine = Engine(one.model, num_blocks=60, block_size=size, check=True, prefix=PrefixOptions(design))
    keys = [engine.adapters.add("a", own), ""]
    for hits in (0, 2 * (19 // engine.cache.prefix.unit * engine.cache.prefix.unit)):
        ids = [engine.add_request(prompt, params, adapter=key) for key in keys]
        requests = [engine.requests[i] for i in ids]
        while engine.scheduler.has_work:
            engine.step()
        assert [request.tokens.tolist() for request in requests] == wanted
        assert engine.cache.prefix.counters.hits == hits
    assert wanted[0] != wanted[1]


def test_a_projection_that_the_model_multiplies_with_otherwise_is_told():
    """Gemma 3n's feed-forward part is an operation of its own: the change would be lost without a word."""
    one = kind("shared")
    engine = Engine(one.model, num_blocks=60, block_size=default_block_size(one.model.spec, 3))
    place = "layers.0.mlp.down_proj"
    rows, columns = one.model.decoder.weights.named[f"model.{place}.weight"].shape
    own = {f"{place}.lora_A.weight": torch.ones(1, columns), f"{place}.lora_B.weight": torch.ones(rows, 1)}
    with pytest.raises(ValueError, match=f"adapter 'a': {place} is not multiplied with as it is"):
        engine.adapters.add("a", own)
