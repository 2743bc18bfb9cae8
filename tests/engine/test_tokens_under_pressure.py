"""Every kind of cache with everything on, one story with all features: each request gets the tokens that it gets alone.

Victims are dropped or swapped, prefixes are saved and loaded. Engines run with `check`: invariants after each step, NaN
in every page nobody holds. Small pools and mixes of features are in `test_fifty_schedules`.
"""

import random
from collections import Counter
from dataclasses import replace

import pytest
from drafting import speculation
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

PROMPT, OUTPUT = 20, 8
FEATURES = {
    "looks": (0, 2, None),  # until a copy ends
    "disk": (True, False),
    "host": ("small", "1MiB"),
    "drafts": ("right", "tree", "ngram", "lookahead", "model"),
}
FIRST = {"looks": 2, "disk": True, "host": "1MiB", "drafts": "tree"}
"""What the pinned seed has first, with what it must bring about; all else is drawn."""


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
        speculation=speculation(model, drawn["drafts"], answers, adapt=rng.random() < 0.3, longest=rng.randint(1, 3)),
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
