"""Speculation changes no token: every kind of cache, random schedules, drafts that are right, wrong and half right.

The drafts here are chosen, not drawn, so that a request gets the very tokens of a run without drafts, sampled ones too.
Engines run with `check`: invariants after each step, NaN in every page nobody holds.
"""

import itertools
import random

import pytest
from kinds import KINDS, kind

from kvlab.cache.prefix.options import PrefixOptions
from kvlab.engine import Engine, SamplingParams
from kvlab.plan.policies import default_block_size
from kvlab.specs.pools import POOLS, pool_layout
from kvlab.specs.rollback import RollbackPolicy
from kvlab.speculate import Draft, SpeculationOptions
from kvlab.speculate.draft import Stateless

PROMPT, OUTPUT = 16, 14


class Planted(Stateless):
    """Drafts what really follows, wrong from a place on that `right` says, or a random one."""

    def __init__(self, answers, vocab, seed=0, right=None):
        self.answers, self.vocab, self.rng = answers, vocab, random.Random(seed)
        self.right = itertools.cycle(right) if right else None

    def propose(self, requests, counts):
        drafts = []
        for request, count in zip(requests, counts, strict=True):
            answer = self.answers[tuple(request.tokens[: request.num_prompt]), request.params]
            done = len(request.tokens) - request.num_prompt
            right = min(count, next(self.right)) if self.right else self.rng.randint(0, count)
            tokens = answer[done : done + right]
            tokens += [(t + 1) % self.vocab for t in answer[done + right : done + count]]
            drafts.append(Draft(tuple(tokens)))
        return drafts


def random_requests(rng, model, count):
    found = []
    for _ in range(count):
        prompt = [rng.randrange(model.vocab) for _ in range(rng.randint(1, PROMPT))]
        if found and rng.random() < 0.5:
            prompt = (found[-1][0] + prompt)[:PROMPT]
        params = SamplingParams(rng.randint(2, OUTPUT), rng.choice([0.0, 0.8]), rng.choice([0, 5]),
                                seed=rng.randrange(100), ignore_eos=True)  # fmt: skip
        found.append((prompt, params))
    return found


def random_options(rng, model):
    block_size = default_block_size(model.spec, 1) * rng.choice([1, 2, 3, 4])
    options = {
        "block_size": block_size, "pools": rng.choice(POOLS), "max_num_seqs": rng.randint(1, 4),
        "max_batched_tokens": rng.choice([3, 6, 12, 64]), "page_seed": rng.choice([None, 1]),
        "prefix": rng.choice([None, PrefixOptions("hash"), PrefixOptions("radix")]),
        "pad_to": rng.choice([1, 4]), "rollback": rng.choice([RollbackPolicy(), RollbackPolicy(0, 5, True)]),
    }  # fmt: skip
    layout = pool_layout(model.spec, block_size, options["pools"])
    kept = RollbackPolicy(**{**options["rollback"].__dict__, "before_drafts": True})
    pages = layout.sequence_pages(PROMPT + OUTPUT, options["max_batched_tokens"], kept)
    room = rng.uniform(1, 2.5)
    return options | {"num_blocks": tuple(2 + int(units * room) for units in layout.units(pages))}


@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize("name", KINDS)
def test_random_schedules_with_drafts_give_the_tokens_of_none(name, seed):
    model, rng = kind(name), random.Random(seed * 100 + len(name))
    requests = random_requests(rng, model, 5)
    answers = {(tuple(prompt), params): model.tokens(prompt, params) for prompt, params in requests}
    planted = Planted(answers, model.vocab, seed)
    speculation = SpeculationOptions(lambda engine: planted, k=rng.randint(1, 5))
    options = random_options(rng, model.model)
    engine = Engine(model.model, check=True, speculation=speculation, **options)
    ids = {}
    for prompt, params in requests:
        ids[engine.add_request(prompt, params)] = answers[tuple(prompt), params]
        for _ in range(rng.randint(0, 3)):
            engine.step()
    live = dict(engine.requests)
    while engine.scheduler.has_work:
        engine.step()
    for request_id, request in live.items():
        assert request.output == ids[request_id], (request.error, options)
    assert engine.kv.held_bytes == 0
    seen = engine.speculator.acceptance
    assert engine.events.counts["draft"] == engine.events.counts["accept"] == seen.steps
    assert 0 <= seen.accepted <= seen.drafted


@pytest.mark.parametrize("name", KINDS)
def test_drafts_right_wrong_and_half_right_are_all_met(name):
    """One request alone, pages of which a chunk of drafts spans several."""
    model = kind(name)
    prompt, params = [(7 * i + 3) % model.vocab for i in range(9)], SamplingParams(24, ignore_eos=True)
    answers = {(tuple(prompt), params): model.tokens(prompt, params)}
    # twice in a row back by more than two tokens (llama.cpp#22746), none right, all right
    planted = Planted(answers, model.vocab, right=[2, 3, 0, 5, 1])
    engine = Engine(model.model, check=True, num_blocks=60, block_size=default_block_size(model.model.spec, 2),
                    speculation=SpeculationOptions(lambda engine: planted, k=5))  # fmt: skip
    assert engine.generate([prompt], params)[0].token_ids == answers[tuple(prompt), params]
    assert [e.tokens for e in engine.events.of("accept")][:5] == [2, 3, 0, 5, 1]
    # a state that went back twice is brought up to date by a step without drafts
    assert engine.scheduler.step_number == (9 if engine.cache.keeps_states and name != "compressed" else 8)
