"""Every kind of cache, pools too small, every policy: each request gets the tokens that it gets alone, exactly.

Victims are dropped or swapped, prefixes are saved and loaded, host memory is too small for all of it. Engines run with
`check`: invariants after each step, NaN in every page nobody holds.
"""

import random
from collections import Counter
from dataclasses import replace

import pytest
from kinds import ADAPTED, KINDS, kind
from late_copies import LateCopier

from kvlab.cache.prefix import DESIGNS, EVICTIONS, PrefixOptions
from kvlab.engine import Engine, SamplingParams
from kvlab.engine.tiers import TierOptions, swap_costs
from kvlab.plan.policies import default_block_size
from kvlab.schedule import SchedulingPolicy
from kvlab.schedule.policy import ORDERS, PREEMPT, VICTIMS
from kvlab.specs.pools import POOLS, pool_layout
from kvlab.specs.rollback import RollbackPolicy
from kvlab.speculate import Draft, SpeculationOptions
from kvlab.speculate.draft import Stateless

PROMPT, OUTPUT = 20, 8


def random_policy(rng, model):
    preempt = rng.choice(PREEMPT)
    # rates at which short sequences are computed again and long ones moved
    costs = swap_costs(model, 1e9, rng.choice([1e9, 1e13]), 1e-6) if preempt == "auto" or rng.random() < 0.5 else None
    return SchedulingPolicy(rng.choice(ORDERS), rng.choice(VICTIMS), preempt, costs, patience=2)


def random_prefix(rng):
    design, eviction = rng.choice(DESIGNS), rng.choice(EVICTIONS)
    return rng.choice([None, PrefixOptions(design, eviction)])


def random_engine(rng, model, **options):
    block_size = default_block_size(model.spec, 1) * rng.choice([1, 2, 4])
    pools, budget = rng.choice(POOLS), rng.choice([3, 6, 12, 64])
    rollback = rng.choice([RollbackPolicy(), RollbackPolicy(4, 3, checkpoints_kept=3)])
    layout = pool_layout(model.spec, block_size, pools)
    pages = layout.sequence_pages(PROMPT + OUTPUT, budget, rollback)
    room = rng.uniform(1, 1.7)
    # drafts on states want a copy of each
    extra = 6 if "speculation" in options else 2
    units = layout.units(pages)
    host = max(layout.page_bytes(g) for g in range(len(layout.groups))) * rng.choice(
        [2, 2 * sum(pages), 9 * sum(pages)]
    )
    return Engine(
        model, check=True, block_size=block_size, pools=pools, max_num_seqs=4, max_batched_tokens=budget,
        num_blocks=tuple(extra + int(n * room) for n in units), page_seed=1, rollback=rollback,
        scheduling=random_policy(rng, model), tiers=TierOptions(host), prefix=random_prefix(rng), **options,
    )  # fmt: skip


def random_requests(rng, model, count):
    """Prompts, some of which begin with an earlier one and what came after it."""
    known: list[list[int]] = []
    for _ in range(count):
        prompt = [rng.randrange(model.vocab) for _ in range(rng.randint(1, PROMPT))]
        if known and rng.random() < 0.5:
            start = rng.choice(known)
            prompt = (start + prompt)[: rng.randint(min(len(start) + 1, PROMPT), PROMPT)]
        params = SamplingParams(rng.randint(2, OUTPUT), rng.choice([0.0, 0.8]), seed=rng.randrange(9), ignore_eos=True)
        known.append((prompt + model.tokens(prompt, params))[: PROMPT - 1])
        yield prompt, params


