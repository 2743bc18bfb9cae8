"""The engine as its users meet it: streams, stops, aborts, seeds, and bad input that costs nobody anything."""

import dataclasses
import itertools

import pytest
import torch

from kvlab.engine import Engine, EngineOptions, SamplingParams
from kvlab.models.load import from_state_dict
from kvlab.schedule import Request

PROMPT = [5, 3, 8, 1, 40]


@pytest.fixture
def llama(tiny):
    return tiny("full")


def engine_of(llama, **options):
    return Engine(llama.model(), **{"num_blocks": 40, "block_size": 4, "check": True} | options)


def test_a_stream_gives_each_token_once_with_the_reason_at_its_end(llama):
    pieces = list(engine_of(llama).stream(PROMPT, SamplingParams(6)))
    assert [p.token_id for p in pieces] == llama.reference.tokens(PROMPT, SamplingParams(6))
    assert [p.finish_reason for p in pieces] == [None] * 5 + ["length"]


def test_two_streams_read_in_turn_miss_nothing(llama):
    engine, params = engine_of(llama), SamplingParams(6)
    first, second = engine.stream(PROMPT, params), engine.stream([9, 1], params)
    got = [(a and a.token_id, b and b.token_id) for a, b in itertools.zip_longest(first, second)]
    assert [a for a, _ in got] == llama.reference.tokens(PROMPT, params)
    assert [b for _, b in got] == llama.reference.tokens([9, 1], params)


def test_leaving_a_stream_early_gives_its_pages_back(llama):
    engine = engine_of(llama)
    for piece in engine.stream(PROMPT, SamplingParams(50)):
        assert engine.kv.held_bytes > 0
        if piece.token_id is not None:
            break
    del piece
    assert engine.kv.held_bytes == 0 and not engine.requests
    assert engine.events.of("finish")[-1].reason == "abort: asked for"


def test_a_stream_that_is_aborted_says_so(llama):
    engine = engine_of(llama)
    request_id = engine.add_request(PROMPT, SamplingParams(50))
    stream = engine.follow(request_id)
    next(stream)
    assert engine.abort(request_id)
    assert [(p.token_id, p.finish_reason) for p in stream] == [(None, "abort")]
    assert not engine.abort(request_id)


class Spelled:
    """A tokenizer whose text shows each token and its left neighbour, so that a stream with lost tokens differs."""

    eos_ids = ()

    def stream(self):
        return Spelled.Text()

    class Text:
        before = "-"

        def push(self, token):
            piece, self.before = f"{self.before}{token};", str(token)
            return piece

        def finish(self):
            return "end"


@pytest.mark.parametrize("steps_between", [0, 3])
def test_a_stream_goes_on_after_its_request_was_cut_back(llama, steps_between):
    """Six tokens read, four stay; others may step the engine past the old length before the reader is back."""
    model = dataclasses.replace(llama.model(), tokenizer=Spelled())
    engine = Engine(model, num_blocks=40, block_size=4, check=True)
    request_id = engine.add_request(PROMPT, SamplingParams(9, ignore_eos=True))
    stream = engine.follow(request_id)
    pieces = [next(stream) for _ in range(6)]
    engine.truncate(request_id, len(PROMPT) + 4)
    for _ in range(steps_between):
        engine.step()
    pieces = pieces[:4] + list(stream)
    tokens = llama.reference.tokens(PROMPT, SamplingParams(9))
    assert [p.token_id for p in pieces] == tokens
    spelled = "".join(f"{before}{token};" for before, token in zip(["-", *tokens], tokens, strict=False))
    assert "".join(p.text for p in pieces) == spelled + "end"
    assert pieces[-1].finish_reason == "length"


def test_stop_tokens_end_a_request_and_ignore_eos_does_not_hide_them(llama):
    whole = llama.reference.tokens(PROMPT, SamplingParams(20))
    third = whole[2]
    assert third not in whole[:2]
    [done] = engine_of(llama).generate([PROMPT], SamplingParams(20, stop_token_ids=(third,), ignore_eos=True))
    assert (done.token_ids, done.finish_reason) == (whole[:3], "stop")


