"""Published faults of schedulers and tiers under pressure, each made to happen here. Numbers: the project's list of
known pitfalls; the links name where each was seen."""

import itertools
import random

import pytest
from pretend import LateCopier, Memory

from kvlab.cache import KVCacheManager, PrefixOptions
from kvlab.cache.tiers import HostSlots, Tiers
from kvlab.plan.reserve import in_flight_reserve
from kvlab.schedule import EventLog, Limits, Request, SamplingParams, Scheduler, SchedulingPolicy
from kvlab.specs.formats import get_format
from kvlab.specs.layout import group_parts
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import Attention, SlidingWindow

BF16 = get_format("bf16")
FULL = Attention(2, 8, 8, BF16)
SWAP = SchedulingPolicy(preempt="swap")


class Rig:
    """A scheduler over pretended pages; copies happen when the test says so."""

    def __init__(self, *, blocks=11, block_size=4, budget=64, longest=400, policy=SWAP, host_pages=50, saves=False,
                 prefix=None):  # fmt: skip
        spec = ModelSpec("tiny", "llama", (LayerSpec(0, (FULL,)),), 32, 4, 100)
        groups = group_parts(spec, block_size)
        self.cache = KVCacheManager(groups, [blocks], min(budget, longest), prefix=prefix)
        self.memory = Memory(self.cache)
        self.copier = LateCopier(self.memory, random.Random(0))
        slots = HostSlots(self.cache.layout, host_pages * self.cache.layout.page_bytes(0))
        self.tiers = Tiers(self.cache, slots, self.copier, saves=saves)
        self.scheduler = Scheduler(self.cache, Limits(8, budget, longest), EventLog(), policy, self.tiers)

    def add(self, name, prompt, most=8):
        prompt = [3] * prompt if isinstance(prompt, int) else prompt
        request = Request(name, prompt, SamplingParams(most), stop_ids=(0,))
        self.scheduler.add(request, 0.0)
        return request

    def step(self):
        """The requests that computed something, and how many tokens."""
        step = self.scheduler.schedule(0.0)
        for chunk in step.chunks:
            self.memory.compute(chunk)
        self.scheduler.update(step, [5] * len(step.sampling), 0.0)
        self.cache.check_invariants()
        return [(chunk.request.request_id, chunk.count) for chunk in step.chunks]

    def land(self):
        """Every copy under way happens now."""
        for ticket, _, _ in list(self.copier.under_way):
            self.copier.run(ticket)


@pytest.mark.parametrize("prefix", [None, "hash", "radix"])
@pytest.mark.parametrize("order", sorted(set(itertools.permutations("aabb"))), ids="".join)
def test_20_two_copies_pin_one_page_in_every_order(order, prefix):
    """vllm-ascend#15990: a corrupted free list after several connectors held a page that others hit meanwhile."""
    rig = Rig(blocks=6, prefix=prefix and PrefixOptions(prefix))
    cache, pool = rig.cache, rig.cache.pools[0]
    last_pin = max(order.index("a"), order.index("b"))
    for leaves in range(last_pin, 4):
        holder = Request("holder", [leaves] * 9, SamplingParams())
        cache.allocate("holder", 8, **({"hit": cache.match(holder)} if prefix else {}))
        cache.advance("holder", 8)
        page, pinned = (0, cache.tables["holder"][0][0]), set()
        for i, reader in enumerate(order):
            (cache.pins.unpin if reader in pinned else cache.pins.pin)([page])
            pinned ^= {reader}
            if i == leaves:
                cache.free("holder")
            if prefix and i >= leaves:
                # whoever hits it meanwhile comes and goes
                asking = Request(f"hit {i}", [leaves] * 9, SamplingParams())
                hit = cache.match(asking)
                assert cache.allocate(asking.request_id, 9, hit=hit) and hit.tokens == 8
                assert pool.references[page[1]] == len(pinned) + 1
                cache.free(asking.request_id)
            cache.check_invariants()
            free = list(pool.free_blocks())
            idle = [block for _, block in cache.prefix.cached_pages()] if prefix else []
            held = [b for b in range(1, 6) if pool.references[b]]
            assert sorted(free + idle + held) == [1, 2, 3, 4, 5] and (len(free), len(idle)) == (
                pool.num_free,
                pool.num_idle,
            )
            assert (page[1] in held) == bool(pinned or i < leaves)
        if prefix:
            cache.prefix.clear()
        assert sorted(pool.free_blocks()) == [1, 2, 3, 4, 5] and not list(cache.pins.pages())


def test_22_a_saved_page_that_was_found_is_not_evicted_before_it_is_loaded():
    """vllm-project/vllm#39702: a hit in host memory, evicted between look-up and load."""
    rig = Rig(host_pages=3, saves=True)
    text = list(range(1, 14))
    a = rig.add("a", text, 1)
    rig.step()
    rig.land()
    rig.tiers.poll()
    assert a.finish_reason and len(rig.tiers.saved) == 3
    b = Request("b", text, SamplingParams(4))
    found = rig.tiers.find(b)
    assert found.tokens == 12
    # someone else needs host memory: nothing can be had while the three are pinned
    assert rig.tiers.saved.take_slot(0) is None
    rig.tiers.release(found)
    # not pinned: one goes, and the next look-up is a clean miss from there on
    assert rig.tiers.saved.take_slot(0) is not None
    assert rig.tiers.find(b) is None