@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_those_of_each_request_alone(name, seed):
    rng, model = random.Random(seed * 1000 + len(name)), kind(name)
    engine = random_engine(rng, model.model)
    wanted = {}
    for prompt, params in random_requests(rng, model, 6):
        request = engine.add_request(prompt, params, priority=rng.randrange(3))
        wanted[request] = (engine.requests[request], prompt, params)
        for _ in range(rng.randint(0, 4)):
            engine.step()
        if rng.random() < 0.1:
            engine.abort(rng.choice(list(wanted)))
        if rng.random() < 0.2:
            engine.scheduler.preempt(rng.choice(list(wanted)), 0.0)
    while engine.scheduler.has_work:
        engine.step()
    for request, prompt, params in wanted.values():
        assert request.finish_reason in ("length", "abort")
        expected = model.tokens(prompt, params)
        assert request.output == expected[: len(request.output)]
    assert engine.kv.held_bytes == 0 and not engine.tiers.in_flight


class Teacher(Stateless):
    """Drafts what each request will say, now and then with a mistake; as a tree a wrong branch stands before the right."""

    def __init__(self, answers, vocab, tree=False):
        self.answers, self.vocab, self.tree = answers, vocab, tree

    def propose(self, requests, counts):
        drafts = []
        for request, count in zip(requests, counts, strict=True):
            known, parents = len(request.output), ()
            tokens = self.answers[request.request_id][known : known + count]
            if tokens and known % 2 == 1:
                # the first of them, as a step may have room for no more
                tokens[0] = (tokens[0] + 1) % self.vocab
            elif self.tree and len(tokens) > 1:
                tokens, parents = [(tokens[0] + 1) % self.vocab, *tokens[:-1]], (-1, -1, *range(1, len(tokens) - 1))
            drafts.append(Draft(tuple(tokens), parents))
        return drafts


BRANCHING = ("full", "neighbours")
OWN_DRAFTS = ("full", "windows", "latent", "indexed")
FEATURES = {
    "looks": (0, 2, None),  # until a copy ends
    "disk": (True, False),
    "host": ("small", "1MiB"),
    "drafts": ("taught", "tree", "ngram", "lookahead", "model"),
}
FIRST = {"looks": 2, "disk": True, "host": "1MiB", "drafts": "tree"}
"""What the pinned seed has first, with what it must bring about; all else is drawn."""


def speculation(rng, model, drafts, answers):
    """Drafts of that sort, or the nearest that the kind can have."""
    tree = drafts == "tree" and model.name in BRANCHING
    if drafts in ("taught", "tree") or (drafts == "model" and model.name not in OWN_DRAFTS):
        return SpeculationOptions(lambda engine: Teacher(answers, model.vocab, tree), k=3)
    own = {"method": "draft", "draft": model.model, "drawn": False} if drafts == "model" else {"method": drafts}
    return SpeculationOptions(k=rng.choice([2, 5]), adapt=rng.random() < 0.3, longest=rng.randint(1, 3), **own)


def all_features(rng, model, design, preempt, drawn, directory):
    """An engine with every feature on, each in one of its ways, and the dict that its drafts are taught from."""
    answers: dict[str, list[int]] = {}
    block_size, budget = default_block_size(model.model.spec, 1), rng.choice([4, 6, 9])
    rollback = RollbackPolicy(4, 3, checkpoints_kept=3)
    layout = pool_layout(model.model.spec, block_size, drawn["pools"])
    pages = layout.sequence_pages(PROMPT + OUTPUT, budget, rollback)
    unit = max(layout.page_bytes(g) for g in range(len(layout.groups)))
    tiers = TierOptions("1MiB" if drawn["host"] == "1MiB" else unit * sum(pages))
    if drawn["disk"]:
        tiers = replace(tiers, disk_dir=directory, disk_bytes=rng.choice([1 << 15, 1 << 24]))
    costs = swap_costs(model.model, 1e9, rng.choice([1e9, 1e13]), 1e-6)
    engine = Engine(
        model.model, check=True, block_size=block_size, pools=layout.policy, max_num_seqs=4, max_batched_tokens=budget,
        num_blocks=tuple(12 + 2 * n for n in layout.units(pages)), page_seed=1, rollback=rollback, tiers=tiers,
        prefix=PrefixOptions(design, rng.choice(EVICTIONS), ttl=rng.choice([1e-3, 60])),
        scheduling=SchedulingPolicy(rng.choice(ORDERS), rng.choice(VICTIMS), preempt, costs, patience=2),
        speculation=speculation(rng, model, drawn["drafts"], answers),
    )  # fmt: skip
    if drawn["looks"] != 0:
        engine.tiers.copier = LateCopier(engine.tiers.copier, drawn["looks"])
    return engine, answers


