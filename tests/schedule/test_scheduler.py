"""The scheduler as a story: who gets which tokens and pages in which step, and why. No model, no clock."""

import pytest

from kvlab.cache import KVCacheManager
from kvlab.schedule import EventLog, Limits, Request, SamplingParams, Scheduler
from kvlab.specs.formats import get_format
from kvlab.specs.layout import group_parts
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import Attention, RecurrentState, SlidingWindow, StateArray
from kvlab.specs.rollback import RollbackPolicy

BF16 = get_format("bf16")


def scheduler_of(*, num_blocks=20, block_size=4, max_num_seqs=8, max_batched_tokens=16, max_model_len=64, window=0):
    part = SlidingWindow(2, 8, 8, BF16, window=window) if window else Attention(2, 8, 8, BF16)
    spec = ModelSpec("tiny", "llama", (LayerSpec(0, (part,)),), 32, 4, 100)
    limits = Limits(max_num_seqs, max_batched_tokens, max_model_len)
    cache = KVCacheManager(group_parts(spec, block_size), [num_blocks], min(max_batched_tokens, max_model_len))
    return Scheduler(cache, limits, EventLog(1000))


def add(scheduler, request_id, prompt, max_tokens=8, now=0.0, **params):
    request = Request(request_id, range(prompt), SamplingParams(max_tokens, **params), stop_ids=(99,))
    scheduler.add(request, now)
    return request


def advance(scheduler, token=7, now=0.0):
    """(request, start, count) of each chunk of one step, whose samples are all `token`."""
    step = scheduler.schedule(now)
    scheduler.update(step, [token] * len(step.sampling), now)
    scheduler.cache.check_invariants()
    return [(c.request.request_id, c.start, c.count) for c in step.chunks]


def test_prompts_are_cut_to_the_budget_and_decodes_go_first():
    scheduler = scheduler_of(max_batched_tokens=8)
    add(scheduler, "a", 5)
    add(scheduler, "b", 12)
    # a whole, b's first 3: the budget is used up
    assert advance(scheduler) == [("a", 0, 5), ("b", 0, 3)]
    # a decodes, b goes on behind it
    assert advance(scheduler) == [("a", 5, 1), ("b", 3, 7)]
    add(scheduler, "c", 3)
    assert advance(scheduler) == [("a", 6, 1), ("b", 10, 2), ("c", 0, 3)]
    step = scheduler.schedule(0.0)
    assert [(c.request.request_id, c.count) for c in step.chunks] == [("a", 1), ("b", 1), ("c", 1)]
    assert (step.num_decodes, step.num_tokens) == (3, 3)


def test_a_last_chunk_of_one_token_counts_as_a_decode():
    scheduler = scheduler_of(max_batched_tokens=8)
    add(scheduler, "a", 9)
    assert advance(scheduler) == [("a", 0, 8)]
    add(scheduler, "b", 3)
    step = scheduler.schedule(0.0)
    assert [(c.request.request_id, c.count, c.samples) for c in step.chunks] == [("a", 1, True), ("b", 3, True)]
    assert step.num_decodes == 1


def test_the_last_arrived_gives_way_and_comes_back_first():
    scheduler = scheduler_of(num_blocks=6, block_size=2, max_model_len=10)  # 5 pages that hold 10 tokens
    a, b = add(scheduler, "a", 3, 6), add(scheduler, "b", 2, 6)
    assert advance(scheduler) == [("a", 0, 3), ("b", 0, 2)]
    assert advance(scheduler) == [("a", 3, 1), ("b", 2, 1)]
    assert [list(scheduler.cache.block_table(r)) for r in "ab"] == [[1, 2], [3, 4]]
    # a's fifth token takes page 5; b's fourth fits its page
    assert advance(scheduler) == [("a", 4, 1), ("b", 3, 1)]
    # a's sixth fits, b's fifth finds no page: b itself is the last arrived
    assert advance(scheduler) == [("a", 5, 1)]
    assert (b.num_computed, len(b.tokens)) == (0, 5)
    [event] = scheduler.events.of("preempt")
    assert (event.request_id, event.reason, event.tokens, event.pages) == ("b", "b needs pages", 4, 2)
    # a takes page 3; b waits: its five tokens need three pages and one to spare
    c = add(scheduler, "c", 1, 2)
    assert advance(scheduler) == [("a", 6, 1)]
    assert list(scheduler.cache.block_table("a")) == [1, 2, 5, 3]
    assert scheduler.events.of("wait")[-1].request_id == "b"
    assert [r.request_id for r in scheduler.waiting] == ["b", "c"]
    # a ends with its ninth token and b computes all it knew again, in one chunk
    assert advance(scheduler) == [("a", 7, 1)]
    assert (a.finish_reason, a.output) == ("length", [7] * 6)
    assert advance(scheduler) == [("c", 0, 1), ("b", 0, 5)]
    while scheduler.has_work:
        advance(scheduler)
    assert (b.output, c.output, scheduler.cache.num_free) == ([7] * 6, [7] * 2, 5)


