"""Every kind of cache under random schedules: each request gets the tokens of its own text alone, exactly, in fp64.

Arrivals, aborts, page sizes, budgets, small pools, shuffled pages, samplers, pools shared or not, steps back that go
on with other tokens. Engines run with `check`: invariants after each step, NaN in every page nobody holds.
"""

import random

import pytest
import torch
from kinds import KINDS, kind

from kvlab.cache import PrefixOptions
from kvlab.engine import Engine, SamplingParams
from kvlab.engine.sampler import RowParams, sample
from kvlab.plan.policies import PolicySettings, default_block_size, sequence_bytes
from kvlab.specs.parts import OpenBuffer
from kvlab.specs.pools import POOLS, pool_layout
from kvlab.specs.rollback import RollbackPolicy

PROMPT, OUTPUT = 20, 10
POLICIES = [RollbackPolicy(), RollbackPolicy(), RollbackPolicy(0, 5, True), RollbackPolicy(4, 3, checkpoints_kept=3)]


def random_options(rng, model):
    """Engine options under which the longest request just fits, or up to two of them."""
    block_size = default_block_size(model.spec, 1) * rng.choice([1, 2, 3, 4, 8])
    options = {
        "block_size": block_size,
        "pools": rng.choice(POOLS),
        "max_num_seqs": rng.randint(1, 5),
        "max_batched_tokens": rng.choice([1, 3, 6, 12, 64]),
        "page_seed": rng.choice([None, 1, 2]),
        "pad_to": rng.choice([1, 4]),
        "rollback": rng.choice(POLICIES),
        "prefix": rng.choice([None, PrefixOptions("hash"), PrefixOptions("radix", checkpoint_tokens=5)]),
    }
    layout = pool_layout(model.spec, block_size, options["pools"])
    pages = layout.sequence_pages(PROMPT + OUTPUT, options["max_batched_tokens"], options["rollback"])
    room = rng.uniform(1, 2)
    return options | {"num_blocks": tuple(2 + int(units * room) for units in layout.units(pages))}


class Followed:
    """A request and which parameters picked each of its tokens."""

    def __init__(self, engine, prompt, params):
        self.engine, self.id = engine, engine.add_request(prompt, params)
        self.request, self.used = engine.requests[self.id], {}
        # the most tokens of it that were ever computed
        self.longest = 0

    def is_promised(self, tokens):
        """Whether the policy promises that step back: it counts from the longest that the request has been."""
        self.longest = max(self.longest, self.request.num_computed)
        return min(tokens - 1, self.request.num_computed) >= self.longest - self.engine.options.rollback.tokens

    def step_back(self, tokens, seed):
        """Tries to go on from the first `tokens` tokens with another seed; a cache that cannot says so."""
        promised = self.is_promised(tokens)
        try:
            self.engine.truncate(self.id, tokens)
        except ValueError as refused:
            assert "no copy" in str(refused) or "gave back its pages" in str(refused)
            assert not promised, refused
            return False
        params = self.request.params
        self.request.params = SamplingParams(params.max_tokens, 0.9, seed=seed, ignore_eos=True)
        return True

    def check(self, reference):
        """Every token is the one that its parameters pick from the reference's logits of all before it."""
        ids, first = self.request.tokens.tolist(), self.request.num_prompt
        if len(ids) == first:
            return
        logits = reference.logits(ids[:-1])[first - 1 :]
        every = [self.used[position] for position in range(first, len(ids))]
        rows = RowParams.of(every, [p.seed for p in every], list(range(first, len(ids))), logits)
        assert sample(logits, rows).tolist() == ids[first:]


def take(engine, live):
    for output in engine.step():
        followed = live[output.request_id]
        assert output.token_id is not None, followed.request.error
        position = len(followed.request.tokens) - 1
        followed.used[position] = followed.request.params


