"""Known faults of speculation in other engines, each as the test that would have seen it."""

import random

import pytest
import torch
from conftest_engine import Tiny
from kinds import kind

from kvlab.cache.prefix.options import PrefixOptions
from kvlab.engine import Engine, SamplingParams
from kvlab.speculate import Draft, SpeculationOptions
from kvlab.speculate.draft import Stateless


class Wrong(Stateless):
    """Drafts what follows, or with `wrong` what does not; as a tree with `branches`."""

    def __init__(self, answers, wrong=True, tree=False):
        self.answers, self.wrong, self.tree = answers, wrong, tree

    def propose(self, requests, counts):
        found = []
        for request, count in zip(requests, counts, strict=True):
            answer = self.answers[tuple(request.tokens[: request.num_prompt])]
            done = len(request.tokens) - request.num_prompt
            tokens = [(t + self.wrong) % 61 for t in answer[done : done + count]]
            parents = tuple(i // 2 - 1 for i in range(len(tokens))) if self.tree else ()
            found.append(Draft(tuple(tokens), parents))
        return found


@pytest.fixture(scope="module")
def llama():
    return Tiny("full")


def engine_of(tiny, answers, k=4, wrong=True, tree=False, **options):
    speculation = SpeculationOptions(lambda engine: Wrong(answers, wrong, tree), k=k)
    return Engine(tiny.model(), **{"num_blocks": 60, "block_size": 4, "check": True} | options, speculation=speculation)


@pytest.mark.parametrize("length", [12, 13, 14, 15, 16, 28])
def test_drafts_past_the_end_of_a_page_get_slots_of_their_own(llama, length):
    """vllm#16370: with fewer than k slots left in the last page the drafter indexed past the table."""
    rng, params = random.Random(length), SamplingParams(8)
    prompts = [[rng.randrange(61) for _ in range(length)], [rng.randrange(61) for _ in range(length - 1)]]
    answers = {tuple(p): llama.reference.tokens(p, params) for p in prompts}
    engine = engine_of(llama, answers, block_size=16, num_blocks=9)
    fill, seen = engine.runner.fill, []

    def watched(step):
        inputs = fill(step)
        slots = inputs.batches[0].slot_mapping.tolist()
        seen.append(max(len(c.drafts) for c in step.chunks))
        assert all(16 <= slot < 9 * 16 for slot in slots) and len(set(slots)) == len(slots)
        own = [set(engine.cache.block_table(c.request.request_id)) for c in step.chunks]
        assert len(own) < 2 or not own[0] & own[1]
        return inputs

    engine.runner.fill = watched
    assert [c.token_ids for c in engine.generate(prompts, params)] == [answers[tuple(p)] for p in prompts]
    assert max(seen) == 4


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("left", range(1, 6))
def test_drafts_stop_at_the_longest_length(llama, left, wrong, tree):
    """vllm-ascend#9098, vllm#51723: at full context drafts advanced the length past the table."""
    length, k = 30, 3
    prompt = [(5 * i + 2) % 61 for i in range(length - left)]
    answer = llama.reference.tokens(prompt, SamplingParams(left))
    engine = engine_of(llama, {tuple(prompt): answer + [0] * 9}, k, wrong, tree, max_model_len=length, num_blocks=9)
    widths = []
    fill = engine.runner.fill
    engine.runner.fill = lambda step: (widths.extend(c.start + c.count for c in step.chunks), fill(step))[1]
    [done] = engine.generate([prompt], SamplingParams(99))
    assert (done.token_ids, done.finish_reason) == (answer, "length")
    # the last token is never put into the cache
    assert max(widths) <= length - 1


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 9])
def test_exactly_max_tokens(llama, max_tokens):
    prompt = [5, 3, 8]
    answer = llama.reference.tokens(prompt, SamplingParams(20))
    engine = engine_of(llama, {tuple(prompt): answer}, wrong=False)
    assert engine.generate([prompt], SamplingParams(max_tokens))[0].token_ids == answer[:max_tokens]