def test_23_a_request_larger_than_the_pool_is_refused_and_others_go_on():
    """vllm-project/vllm#39734: longer than the pool, shorter than max_model_len; it blocked the queue for ever."""
    rig = Rig(blocks=11, longest=400)
    with pytest.raises(ValueError, match="request can never fit: 41 tokens take 11 pages of group full, the pool has"):
        rig.add("large", 34, 8)
    small = rig.add("small", 33, 8)
    while rig.scheduler.has_work:
        rig.step()
    assert small.finish_reason == "length"


def test_25_pages_behind_a_copy_are_waited_for_not_taken_from_the_next_victim():
    """vllm-ascend#16315: freed pages sat behind a fence, so that every running request was preempted in turn."""
    rig = Rig(blocks=12)
    for name in "abc":
        rig.add(name, 11, 20)
    # three pages each and two to spare; a and b take those, then c is the victim; then a and b are full up too
    while rig.step():
        pass
    [event] = rig.scheduler.events.of("preempt")
    assert (event.request_id, event.pages) == ("c", 3)
    assert rig.tiers.pages_coming == 3, "a copy still reads them"
    before = [(r.request_id, r.num_computed) for r in rig.scheduler.running]
    for _ in range(5):
        assert rig.step() == []
        assert [(r.request_id, r.num_computed) for r in rig.scheduler.running] == before
    assert rig.scheduler.events.of("wait")[-1].reason == "pages come free when copies that read them end"
    rig.land()
    assert [name for name, _ in rig.step()] == ["a", "b"]
    assert len(rig.scheduler.events.of("preempt")) == 1


def test_26_a_request_preempted_while_its_step_is_under_way_gets_that_token_once():
    """vllm-project/vllm#8219: preemption met an output that was still in flight, and the counts no longer agreed."""
    for policy in (SWAP, SchedulingPolicy()):
        rig = Rig(policy=policy)
        a = rig.add("a", 6, 6)
        rig.step()
        step = rig.scheduler.schedule(0.0)
        for chunk in step.chunks:
            rig.memory.compute(chunk)
        rig.scheduler.preempt("a", 0.0)
        assert rig.scheduler.update(step, [9], 0.0) == [], "the token of the lost step is dropped"
        assert (a.num_computed, len(a.tokens)) == (0, 7), "what a step under way computes is not moved"
        while rig.scheduler.has_work:
            rig.land()
            rig.step()
        assert (a.output, a.finish_reason) == ([5] * 6, "length")


def test_28_a_tiny_window_says_that_its_pages_are_for_tokens_in_flight():
    """vllm-project/vllm#54703: groups of tiny windows reserved most of the memory for the tokens of one step."""
    window = SlidingWindow(2, 8, 8, BF16, window=8)
    spec = ModelSpec("tiny", "llama", (LayerSpec(0, (window,)), LayerSpec(1, (FULL,))), 32, 4, 100)
    tiny, full = sorted(in_flight_reserve(group_parts(spec, 4), 8192, 8192), key=lambda r: -r.share)
    # 8,192 tokens of a step and 7 older ones may touch 2,050 pages of 4; two of them hold the window afterwards
    assert (tiny.group, tiny.most_pages, tiny.kept_pages) == ("sliding8", 2048, 3)
    assert tiny.share > 0.99 and tiny.warning.startswith("group sliding8: 100% of its bytes")
    assert (full.share, full.warning) == (0.0, "")
    assert all(r.share < 0.5 for r in in_flight_reserve(group_parts(spec, 4), 8192, 4))


@pytest.mark.parametrize("order", list(itertools.permutations(["land", "evict", "split"])))
def test_94_what_is_written_down_is_what_the_pages_held_when_it_began(order):
    """sgl-project/sglang#38480, #16946: a tree node was split, or its memory reused, while its copy was under way."""
    rig = Rig(saves=True, blocks=20)
    text = list(range(1, 18))
    rig.add("a", text, 1)
    rig.step()
    pages = dict(rig.memory.pages)
    assert rig.tiers.in_flight and not rig.cache.tables
    for event in order:
        if event == "land":
            rig.land()
            rig.tiers.poll()
        elif event == "evict":
            # others fill every page that can be had
            rig.add("b", [7] * 40, 1)
            rig.step()
        else:
            # a text that leaves the first in its third page
            rig.add("c", text[:9] + [99] * 4, 1)
            rig.step()
        rig.cache.check_invariants()
    rig.land()
    rig.tiers.poll()
    found = rig.tiers.find(Request("d", text, SamplingParams(1)))
    assert found.tokens == 16
    held = [rig.memory.slots[0, entry.slot] for entry in found.entries]
    assert held == [pages[0, page] for page in (1, 2, 3, 4)]


@pytest.mark.parametrize("seed", [0])
def test_95_a_load_never_writes_pages_that_another_request_s_copy_reads(seed):
    """LMCache#2706, #2671: loads wrote shared prefix pages that a save was reading; hidden while chunk = page."""
    rng = random.Random(5 + seed)
    for _ in range(40):
        rig = Rig(saves=True, blocks=40, host_pages=60)
        rig.copier.rng = rng
        shared = [rng.randrange(1, 90) for _ in range(56)]  # 3.5 chunks of four pages
        rig.add("first", [*shared, 1], 1)
        while rig.scheduler.has_work:
            rig.step()
        rig.land()
        for name in "ab":
            rig.add(name, shared + [ord(name)] * rng.randint(1, 9), rng.randint(1, 6))
        writes: dict[int, set] = {}
        for _ in range(60):
            rig.copier.tick()
            reads, writes = set(), set()
            for _, moves, down in rig.copier.under_way:
                (reads if down else writes).update((g, page) for g, page, _ in moves)
            assert not reads & writes
            if rig.scheduler.has_work:
                rig.step()
        assert rig.scheduler.events.counts["load"] >= 1 or seed