@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize("name", KINDS)
def test_random_schedules(name, seed):
    rng, model = random.Random(seed * 100 + len(name)), kind(name)
    options = random_options(rng, model.model)
    engine = Engine(model.model, check=True, **options)
    live, stepped_back = {}, 0
    for arrival in range(7):
        prompt = [rng.randrange(model.vocab) for _ in range(rng.randint(1, PROMPT))]
        params = SamplingParams(rng.randint(2, OUTPUT), rng.choice([0.0, 0.8]), rng.choice([0, 5]),
                                seed=rng.randrange(100), ignore_eos=True)  # fmt: skip
        followed = Followed(engine, prompt, params)
        live[followed.id] = followed
        if arrival == 6:
            break
        for _ in range(rng.randint(0, 4)):
            take(engine, live)
        running = [f for f in live.values() if f.request in engine.scheduler.running]
        if running and rng.random() < 0.5:
            one = rng.choice(running)
            length = rng.randint(max(one.request.num_prompt, len(one.request.tokens) - 5), len(one.request.tokens))
            stepped_back += one.step_back(length, rng.randrange(100))
        if rng.random() < 0.1:
            engine.abort(rng.choice(list(live)))
    promises = engine.options.rollback.tokens > 0
    while engine.scheduler.has_work:
        take(engine, live)
        # the last request, at the latest, is still running when it has its first token
        running = [f for f in live.values() if f.request in engine.scheduler.running and f.request.output]
        if promises and not stepped_back and running:
            one = running[-1]
            stepped_back += one.step_back(max(one.request.num_prompt, len(one.request.tokens) - 2), rng.randrange(100))
    assert stepped_back or not promises
    for followed in live.values():
        followed.check(model)
    assert engine.kv.held_bytes == engine.kv.used_bytes == 0
    assert engine.kv.predicted_bytes == engine.kv.allocated_bytes


@pytest.mark.parametrize("name", KINDS)
def test_steps_back_that_were_promised_are_made(name):
    """One request goes back two and then three tokens, twice in a row, and goes on with other tokens each time."""
    model = kind(name)
    policy = RollbackPolicy(5, 2, checkpoints_kept=4)
    engine = Engine(model.model, check=True, num_blocks=60, block_size=default_block_size(model.model.spec, 2),
                    rollback=policy)  # fmt: skip
    followed = Followed(engine, [(7 * i + 3) % model.vocab for i in range(15)],
                        SamplingParams(20, seed=1, ignore_eos=True))  # fmt: skip
    live = {followed.id: followed}
    for back, seed in ((0, 0), (3, 5), (2, 6), (1, 7), (4, 8)):
        while len(followed.request.tokens) < 26 + seed % 3 - back:
            take(engine, live)
        assert followed.step_back(len(followed.request.tokens) - back, seed)
        assert followed.step_back(len(followed.request.tokens) - 1, seed + 10) or not back
    while engine.scheduler.has_work:
        take(engine, live)
    followed.check(model)
    assert engine.events.counts["rollback"] >= 5