def test_the_models_own_end_token_ends_a_request_unless_ignored(llama):
    whole = llama.reference.tokens(PROMPT, SamplingParams(20))
    model = from_state_dict(llama.config | {"eos_token_id": whole[2]}, llama.state, "fp64", "cpu")
    engine = Engine(model, num_blocks=40)
    stopped, went_on = engine.generate([PROMPT, PROMPT], [SamplingParams(20), SamplingParams(20, ignore_eos=True)])
    assert (stopped.token_ids, stopped.finish_reason) == (whole[:3], "stop")
    assert (went_on.token_ids, went_on.finish_reason) == (whole, "length")


def test_a_request_ends_at_max_model_len(llama):
    [done] = engine_of(llama, max_model_len=9).generate([PROMPT], SamplingParams(50))
    assert (len(done.token_ids), done.finish_reason) == (4, "length")


def test_seeds_decide_samples_and_nothing_else_does(llama):
    params = SamplingParams(12, temperature=1.5, seed=7)
    [alone] = engine_of(llama).generate([PROMPT], params)
    crowd = engine_of(llama, seed=99, block_size=3).generate(
        [[1, 2], PROMPT, PROMPT], [SamplingParams(12), params, dataclasses.replace(params, seed=8)]
    )
    assert crowd[1].token_ids == alone.token_ids != crowd[2].token_ids
    unnamed = dataclasses.replace(params, seed=None)
    a, b = engine_of(llama).generate([PROMPT, PROMPT], unnamed)
    assert a.token_ids != b.token_ids, "requests without a seed get one each"
    again = engine_of(llama).generate([PROMPT, PROMPT], unnamed)
    assert [c.token_ids for c in again] == [a.token_ids, b.token_ids]


def test_nan_logits_end_their_request_alone(llama):
    state = llama.state | {"model.embed_tokens.weight": llama.state["model.embed_tokens.weight"].clone()}
    state["model.embed_tokens.weight"][60] = float("nan")
    engine = Engine(from_state_dict(llama.config, state, "fp64", "cpu"), num_blocks=40, check=True)
    broken, good = engine.generate([[5, 60], PROMPT], SamplingParams(6))
    assert (broken.finish_reason, broken.error, broken.token_ids) == ("error", "logits are not finite", [])
    assert good.token_ids == llama.reference.tokens(PROMPT, SamplingParams(6))
    # the page that held the NaN is handed out again
    [again] = engine.generate([PROMPT], SamplingParams(6))
    assert again.token_ids == good.token_ids


@pytest.mark.parametrize(
    ("prompt", "rule"),
    [
        ([], "prompt: must hold at least one token"),
        ([1] * 128, "prompt of 128 tokens: must leave room for one more within max_model_len 128"),
        ([1, 61], "token id 61 must be at least 0 and below the vocabulary's 61"),
        ([1, -1], "token id -1 must be at least 0"),
        ([2**40], "token id 1099511627776 must be"),
        ([1] * 120, "request can never fit: 125 tokens take 32 pages of group full, the pool has 20"),
        ("text", "the model has no tokenizer"),
        ([1, 2.5], "prompt: must be a text or whole numbers"),
    ],
    ids=["empty", "long", "id", "negative", "huge", "never fits", "text", "fraction"],
)
def test_bad_prompts_are_refused_with_the_rule_and_the_others_go_on(llama, prompt, rule):
    engine, params = engine_of(llama, num_blocks=21), SamplingParams(6)
    with pytest.raises(ValueError, match=rule):
        engine.add_request(prompt, params)
    good, bad, other = engine.generate([PROMPT, prompt, [9, 1]], params)
    assert rule in bad.error and (bad.finish_reason, bad.token_ids) == ("error", [])
    assert good.token_ids == llama.reference.tokens(PROMPT, params)
    assert other.token_ids == llama.reference.tokens([9, 1], params)
    assert not engine.requests


