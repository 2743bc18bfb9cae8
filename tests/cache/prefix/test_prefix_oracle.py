"""The same random traces through the hash chain, the radix tree, and a set of facts that is searched by brute force."""

import random
from array import array

import pytest
from prefix_driver import BF16, CHUNK, FULL, OPEN, STATE, WINDOW, Driver
from prefix_facts import Facts

from kvlab.cache.prefix import DESIGNS, EVICTIONS
from kvlab.schedule import Request, SamplingParams
from kvlab.specs.parts import CompressedEntries, IndexKeys, MLALatent

LATENT, INDEX, ENTRIES = MLALatent(24, 8, BF16), IndexKeys(16, BF16), CompressedEntries(4, 64, BF16)
KINDS = {
    "full": (FULL,), "latents": (LATENT, INDEX, LATENT), "windows": (WINDOW,), "window and full": (WINDOW, FULL),
    "chunks": (FULL, CHUNK), "hybrid": (FULL, STATE, STATE), "states": (STATE,), "latents and states": (LATENT, STATE),
    "compressed": (WINDOW, ENTRIES, OPEN), "all": (FULL, WINDOW, CHUNK, STATE),
}  # fmt: skip


class Trace:
    """Random requests that start, compute in turns and end, on both designs and on facts; all are compared each time."""

    def __init__(self, seed, name, pools, eviction, room):
        """`room`: pages of each pool, in those that the longest request takes."""
        self.rng = random.Random(f"{seed}{name}{pools}{eviction}")
        options = {"pools": pools, "in_flight": 16, "eviction": eviction, "ttl": 7.0, "checked": False}
        layout, self.unit = self.layout_of(KINDS[name], options)
        pages = [int(room * n) + 3 for n in layout.units(layout.sequence_pages(self.longest, 16))]
        blocks = [n + 1 for n in pages]
        self.drivers = [Driver(*KINDS[name], design=design, num_blocks=blocks, **options) for design in DESIGNS]
        self.manager = self.drivers[0].manager
        self.facts = Facts(layout, pages, self.unit, 16, eviction, 7.0)
        # text and computed tokens of live requests, all texts so far
        self.live, self.texts, self.hits = {}, [], 0

    @staticmethod
    def layout_of(parts, options):
        driver = Driver(*parts, **options)
        return driver.manager.layout, driver.prefix.unit

    @property
    def longest(self):
        """Tokens of the longest request: ten units of one page each, fewer of longer ones."""
        return max(40, 5 * self.unit)

    def text(self):
        """A new text, or the beginning of an old one, or all of it, and something else."""
        rng, most = self.rng, self.longest
        new = [rng.randrange(50) for _ in range(rng.randint(1, most))]
        if self.texts and rng.random() < 0.75:
            old = rng.choice(self.texts)
            new = (old[: rng.choice([len(old), rng.randint(1, len(old))])] + new[: rng.randint(0, most // 4)])[:most]
        self.texts.append(new)
        return new

    def step(self, i):
        for driver in self.drivers:
            driver.manager.tick(float(i))
        self.facts.tick(float(i))
        rng, text, name = self.rng, self.text(), str(i)
        while self.live and (len(self.live) > 2 or not self.has_room(text)):
            self.end_one()
        started = [driver.start(name, text, priority=i % 3) for driver in self.drivers]
        assert started == [self.facts.start(name, text, i % 3)] * 2
        self.hits += started[0]
        self.live[name] = text, started[0]
        for one in rng.sample(sorted(self.live), min(len(self.live), 2)):
            self.compute(one)
        if rng.random() < 0.3:
            self.end_one()
        self.compare()

    def has_room(self, text):
        hit = self.manager.match(Request("probe", text, SamplingParams()))
        return self.manager.has_room(len(text), hit=hit)

    def compute(self, name):
        text, done = self.live[name]
        stop = min(len(text), done + self.rng.randint(0, 16))
        if not self.manager.missing(name, stop):
            for driver in self.drivers:
                driver.compute(name, stop - done)
            self.facts.compute(name, stop)
            self.live[name] = text, stop
            self.compare()

    def end_one(self):
        gone = self.rng.choice(sorted(self.live))
        del self.live[gone]
        for one in (*self.drivers, self.facts):
            one.end(gone)

    def compare(self):
        """Both designs know what the facts know, and texts hit as much in them; requests hold as many pages."""
        for driver in self.drivers:
            assert known(driver) == set(self.facts.known)
        for text in self.rng.sample(self.texts, min(4, len(self.texts))):
            request = Request("probe", text, SamplingParams())
            assert [driver.manager.match(request).tokens for driver in self.drivers] == [self.facts.hit(text)] * 2
        tables = {
            name: [[bool(page) for page in table] for table in live.tables] for name, live in self.facts.live.items()
        }
        for driver in self.drivers:
            assert tables == {n: [[bool(page) for page in t] for t in own] for n, own in driver.manager.tables.items()}
        assert self.drivers[0].manager.tables == self.drivers[1].manager.tables

    def finish(self):
        for driver in self.drivers:
            driver.manager.check_invariants()
            counters, facts = driver.prefix.counters, self.facts
            found = (counters.evicted, counters.inserted, counters.adopted, counters.hits)
            assert found == (facts.evicted, facts.inserted, facts.adopted, self.hits)
        assert self.drivers[0].prefix.counters == self.drivers[1].prefix.counters


def known(driver):
    """What the index of a design knows, as names of facts."""
    prefix, found = driver.prefix, set()
    for _, history, column in prefix.index.entries():
        group, tokens = prefix.columns[column].group, tuple(array("i", history))
        rule = prefix.rules[group]
        before = 0 if rule.is_state else (len(tokens) // prefix.unit - 1) * len(rule.columns)
        found.add((group, tokens, before + prefix.columns[column].place))
    return found


@pytest.mark.parametrize("seed", [7])
@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("pools", ["per_kind", "unified"])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_hits_and_evicts_what_facts_do(name, pools, eviction, seed):
    """Pools too small for what was computed."""
    trace = Trace(seed, name, pools, eviction, 1.7)
    for i in range(50):
        trace.step(i)
    trace.finish()
    assert trace.facts.evicted >= 10 or seed != 7


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("name", KINDS)
def test_in_shared_sectors_every_kind_hits_what_facts_do_while_nothing_is_evicted(name, seed):
    trace = Trace(seed, name, "sectors", "lru", 99)
    for i in range(30):
        trace.step(i)
    trace.finish()
    assert (trace.hits > 10 or seed) and not trace.facts.evicted


@pytest.mark.parametrize("name", KINDS)
def test_in_shared_sectors_both_designs_agree_under_pressure(name):
    """Equal hits, equal tables, equal counters, step by step; which sectors are free is not for facts to know."""
    rng, eviction = random.Random(len(name)), EVICTIONS[list(KINDS).index(name) % len(EVICTIONS)]
    options = {
        "num_blocks": 9 if name == "states" else 40,
        "pools": "sectors",
        "in_flight": 16,
        "eviction": eviction,
        "ttl": 5,
    }
    drivers = [Driver(*KINDS[name], design=design, **options) for design in DESIGNS]
    live, texts = [], [[rng.randrange(50) for _ in range(40)] for _ in range(9)]
    for i in range(30):
        for driver in drivers:
            driver.manager.tick(float(i))
        text = rng.choice(texts)[: rng.randint(1, 40)] + [i] * rng.randint(0, 9)
        started = [driver.start(str(i), text, priority=i % 3) for driver in drivers]
        assert started[0] == started[1]
        if started[0] is not None:
            live.append(str(i))
            for driver in drivers:
                driver.compute(str(i), min(16, len(text) - started[0]))
        while live and (started[0] is None or len(live) > 2 or rng.random() < 0.3):
            gone = live.pop(rng.randrange(len(live)))
            for driver in drivers:
                driver.end(gone)
            if started[0] is None and len(live) < 2:
                break
        assert drivers[0].manager.tables == drivers[1].manager.tables
    assert drivers[0].prefix.counters == drivers[1].prefix.counters
    assert drivers[0].prefix.counters.evicted