def test_an_older_request_takes_pages_from_the_youngest():
    scheduler = scheduler_of(num_blocks=6, block_size=2, max_model_len=10)
    add(scheduler, "a", 4, 6)
    add(scheduler, "b", 2, 6)
    advance(scheduler)
    advance(scheduler)  # a holds 3 pages, b 2
    advance(scheduler)
    # a's seventh token needs a page: b, which has one to write into, loses its own
    assert advance(scheduler) == [("a", 6, 1)]
    assert scheduler.events.of("preempt")[0].reason == "a needs pages"


def test_what_ends_a_request():
    scheduler = scheduler_of(max_model_len=8)
    stop, own = add(scheduler, "stop", 2), add(scheduler, "own", 2, stop_token_ids=(98,))
    ignore = add(scheduler, "ignore", 2, 3, ignore_eos=True)
    clamp = add(scheduler, "clamp", 6, 100)
    step = scheduler.schedule(0.0)
    outputs = scheduler.update(step, [99, 98, 99, 7], 0.0)
    assert [(o.request_id, o.token_id, o.finish_reason) for o in outputs] == [
        ("stop", 99, "stop"), ("own", 98, "stop"), ("ignore", 99, None), ("clamp", 7, None)
    ]  # fmt: skip
    assert advance(scheduler) == [("ignore", 2, 1), ("clamp", 6, 1)]
    assert (clamp.finish_reason, len(clamp.tokens)) == ("length", 8)
    advance(scheduler)
    assert ([r.finish_reason for r in (stop, own, ignore)], scheduler.has_work) == (["stop", "stop", "length"], False)
    assert scheduler.cache.num_free == 19


def test_one_request_without_finite_logits_ends_alone():
    scheduler = scheduler_of()
    a, b = add(scheduler, "a", 2), add(scheduler, "b", 2)
    outputs = scheduler.update(scheduler.schedule(0.0), [None, 7], 0.0)
    assert [(o.request_id, o.token_id, o.finish_reason) for o in outputs] == [("a", None, "error"), ("b", 7, None)]
    assert (a.error, b.output, "a" in scheduler.cache.tables) == ("logits are not finite", [7], False)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "reason"),
    [
        (0, 4, "prompt: must hold at least one token"),
        (64, 1, "prompt of 64 tokens: must leave room for one more within max_model_len 64"),
        (30, 12, "request can never fit: 41 tokens take 11 pages of group full, the pool has 10"),
    ],
)
def test_what_can_never_run_is_refused_at_arrival_and_others_go_on(prompt, max_tokens, reason):
    scheduler = scheduler_of(num_blocks=11)
    with pytest.raises(ValueError, match=reason):
        add(scheduler, "bad", prompt, max_tokens)
    assert [e.reason for e in scheduler.events.of("refuse", "bad")] == [reason]
    good = add(scheduler, "good", 30, 11)  # 40 tokens in the cache: exactly the pool
    while scheduler.has_work:
        advance(scheduler)
    assert len(good.output) == 11


