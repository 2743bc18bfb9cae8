"""Planted faults: the symptom shows, the detector finds the cause, and an engine without the fault shows neither."""

from __future__ import annotations

import pytest
import torch

from kvlab.cache.prefix import PrefixOptions
from kvlab.engine import Engine, SamplingParams
from kvlab.lab import failures
from kvlab.lab.paged_run import keys_and_values
from kvlab.lab.small_model import fill, small_model
from kvlab.quant import get_codec
from kvlab.quant.calibrate import calibrate

GREEDY = SamplingParams(max_tokens=6)
FIRST, SECOND, THIRD = ([3 + (7 * i + k) % 61 for i in range(10)] for k in (0, 20, 40))


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture(autouse=True)
def torch_operations(monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", "torch")


def engine_of(model, **options) -> Engine:
    return Engine(model, **{"block_size": 4, "num_blocks": 40, "max_model_len": 64, "max_batched_tokens": 4} | options)


def alone(model, prompt, params=GREEDY) -> list[int]:
    return engine_of(model).generate([prompt], params)[0].token_ids


def run(engine: Engine, *prompts) -> list[list[int]]:
    return [done.token_ids for done in engine.generate(list(prompts), GREEDY)]


# a NaN from an overflow


def loudest(model) -> tuple[int, float]:
    """The position of FIRST whose key in layer 0 is the largest, and the factor that takes it alone beyond 464."""
    engine = engine_of(model)
    request_id = engine.add_request(FIRST, GREEDY)
    while engine.cache.computed.get(request_id, 0) < len(FIRST):
        engine.step()
    with failures.louder_keys(engine, 0, 1000.0):  # keys far above values
        engine.abort(request_id)
        request_id = engine.add_request(FIRST, GREEDY)
        while engine.cache.computed.get(request_id, 0) < len(FIRST):
            engine.step()
        peaks = failures.stored_peaks(engine)[request_id][0, : len(FIRST)]
    (top, second), where = peaks.topk(2).values.tolist(), int(peaks.argmax())
    assert second < 0.97 * top
    return where, 1000.0 * 465 / top


def test_a_value_too_large_for_fp8_becomes_nan_and_spreads_to_every_later_token(model) -> None:
    where, factor = loudest(model)
    engine = engine_of(model, kv_dtype="fp8_e4m3")
    with failures.without_clamp(), failures.louder_keys(engine, 0, factor), failures.unwatched(engine):
        # the same tokens up to the loud one
        bad = engine.add_request(FIRST, GREEDY)
        good = engine.add_request(FIRST[:where], SamplingParams(max_tokens=1))
        request, neighbour = engine.requests[bad], engine.requests[good]
        seen = {}
        while request.finish_reason is None:
            seen = failures.non_finite(engine) or seen
            engine.step()
        while neighbour.finish_reason is None:
            assert not failures.non_finite(engine)[good].any()
            engine.step()
    marks = seen[bad]
    assert marks[0].nonzero().flatten().tolist() == [where]
    assert marks[1:, where:].all()
    # a weight of 0 times NaN is NaN: earlier tokens of the same chunk of 4 may be hit, those of earlier chunks not
    assert not marks[:, : where - where % 4].any()
    assert (request.finish_reason, request.error) == ("error", "logits are not finite")
    assert neighbour.finish_reason == "length"


def test_an_engine_that_watches_ends_the_request_in_the_chunk_with_the_nan(model) -> None:
    where, factor = loudest(model)
    engine = engine_of(model, kv_dtype="fp8_e4m3")
    with failures.without_clamp(), failures.louder_keys(engine, 0, factor):
        request = engine.requests[engine.add_request([*FIRST, *SECOND], GREEDY)]
        while request.finish_reason is None:
            engine.step()
    assert (request.finish_reason, request.num_computed) == ("error", where - where % 4)


def test_with_the_clamp_the_same_weights_stay_finite(model) -> None:
    where, factor = loudest(model)
    engine = engine_of(model, kv_dtype="fp8_e4m3")
    with failures.louder_keys(engine, 0, factor):
        assert len(run(engine, FIRST)[0]) == GREEDY.max_tokens
        request_id = engine.add_request(FIRST, GREEDY)
        while engine.cache.computed.get(request_id, 0) < len(FIRST):
            engine.step()
        peaks = failures.stored_peaks(engine)[request_id]
    assert peaks.isfinite().all() and peaks[0, where] == 448


@pytest.mark.parametrize("share", ["tensor", "head", "channel"])
def test_peaks_are_of_the_rows_and_not_of_their_codes(model, share) -> None:
    """Scales found from data belong to what is read; a page as long as it has heads must not hide which is which."""
    heads = model.config.layers[0].branches[0].module.num_kv_heads

    def peaks(**options) -> torch.Tensor:
        engine = engine_of(model, block_size=heads, max_batched_tokens=16, **options)
        request_id = engine.add_request(FIRST, GREEDY)
        engine.step()
        return failures.stored_peaks(engine)[request_id]

    layers = keys_and_values(model, FIRST)
    found = peaks(kv_dtype="fp8_e4m3", kv_scales=calibrate(layers, share))
    torch.testing.assert_close(found[0], peaks()[0], rtol=2**-4, atol=0)
    assert not torch.allclose(found[0], found[0].max(), rtol=0.1)


def test_codec_weights_and_operations_are_as_they_were(model) -> None:
    engine = engine_of(model)
    before = {name: tensor.clone() for name, tensor in model.decoder.weights.named.items()}
    codec = get_codec("fp8_e4m3")
    with failures.without_clamp(), failures.louder_keys(engine, 1, 3.0):
        assert get_codec("fp8_e4m3") is not codec
        assert torch.equal(model.decoder.weights.named["model.layers.1.self_attn.k_proj.weight"],
                           3 * before["model.layers.1.self_attn.k_proj.weight"])  # fmt: skip
    assert get_codec("fp8_e4m3") is codec
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.decoder.weights.named.items())


