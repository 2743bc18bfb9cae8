"""Drafts cost no unit of a hit, which on hybrids is long: a drafter's own cache begins where the hit ends."""

import pytest
import torch
from kinds import kind

from kvlab.cache import KVCacheManager
from kvlab.cache.prefix import DESIGNS, PrefixOptions
from kvlab.engine import Engine, SamplingParams
from kvlab.plan.policies import default_block_size
from kvlab.schedule import Limits, Request, Scheduler, Verified
from kvlab.specs.formats import get_format
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import Attention, RecurrentState, SlidingWindow, StateArray
from kvlab.specs.pools import pool_layout
from kvlab.specs.rollback import RollbackPolicy
from kvlab.speculate import SpeculationOptions
from kvlab.speculate.heads import Eagle, save_heads

BF16 = get_format("bf16")
FULL, WINDOW = Attention(2, 8, 8, BF16), SlidingWindow(2, 8, 8, BF16, window=21)


def state(rows):
    return RecurrentState("mamba2", (StateArray("x", ((rows, 8),), 8, BF16),))


# (layers, pages of one size: so many tokens that a page of attention is as large as one of the states, unit)
HYBRIDS = {
    "small states": ((state(26), FULL), 52), "large states": ((state(400), FULL, state(400)), 800),
    "windows too": ((WINDOW, state(150), FULL), 300),
}  # fmt: skip


def left_without_the_last_unit(length, unit):
    """The hit of a prompt that was seen before, in an engine that gives its drafter the last unit to compute again."""
    return max(0, (length - 1) // unit - 1) * unit


def answer(scheduler, name, prompt, right):
    """(tokens of the hit, prompt and output) of one request alone; of its three drafts a step `right` come true, of
    None there are no drafts."""
    request, hits, cache = Request(name, prompt, SamplingParams(9)), [], scheduler.cache
    scheduler.events.subscribe(lambda e: hits.append(e.tokens) if (e.kind, e.request_id) == ("hit", name) else None)
    scheduler.add(request, 0.0)
    while scheduler.has_work:
        request.drafts = () if right is None else (11, 12, 13)
        step = scheduler.schedule(0.0)
        cache.take_copies()
        got = []
        for chunk in step.chunks:
            if chunk.drafts:
                known, true = len(request.tokens), min(right, len(chunk.drafts))
                computed, _ = cache.drafts.settle(name, chunk.start, chunk.start + chunk.count, known + true)
                cache.drafts.drop(name)
                got.append(Verified((*chunk.drafts[:true], 19), computed))
            elif chunk.samples:
                got.append(19)
        scheduler.update(step, got, 0.0)
        cache.check_invariants()
    return sum(hits), list(request.tokens)


@pytest.mark.parametrize("right", [None, 0, 1, 3])
@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_prompt_that_was_seen_hits_all_of_its_whole_units(name, design, right):
    """vllm#53670, #54360, #51769: of each hit the last unit was computed again for the drafter: 1,600 to 2,144 tokens."""
    parts, unit = HYBRIDS[name]
    layers = tuple(LayerSpec(i, (part,)) for i, part in enumerate(parts))
    layout = pool_layout(ModelSpec("m", "m", layers, 32, 4, 64), 4, "unified")
    cache = KVCacheManager(
        layout, [99], 256, rollback=RollbackPolicy(before_drafts=True), prefix=PrefixOptions(design, checkpoint_tokens=1)
    )  # fmt: skip
    assert cache.prefix.unit == unit
    scheduler = Scheduler(cache, Limits(1, 256, 4000))
    for length in [n for k in (1, 2, 3) for n in (k * unit - 1, k * unit, k * unit + 1)]:
        prompt, wanted = [length + 20] * length, (length - 1) // unit * unit
        assert answer(scheduler, f"{length} cold", prompt, right)[0] == 0
        hit, text = answer(scheduler, f"{length} again", prompt, right)
        assert hit == wanted and (length <= unit or hit == left_without_the_last_unit(length, unit) + unit)
        # the next turn finds what was generated too; its last token is known and was not computed
        assert answer(scheduler, f"{length} next turn", [*text, 1, 2], right)[0] == (len(text) - 1) // unit * unit
        cache.prefix.clear()


def test_an_eagle_head_drafts_behind_a_hit_without_any_of_its_units(tmp_path):
    """The drafter that others drop a unit for: its own cache has nothing of what was found, and it drafts from there."""
    model, unit, torch_rng = kind("parallel").model, 16, torch.Generator().manual_seed(5)
    head = Eagle(model.config.hidden_size, 4, 2, 6, 16)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch_rng)
    path, vocab = tmp_path / "eagle.safetensors", model.config.vocab_size
    save_heads(path, head, torch.arange(vocab), {"heads": "4", "kv_heads": "2", "head_dim": "6"})
    engine = Engine(
        model, num_blocks=100, block_size=default_block_size(model.spec, 4), pools="unified", check=True,
        prefix=PrefixOptions(), speculation=SpeculationOptions("eagle", k=3, heads=str(path)),
    )  # fmt: skip
    assert engine.cache.prefix.unit == unit
    for length in (unit, unit + 1, 2 * unit + 1):
        prompt = [(length * i * i + 7 * i + length) % vocab for i in range(length)]
        outputs = []
        for wanted in (0, (length - 1) // unit * unit):
            drafted = engine.events.counts["draft"]
            request = engine.requests[engine.add_request(prompt, SamplingParams(5, ignore_eos=True))]
            while engine.scheduler.has_work:
                engine.step()
            outputs.append(request.output)
            assert sum(e.tokens for e in engine.events.of("hit", request.request_id)) == wanted
            assert engine.events.counts["draft"] > drafted
        assert outputs[0] == outputs[1]