def test_a_stop_token_among_right_drafts_ends_the_request_there(llama):
    prompt = [5, 3, 8]
    answer = llama.reference.tokens(prompt, SamplingParams(20))
    stop = answer[6]
    engine = engine_of(llama, {tuple(prompt): answer}, wrong=False, k=5)
    [done] = engine.generate([prompt], SamplingParams(20, stop_token_ids=(stop,)))
    assert (done.token_ids, done.finish_reason) == (answer[: answer.index(stop) + 1], "stop")
    assert engine.kv.held_bytes == 0


@pytest.mark.parametrize("n", [4, 6, 7, 8, 14, 15])
def test_bursts_of_drafts_around_a_window(n):
    """transformers#48280: bursts made a window's layer return more columns than the mask had."""
    mistral = Tiny("window")
    prompt, params = [(7 * i + 3) % 61 for i in range(n)], SamplingParams(8)
    answer = mistral.reference.tokens(prompt, params)
    for wrong in (True, False):
        engine = engine_of(mistral, {tuple(prompt): answer}, 5, wrong, block_size=2)
        assert engine.generate([prompt], params)[0].token_ids == answer


def entries(engine, request, positions):
    """Keys and values of the request at `positions` in every layer."""
    found = []
    for parts in engine.runner.views:
        for view in parts:
            slots = torch.tensor(
                engine.cache.slot_mapping(request.request_id, positions.start, positions.stop, view.group)
            )
            for codes in (view.k, view.v):
                found.append(codes[slots // view.block_size, :, slots % view.block_size].clone())
    return found


# windows take no trees
@pytest.mark.parametrize(("name", "tree"), [("full", False), ("full", True), ("both", False)])
def test_what_a_request_holds_after_wrong_drafts_is_what_a_fresh_one_holds(name, tree):
    tiny, prompt, params = Tiny(name), [(7 * i + 3) % 61 for i in range(10)], SamplingParams(30)
    answer = tiny.reference.tokens(prompt, params)
    engine = engine_of(tiny, {tuple(prompt): answer}, 5, True, tree, block_size=3)
    engine.add_request(prompt, params)
    request = engine.requests["0"]
    while len(request.output) < 9:
        engine.step()
    fresh = Engine(tiny.model(), num_blocks=60, block_size=3)
    fresh.add_request(request.tokens[:-1].tolist(), SamplingParams(2))
    fresh.step()
    assert engine.events.counts["accept"] > 3
    live = range(request.num_computed - 6, request.num_computed)  # inside every window
    for got, wanted in zip(entries(engine, request, live), entries(fresh, fresh.requests["0"], live), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)
    pages = [len(engine.cache.block_table("0", g)) for g in range(len(engine.groups))]
    # drafts left no page behind but the one for the next token
    assert pages == [-(-(request.num_computed + 1) // 3)] * len(pages)


def test_drafts_take_no_page_from_anyone(llama):
    """A pool in which drafts would make requests give way: nobody does, drafts are left out."""
    params = SamplingParams(8)
    prompts = [[(3 * i + p) % 61 for i in range(8)] for p in range(3)]
    answers = {tuple(p): llama.reference.tokens(p, params) for p in prompts}
    for wrong in (False, True):
        engine = engine_of(llama, answers, 6, wrong, block_size=2, num_blocks=1 + 3 * 8)
        assert [c.token_ids for c in engine.generate(prompts, params)] == list(answers.values())
        assert engine.events.counts["preempt"] == 0


@pytest.mark.parametrize("name", ["delta", "hybrid", "compressed"])
def test_a_state_steps_back_twice_in_a_row(name):
    """llama.cpp#22746: the second step back restored the wrong state; mlx-lm#1109: none was made at all."""
    model, params = kind(name), SamplingParams(12, ignore_eos=True)
    prompt = [(7 * i + 3) % model.vocab for i in range(7)]
    answer = model.tokens(prompt, params)
    for right in ([2, 3], [1, 0, 0]):
        engine = Engine(model.model, num_blocks=60, block_size=24, check=True,
                        speculation=SpeculationOptions(lambda e, r=right: Rights(answer, r), k=5))  # fmt: skip
        assert engine.generate([prompt], params)[0].token_ids == answer
        assert [e.tokens for e in engine.events.of("accept")][: len(right)] == right


class Rights(Stateless):
    """Drafts of which the first few are right, by step."""

    def __init__(self, answer, rights):
        self.answer, self.rights = answer, list(rights)

    def propose(self, requests, counts):
        done = len(requests[0].tokens) - requests[0].num_prompt
        right = self.rights.pop(0) if self.rights else 0
        tail = self.answer[done + right : done + counts[0]]
        return [Draft(tuple(self.answer[done : done + right] + [(t + 1) % 61 for t in tail]))]


def test_k_follows_what_is_accepted(llama):
    prompt, params = [5, 3, 8], SamplingParams(60)
    answer = llama.reference.tokens(prompt, params)
    drafted = {}
    for wrong in (False, True):
        speculation = SpeculationOptions(lambda e, w=wrong: Wrong({tuple(prompt): answer}, w), k=6, adapt=True)
        engine = Engine(llama.model(), num_blocks=60, block_size=4, speculation=speculation)
        assert engine.generate([prompt], params)[0].token_ids == answer
        drafted[wrong] = engine.speculator.acceptance.drafted
    assert drafted[True] < 40 < 45 < drafted[False]


@pytest.mark.parametrize("name", ["full", "both"])
@pytest.mark.parametrize("design", ["hash", "radix"])
def test_ten_turns_hit_as_much_with_drafts_as_without(name, design):
    """sglang#32459, vllm#32802, vllm#53670: a drafter's needs shortened the prefixes that a turn finds again."""
    tiny, hits = Tiny(name), {}
    for drafting in (False, True):
        speculation = SpeculationOptions("ngram", k=4) if drafting else None
        engine = Engine(tiny.model(), num_blocks=120, block_size=4, check=True, prefix=PrefixOptions(design),
                        speculation=speculation)  # fmt: skip
        history, found = [5, 3, 8, 1, 40], []
        for turn in range(10):
            request_id = engine.add_request(history, SamplingParams(5, ignore_eos=True))
            request = engine.requests[request_id]
            while engine.scheduler.has_work:
                engine.step()
            found.append(sum(e.tokens for e in engine.events.of("hit", request_id)))
            history = [*request.tokens, (3 * turn) % 61, (5 * turn + 1) % 61]
        hits[drafting] = (found, history)
    assert hits[True] == hits[False] and hits[True][0][-1] > 50


def test_no_page_with_an_unverified_token_is_cached(llama):
    """Wrong drafts over whole pages: what is found again is what was verified."""
    prompt, params = [(7 * i + 3) % 61 for i in range(9)], SamplingParams(12)
    answer = llama.reference.tokens(prompt, params)
    engine = engine_of(llama, {tuple(prompt): answer}, 8, True, block_size=2, prefix=PrefixOptions())
    assert engine.generate([prompt], params)[0].token_ids == answer
    wrong = [*prompt, answer[0], *((t + 1) % 61 for t in answer[1:9])]
    request_id = engine.add_request(wrong, SamplingParams(1))
    engine.step()
    assert [e.tokens for e in engine.events.of("hit", request_id)] == [10]


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8", "int4_g32", "kivi4"])
@pytest.mark.parametrize("name", ["full", "both"])
def test_a_lossy_format_gives_the_same_tokens_with_drafts(name, kv_dtype):
    """Decision 17: what a query reads is a function of its position and of tokens up to it, verified ones."""
    tiny, params = Tiny(name), SamplingParams(24, ignore_eos=True)
    prompt = [(7 * i + 3) % 61 for i in range(21)]
    plain = Engine(tiny.model("fp32"), num_blocks=60, block_size=32, kv_dtype=kv_dtype)
    answer = plain.generate([prompt], params)[0].token_ids
    for wrong in (True, False):
        speculation = SpeculationOptions(lambda engine, w=wrong: Wrong({tuple(prompt): answer}, w), k=5)
        engine = Engine(tiny.model("fp32"), num_blocks=60, block_size=32, kv_dtype=kv_dtype, speculation=speculation)
        assert engine.generate([prompt], params)[0].token_ids == answer
        assert engine.speculator.acceptance.steps > 3