@pytest.mark.parametrize("design", ["hash", "radix"])
def test_what_a_request_computed_that_ended_in_nan_is_not_found_by_others(model, design) -> None:
    _, factor = loudest(model)
    engine = engine_of(model, kv_dtype="fp8_e4m3", prefix=PrefixOptions(design), check=True)
    with failures.without_clamp(), failures.louder_keys(engine, 0, factor):
        assert engine.generate([FIRST], GREEDY)[0].error == "logits are not finite"
    assert engine.cache.prefix.clear() == 0, "nothing of it is cached"
    cold = engine_of(model, kv_dtype="fp8_e4m3").generate([FIRST], GREEDY)[0].token_ids
    assert engine.generate([FIRST], GREEDY)[0].token_ids == cold
    assert engine.events.of("hit") == [] and len(cold) == GREEDY.max_tokens


# prefixes that outlive their weights


def stale(model, design: str):
    """An engine that computed FIRST under other weights, and what FIRST and SECOND come to without a cache."""
    fill(model, 2)
    engine = engine_of(model, prefix=PrefixOptions(design), check=True)
    engine.generate([FIRST + SECOND], GREEDY)
    fill(model, 1)
    return engine, alone(model, FIRST + SECOND)


@pytest.mark.parametrize("design", ["hash", "radix"])
def test_new_weights_under_a_warm_cache_give_wrong_tokens_until_it_is_cleared(model, design) -> None:
    engine, right = stale(model, design)
    assert run(engine, FIRST + SECOND) != [right]
    assert engine.events.of("hit")[-1].tokens == 16
    assert engine.cache.prefix.clear() > 0
    assert run(engine, FIRST + SECOND) == [right]


@pytest.mark.parametrize("design", ["hash", "radix"])
def test_a_key_that_names_the_weights_hits_nothing_old(model, design) -> None:
    engine, right = stale(model, design)
    request = engine.requests[engine.add_request(FIRST + SECOND, GREEDY, salt="weights 1")]
    while engine.scheduler.has_work:
        engine.step()
    assert request.output == right and engine.events.of("hit") == []


@pytest.mark.parametrize("design", ["hash", "radix"])
def test_another_tokenizer_costs_hits_and_nothing_else(model, design) -> None:
    engine = engine_of(model, prefix=PrefixOptions(design), check=True)
    engine.generate([FIRST + SECOND], GREEDY)
    other = [3 + (token * 5) % 61 for token in FIRST + SECOND]  # the same text, other ids
    assert run(engine, other) == [alone(model, other)]
    assert engine.events.of("hit") == []
    half = FIRST + SECOND[:2] + other[:6]  # equal up to a page boundary
    assert run(engine, half) == [alone(model, half)]
    assert [event.tokens for event in engine.events.of("hit")] == [12]


# a page that is freed twice


def freed_late(model, check: bool):
    """An engine of two at a time in which the first to leave has its pages released again while others hold them."""
    engine = engine_of(model, max_num_seqs=2, max_batched_tokens=64, check=check)
    ids = [engine.add_request(FIRST, SamplingParams(max_tokens=1)), engine.add_request(SECOND, GREEDY)]
    ids.append(engine.add_request(THIRD, GREEDY))
    return engine, ids