def test_abort_in_the_queue_and_while_running():
    scheduler = scheduler_of(max_num_seqs=1)
    a, b = add(scheduler, "a", 6), add(scheduler, "b", 6)
    advance(scheduler)
    assert scheduler.events.of("wait")[-1].reason == "max_num_seqs 1 requests run"
    assert scheduler.abort("b", 0.0) and scheduler.abort("a", 0.0)
    assert not scheduler.abort("a", 0.0)
    assert (a.finish_reason, b.finish_reason, a.output, b.output) == ("abort", "abort", [7], [])
    assert not scheduler.has_work and scheduler.cache.num_free == 19


def test_a_request_aborted_during_its_step_gets_nothing():
    scheduler = scheduler_of()
    a, _ = add(scheduler, "a", 2), add(scheduler, "b", 2)
    step = scheduler.schedule(0.0)
    scheduler.abort("a", 0.0)
    assert [o.request_id for o in scheduler.update(step, [7, 7], 0.0)] == ["b"]
    assert a.output == []


def test_a_window_gives_pages_back_while_its_request_runs():
    scheduler = scheduler_of(window=4, num_blocks=6, max_batched_tokens=8)
    a = add(scheduler, "a", 20, 20)
    most = 0
    while scheduler.has_work:
        advance(scheduler)
        most = max(most, 5 - scheduler.cache.num_free)
    assert (len(a.tokens), most) == (40, 2)
    assert sum(e.pages for e in scheduler.events.of("release")) == 9  # positions 0 to 35: the query at 39 reads 36 on


def test_the_log_tells_the_life_of_a_request():
    scheduler, heard = scheduler_of(), []
    end = scheduler.events.subscribe(heard.append)
    add(scheduler, "a", 3, 2, now=1.0)
    advance(scheduler, now=2.0)
    end()
    advance(scheduler, now=3.0)
    story = [(e.step, e.now, e.kind, e.reason, e.tokens, e.pages) for e in scheduler.events]
    assert story == [
        (0, 1.0, "arrive", "the pool can hold all 5 tokens", 3, 0),
        (1, 2.0, "admit", "first of 1 by fcfs, room beside 0", 3, 0),
        (1, 2.0, "chunk", "", 3, 0),
        (1, 2.0, "token", "", 7, 0),
        (2, 3.0, "chunk", "", 1, 0),
        (2, 3.0, "token", "", 7, 0),
        (2, 3.0, "finish", "length: 5 tokens", 5, 1),
    ]
    assert heard == list(scheduler.events)[:4]