def listened(engine):
    """A count of what happens in the engine, by name."""
    seen = Counter()
    engine.events.subscribe(lambda event: seen.update({event.kind: 1, f"{event.kind} tokens": event.tokens}))
    engine.events.subscribe(lambda event: seen.update(parts=event.kind == "chunk" and "left" in event.reason))
    return seen


def everything(rng, model, engine, answers):
    """What happened in a run with all features on, by name; every request said what it says alone."""
    seen, live, prompt, answer = listened(engine), {}, [], []
    shared = [rng.randrange(model.vocab) for _ in range(12)]
    adapter = engine.adapters.add("a", model.adapter[0]) if model.name in ADAPTED else ""
    for i in range(5):
        # the first leaves pages, the second finds them, the third goes on from what only the tier has
        prompt = [*shared, i] if i < 2 else [*prompt, *answer, i] if i == 2 else [*shared[i : 2 * i], i]
        params = SamplingParams(OUTPUT - 1, 0.8 * (i % 2), seed=i, ignore_eos=True)
        own = adapter if i == 3 else ""
        answer = model.tokens(prompt, params, adapted=bool(own))
        request_id = engine.add_request(prompt, params, priority=rng.randrange(3), adapter=own)
        answers[request_id], live[request_id] = list(answer), engine.requests[request_id]
        steps = 0
        while engine.scheduler.has_work if i < 2 else steps < 2:
            engine.step()
            steps += 1
        if i == 1:
            engine.cache.prefix.clear()
        if i > 1 and engine.scheduler.running:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running).request_id, 0.0)
    engine.abort(request_id)
    while engine.scheduler.has_work:
        engine.scheduler.preempt(rng.choice(list(live)), 0.0) if rng.random() < 0.1 else engine.step()
    for request in live.values():
        said = request.output
        assert said == answers[request.request_id][: len(said)]
        assert (len(said) == OUTPUT - 1) == (request.finish_reason == "length")
        seen["abort"] += request.finish_reason == "abort"
    assert engine.kv.held_bytes == 0 and not engine.tiers.in_flight
    seen["wrong drafts"] = engine.speculator.acceptance.drafted - engine.speculator.acceptance.accepted
    seen["files"] = engine.tiers.saved.disk.num_files if engine.tiers.saved.disk else 0
    return seen


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("name", KINDS)
def test_everything_at_once(name, seed, tmp_path):
    """Prefix cache of both designs, chunks, tiers down to the disk with copies that end late, preemption both ways under
    every policy, drafts of every sort as chains and trees, adapters and aborts together, and each happened."""
    model, seen, rng = kind(name), Counter(), random.Random(seed + len(name))
    pools = rng.choice(POOLS) if seed else "per_kind"
    for design, preempt in zip(DESIGNS, ("swap", rng.choice(PREEMPT) if seed else "recompute"), strict=True):
        drawn = {feature: rng.choice(ways) for feature, ways in FEATURES.items()} | {"pools": pools}
        if not seed and preempt == "swap":
            drawn |= FIRST
        engine, answers = all_features(rng, model, design, preempt, drawn, tmp_path)
        # the same numbers, so that both runs ask for the same answers
        seen += everything(random.Random(seed + len(name)), model, engine, answers)
    wanted = ("hit", "load", "swap_out", "swap_in", "preempt tokens", "accept tokens", "wrong drafts", "abort", "parts",
              "files")  # fmt: skip
    # what other seeds draw need not bring all of it about
    assert seed or not [what for what in wanted if not seen[what]]