def test_a_late_free_lets_two_requests_write_one_page(model) -> None:
    engine, (_, second, third) = freed_late(model, check=False)
    requests = {name: engine.requests[name] for name in (second, third)}
    with failures.late_free(engine) as late:
        shared: list[dict[int, list[str]]] = []
        with pytest.raises(AssertionError, match="is freed more often than it was taken"):
            while engine.scheduler.has_work:
                engine.step()
                shared.append(failures.overheld(engine.cache))
    assert {late[0]: [third]} in shared, "free while held"
    assert {late[0]: [second, third]} in shared, "held by two"
    tokens = {name: request.output for name, request in requests.items()}
    wrong = [n for n, p in ((second, SECOND), (third, THIRD)) if tokens[n] != alone(model, p)[: len(tokens[n])]]
    assert wrong, "the tokens of at least one of them change"


def test_the_invariants_name_the_block_in_the_step_in_which_it_happens(model) -> None:
    engine, _ = freed_late(model, check=True)
    with failures.late_free(engine) as late, pytest.raises(AssertionError) as raised:
        while engine.scheduler.has_work:
            engine.step()
    assert f"block {late[0]}: 0 references, 1 in tables" in str(raised.value)


def test_without_the_late_free_nobody_shares_and_the_tokens_are_right(model) -> None:
    engine, ids = freed_late(model, check=True)
    requests = [engine.requests[name] for name in ids]
    with failures.late_free(engine_of(model)):  # another engine's fault
        while engine.scheduler.has_work:
            engine.step()
            assert failures.overheld(engine.cache) == {}
    assert [request.output for request in requests[1:]] == [alone(model, SECOND), alone(model, THIRD)]


# pages that never come back


def test_a_leak_is_found_from_the_events_of_the_aborted_requests(model) -> None:
    engine = engine_of(model)
    with failures.leak_on_abort(engine):
        kept = engine.add_request(FIRST, GREEDY)
        lost = engine.add_request(SECOND, GREEDY)
        for _ in range(6):
            engine.step()
        engine.abort(lost)
        while engine.scheduler.has_work:
            engine.step()
    found = failures.unreturned(engine.events, engine.groups)
    assert [(u.request_id, u.took, u.gave_back, u.ended) for u in found] == [(lost, 3, 0, "abort: asked for")]
    assert sum(pool.num_held for pool in engine.cache.pools) == 3
    with pytest.raises(AssertionError, match="1 references, 0 in tables"):
        engine.cache.check_invariants()
    assert kept not in {u.request_id for u in found}


def test_an_engine_without_a_leak_has_nothing_unreturned(model) -> None:
    engine = engine_of(model, num_blocks=12, max_num_seqs=3, check=True)
    longer = SamplingParams(max_tokens=20)
    ids = [engine.add_request(prompt, longer) for prompt in (FIRST, SECOND, THIRD)]
    with failures.leak_on_abort(engine_of(model)):  # another engine's fault
        while not engine.events.counts["preempt"]:
            assert engine.step() is not None and engine.scheduler.has_work
        engine.abort(ids[1])
        while engine.scheduler.has_work:
            engine.step()
    assert failures.unreturned(engine.events, engine.groups) == []
    assert engine.cache.num_free == 11


# a prompt that fits nothing


def test_a_prompt_larger_than_the_pool_is_refused_and_others_go_on(model) -> None:
    engine = engine_of(model, num_blocks=6)
    running = engine.add_request(FIRST, GREEDY)
    request = engine.requests[running]
    with pytest.raises(ValueError, match=r"request can never fit: 35 tokens take 9 pages .* the pool has 5"):
        engine.add_request([3] * 30, GREEDY)
    while engine.scheduler.has_work:
        engine.step()
    assert request.output == alone(model, FIRST)


def test_let_in_all_the_same_it_stops_everybody_behind_it(model) -> None:
    engine = engine_of(model, num_blocks=6)
    with failures.without_admission_check(engine):
        engine.add_request([3] * 30, GREEDY)
        behind = engine.add_request(FIRST, GREEDY)
        with pytest.raises(AssertionError, match="requests are alive, none was given a token"):
            engine.step()
    assert engine.requests[behind].num_computed == 0
    assert failures.head_of_line(engine) == ("0", "30 tokens and a page for each running request do not fit now")