def test_the_ring_forgets_but_the_counts_do_not():
    log = EventLog(3)
    scheduler = scheduler_of()
    scheduler.events = log
    add(scheduler, "a", 3, 4)
    while scheduler.has_work:
        advance(scheduler)
    assert (len(log), log.total, log.counts["token"]) == (3, 11, 4)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 0), ("temperature", -0.1), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0.0),
     ("top_p", 1.5), ("seed", -1), ("max_tokens", 2.5), ("top_k", 1.5), ("seed", 0.5)],
)  # fmt: skip
def test_sampling_params_name_the_bad_value(field, value):
    with pytest.raises(ValueError, match=f"{field} {value}"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field", ["max_num_seqs", "max_batched_tokens", "max_model_len"])
def test_limits_must_be_positive(field):
    with pytest.raises(ValueError, match=f"{field} 0: must be at least 1"):
        Limits(**{"max_num_seqs": 1, "max_batched_tokens": 1, "max_model_len": 1, field: 0})


class Scattering(KVCacheManager):
    """As sectors can be: request a's sixth token finds no place once others ran beside it, however much is free."""

    def allocate(self, request_id, tokens, keep_state=False):
        if request_id not in self.tables:
            self.tainted = False
        self.tainted |= len(self.tables) > 1
        if request_id == "a" and tokens > 5 and self.tainted:
            return False
        return super().allocate(request_id, tokens, keep_state)


def test_the_oldest_request_runs_alone_when_nothing_else_gives_it_room():
    scheduler = scheduler_of()
    scheduler.cache.__class__ = Scattering
    a, b = add(scheduler, "a", 4), add(scheduler, "b", 4)
    steps = [advance(scheduler) for _ in range(4)]
    # both run, then a finds no room: b goes, and a itself
    assert steps[:2] == [[("a", 0, 4), ("b", 0, 4)], [("a", 4, 1), ("b", 4, 1)]]
    assert [event.request_id for event in scheduler.events.of("preempt")] == ["b", "a"]
    # a begins again, and b waits although there is room
    assert steps[2:] == [[("a", 0, 6)], [("a", 6, 1)]]
    assert scheduler.events.of("wait", "b")[-1].reason == "request a needs the pool to itself"
    while scheduler.has_work:
        advance(scheduler)
    assert a.finish_reason == b.finish_reason == "length"


def test_a_running_request_is_cut_back_and_goes_on():
    scheduler = scheduler_of(block_size=2)
    a = add(scheduler, "a", 3, 6)
    for token in (5, 6, 7, 8):
        advance(scheduler, token)
    assert (a.tokens.tolist(), a.num_computed) == ([0, 1, 2, 5, 6, 7, 8], 6)
    assert scheduler.truncate("a", 5, 1.0).computed == 4
    assert (a.output, a.num_computed, len(scheduler.cache.block_table("a"))) == ([5, 6], 4, 2)
    [event] = scheduler.events.of("rollback")
    assert (event.tokens, event.reason) == (2, "5 tokens stay")
    # from its last token on, to the same length as ever
    assert advance(scheduler, 9) == [("a", 4, 1)]
    while scheduler.has_work:
        advance(scheduler, 9)
    assert a.output == [5, 6, 9, 9, 9, 9]


@pytest.mark.parametrize("tokens", [2, 6])
def test_a_cut_outside_the_output_is_refused(tokens):
    scheduler = scheduler_of()
    add(scheduler, "a", 3)
    for _ in range(2):
        advance(scheduler)
    with pytest.raises(ValueError, match=f"tokens {tokens}: must be from the prompt's 3 to the 5 there are"):
        scheduler.truncate("a", tokens, 0.0)
    with pytest.raises(ValueError, match="request z: must be alive"):
        scheduler.truncate("z", 3, 0.0)


def test_chunks_end_where_a_state_is_kept():
    state = RecurrentState("mamba2", (StateArray("x", ((4, 1),), 1, BF16),))
    spec = ModelSpec("tiny", "m", (LayerSpec(0, (Attention(2, 8, 8, BF16),)), LayerSpec(1, (state,))), 32, 4, 100)
    policy = RollbackPolicy(checkpoint_tokens=8, checkpoint_prompt=True)
    scheduler = Scheduler(KVCacheManager(group_parts(spec, 4), [20, 9], 16, rollback=policy), Limits(8, 16, 64))
    add(scheduler, "a", 11, 8)
    chunks = []
    while scheduler.has_work:
        step = scheduler.schedule(0.0)
        chunks += [(c.start, c.count, c.samples, c.keeps_state) for c in step.chunks]
        scheduler.update(step, [7] * len(step.sampling), 0.0)
    # multiples of 8, and the prompt's 11 tokens but the last; the last token of all is never computed
    assert chunks[:4] == [(0, 8, False, True), (8, 2, False, True), (10, 1, True, False), (11, 1, True, False)]
    assert [start + count for start, count, _, keeps in chunks if keeps] == [8, 10, 16]


def test_another_answer_to_the_same_prompt_computes_its_last_token_alone():
    """The copy of the prompt's state serves a retry: without it every token of the prompt would be computed again."""
    state = RecurrentState("mamba2", (StateArray("x", ((4, 1),), 1, BF16),))
    spec = ModelSpec("tiny", "m", (LayerSpec(0, (Attention(2, 8, 8, BF16),)), LayerSpec(1, (state,))), 32, 4, 100)
    cache = KVCacheManager(group_parts(spec, 4), [20, 9], 16, rollback=RollbackPolicy(checkpoint_prompt=True))
    scheduler = Scheduler(cache, Limits(8, 16, 64), EventLog())
    add(scheduler, "a", 11, 8)
    for _ in range(5):
        step = scheduler.schedule(0.0)
        scheduler.update(step, [7] * len(step.sampling), 0.0)
    restart = scheduler.truncate("a", 11, 0.0)
    assert restart.computed == 10 and len(restart.copies) == 1
    [chunk] = scheduler.schedule(0.0).chunks
    assert (chunk.start, chunk.count, chunk.samples) == (10, 1, True)