def test_an_open_window_steps_back_within_itself_and_not_into_a_closed_one():
    """No states are kept: tokens of a compression window that is still open are forgotten, by place."""
    model = kind("compressed")
    assert {part.ratio for _, part in model.model.spec.parts() if isinstance(part, OpenBuffer)} == {4, 6}
    engine = Engine(model.model, check=True, num_blocks=30, block_size=24)
    prompt = [(5 * i + 2) % model.vocab for i in range(13)]
    followed = Followed(engine, prompt, SamplingParams(9, seed=1, ignore_eos=True))
    live = {followed.id: followed}
    while followed.request.num_computed < 15:
        take(engine, live)
    # 12 is where windows of 4 and of 6 tokens open
    assert followed.step_back(14, seed=2) and followed.request.num_computed == 13
    while followed.request.num_computed < 17:
        take(engine, live)
    assert not followed.step_back(16, seed=3) and followed.request.num_computed == 17
    while engine.scheduler.has_work:
        take(engine, live)
    followed.check(model)


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("name", KINDS)
def test_predicted_is_allocated_and_a_page_costs_what_the_plan_says(name, pools):
    model = kind(name).model
    size = default_block_size(model.spec, 4)
    engine = Engine(model, num_blocks=5, block_size=size, pools=pools)
    found = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in engine.storage.buffers.values()}
    assert sum(found.values()) == engine.kv.predicted_bytes == engine.pool_use.storage
    one = sequence_bytes(engine.spec, 30, PolicySettings("paged", size, 8, pools=pools))
    assert [g.block_bytes for g in one.groups] == [engine.layout.page_bytes(g) for g in range(len(engine.groups))]


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("name", KINDS)
def test_peak_resident_bytes_are_predicted_and_useful_plus_waste_is_all(name, pools):
    """One request in chunks of 4 up to 32 tokens, with the plan's bytes of a sequence reached and never passed."""
    model = kind(name)
    size = default_block_size(model.model.spec, 3)
    engine = Engine(model.model, num_blocks=80, block_size=size, pools=pools, max_batched_tokens=4)
    engine.add_request([(7 * i + 3) % model.vocab for i in range(32)], SamplingParams(1, ignore_eos=True))
    predicted = sequence_bytes(engine.spec, 32, PolicySettings("paged", size, 4, pools=pools))
    while engine.scheduler.has_work:
        engine.step()
        use = engine.pool_use
        assert use.storage == engine.kv.allocated_bytes and use.held == engine.kv.held_bytes
    # where a window's run of tokens begins inside a page is the schedule's affair; a chunk may just have begun
    spare = 0
    for planned, group in zip(predicted.groups, engine.groups, strict=True):
        spare += planned.block_bytes * {"window": 1, "chunk": planned.pages - 1}.get(group.retention.rule, 0)
    assert predicted.total - spare <= engine.kv.peak_held_bytes <= predicted.total


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("left_behind", [0xFF, 0x40])
def test_a_recycled_page_is_never_read_before_it_is_written(name, left_behind):
    """What a request left in its pages (NaN, or 32-odd in every place) does not reach the next one: vllm#35219."""
    model, params = kind(name), SamplingParams(6, ignore_eos=True)
    engine = Engine(model.model, num_blocks=30, block_size=default_block_size(model.model.spec, 4), max_num_seqs=1)
    first = engine.generate([[1, 2, 3, 4, 5, 6, 7]], params)[0]
    engine.storage.fill(left_behind)
    second = engine.generate([[9, 8, 7]], params)[0]
    assert first.token_ids == model.tokens([1, 2, 3, 4, 5, 6, 7], params)
    assert second.token_ids == model.tokens([9, 8, 7], params)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("tokens", [1, 6])
def test_bytes_written_after_n_tokens_are_the_bytes_of_n(name, tokens):
    model, changed = kind(name), {}
    for sentinel in (0xA5, 0x5A):
        engine = Engine(model.model, num_blocks=9, block_size=default_block_size(model.model.spec, 4))
        engine.storage.fill(sentinel)
        engine.add_request(list(range(3, 3 + tokens)), SamplingParams(2))
        engine.step()
        for member, buffer in engine.storage.buffers.items():
            changed[member] = changed.get(member, False) | (buffer != sentinel)
    written = {member: int(mask.sum()) for member, mask in changed.items()}
    parts = {(layer.index, i): part for layer in engine.spec.layers for i, part in enumerate(layer.parts)}
    for member, count in written.items():
        part, wanted = parts[member], parts[member].bytes_at(tokens)
        if isinstance(part, OpenBuffer):  # a place for each token that can wait; one that closes its window need not
            assert count <= wanted and (count > 0 or tokens % part.ratio == 0), part
        else:
            assert count == wanted, part
    assert not any(bool(mask[0].any()) for mask in changed.values()), "the null page was written"


def test_the_kinds_differ_in_what_they_keep():
    rules = {name: {part.retention.rule for _, part in kind(name).model.spec.parts()} for name in KINDS}
    assert set().union(*rules.values()) >= {"all", "window", "chunk", "state", "stride"}
    assert torch.isfinite(kind("full").logits([1, 2, 3])).all()