def test_one_text_is_not_a_list_of_prompts(llama):
    with pytest.raises(ValueError, match="prompts 'a text': must be a list of prompts"):
        engine_of(llama).generate("a text")


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"kv_dtype": "fp7"}, "dtype 'fp7': must be one of"),
        ({"num_blocks": 1}, "num_blocks 1: must be at least 2"),
        ({"num_blocks": (5, 5)}, "must be one number for each of 1 pools"),
        ({"kv_bytes": 0, "num_blocks": None}, "kv_bytes 0: two pages per group"),
        ({"kv_bytes": 10**6}, "kv_bytes and num_blocks: give one of them"),
        ({"block_size": 0}, "block_size 0: must be a positive number"),
        ({"max_model_len": 129}, "max_model_len 129: the model was made for at most 128 tokens"),
        ({"max_num_seqs": 0}, "max_num_seqs 0: must be at least 1"),
        ({"max_batched_tokens": 0}, "max_batched_tokens 0: must be at least 1"),
        ({"pad_to": 0}, "pad_to 0: must be at least 1"),
        ({"pages": 3}, "option pages: must be one of"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_options_name_the_rule(llama, options, rule):
    with pytest.raises(ValueError, match=rule):
        engine_of(llama, **options)


def test_options_can_come_as_one_object(llama):
    engine = Engine(llama.model(), EngineOptions(num_blocks=9, block_size=2), block_size=4)
    assert (engine.num_blocks, engine.options.block_size) == ((9,), 4)


def test_a_forward_that_fails_loses_nothing(llama, monkeypatch):
    engine, params = engine_of(llama), SamplingParams(6)
    request_id = engine.add_request(PROMPT, params)
    request = engine.requests[request_id]
    engine.step()
    forward = engine.runner.forward
    monkeypatch.setattr(engine.runner, "forward", lambda inputs: (_ for _ in ()).throw(RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    monkeypatch.setattr(engine.runner, "forward", forward)
    while not request.finish_reason:
        engine.step()
    assert request.output == llama.reference.tokens(PROMPT, params)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_every_backend_reads_only_its_own_slots(every_tiny, backend, monkeypatch):
    """In fp32, with NaN in all other slots; a first difference must be a near tie of the reference."""
    monkeypatch.setenv("KVLAB_OPS", backend)
    prompts, params = [PROMPT, [7], list(range(20, 39))], SamplingParams(16)
    engine = Engine(every_tiny.model("fp32"), num_blocks=40, block_size=3, max_batched_tokens=7, check=True)
    for prompt, done in zip(prompts, engine.generate(prompts, params), strict=True):
        assert done.error == ""
        expected = every_tiny.reference.tokens(prompt, params)
        differs = next((i for i, (a, b) in enumerate(zip(done.token_ids, expected, strict=True)) if a != b), None)
        if differs is not None:
            top = every_tiny.reference.logits(prompt + expected[:differs])[-1].topk(2).values
            assert top[0] - top[1] < 1e-3, f"token {differs}: {done.token_ids} for {expected}"


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "fp16", "fp8_e4m3", "int8"])
def test_a_format_gives_the_same_tokens_whatever_the_schedule(llama, kv_dtype, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", "reference")
    prompts, params = [PROMPT, [7], list(range(20, 39))], SamplingParams(10)
    results = []
    for options in ({}, {"block_size": 3, "max_batched_tokens": 4, "page_seed": 1}, {"num_blocks": 9}):
        engine = engine_of(llama, kv_dtype=kv_dtype, **options)
        results.append([c.token_ids for c in engine.generate(prompts, params)])
    assert results[0] == results[1] == results[2]


def test_lower_precision_is_really_stored(llama, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", "reference")
    logits = {}
    for kv_dtype in ("fp64", "bf16", "fp8_e4m3"):
        engine = engine_of(llama, kv_dtype=kv_dtype)
        engine.add_request(PROMPT, SamplingParams(4))
        logits[kv_dtype] = engine.runner.forward(engine.runner.fill(engine.scheduler.schedule(0.0)))
    exact = llama.reference.logits(PROMPT)[-1:]
    error = {name: float((x - exact).abs().max()) for name, x in logits.items()}
    assert error["fp64"] < 1e-10 < 1e-4 < error["bf16"] < error["fp8_e4m3"]
    assert torch.isfinite(logits["fp8_e4m3"]).all()


def test_nothing_stays_behind_when_a_call_for_several_prompts_fails(llama, monkeypatch):
    engine = engine_of(llama)
    with pytest.raises(ValueError, match="params of 1: must be one for each of 2 prompts"):
        engine.generate([[1, 2], [3, 4]], [SamplingParams()])

    def breaks(*_):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.runner, "run", breaks)
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.generate([[1, 2], [3, 4]])
    assert not engine.requests and not engine.scheduler.has_work and engine.cache.held_bytes == 0


@pytest.mark.parametrize("field", ["salt", "adapter"])
def test_keys_that_utf8_cannot_hold_are_refused_at_arrival(field):
    with pytest.raises(ValueError, match=f"{field} .*must be text that UTF-8 can hold"):
        Request("a", [1, 2], SamplingParams(), **{field: "\ud800"})
