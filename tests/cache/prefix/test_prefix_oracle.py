"""The same random traces through the hash chain, the radix tree, and a dict that keeps whole histories as tuples."""

import random

import pytest
from prefix_driver import CHUNK, ENTRIES, FULL, OPEN, STATE, WINDOW, Driver

from kvlab.cache.prefix import DESIGNS, EVICTIONS
from kvlab.specs.pools import POOLS

P = 4


class Oracle:
    """A pool of pages of keep-all attention, and its cache, by brute force."""

    def __init__(self, pages, eviction):
        self.pages, self.eviction, self.clock = pages, eviction, 0
        # history -> what is known of its page
        self.cached, self.held, self.private, self.meta = {}, {}, {}, {}

    def tick(self):
        self.clock += 1
        return self.clock

    def hit(self, tokens):
        n = 0
        while n + P < len(tokens) and tuple(tokens[: n + P]) in self.cached:
            n += P
        return n

    def start(self, name, tokens, priority):
        n = self.hit(tokens)
        self.held[name] = [tuple(tokens[:end]) for end in range(P, n + 1, P)]
        self.private[name], self.meta[name] = 0, [priority, False]
        for history in self.held[name]:
            page = self.cached[history]
            page["users"] += 1
            page["hits"] += 1
            page["priority"] = min(page["priority"], priority)
        return n

    def compute(self, name, tokens, end):
        wanted = -(-end // P) - len(self.held[name]) - self.private[name]
        while self.free < wanted:
            idle = [h for h, page in self.cached.items() if not page["users"]]
            del self.cached[min(idle, key=self.rank)]
        self.private[name] += max(0, wanted)
        new = []
        for stop in range(P * len(self.held[name]) + P, end + 1, P):
            history = tuple(tokens[:stop])
            self.private[name] -= 1
            if history not in self.cached:
                self.cached[history] = {"users": 0, "hits": 0, "priority": self.meta[name][0], "inserted": 0, "left": 0}
                new.append(history)
            self.cached[history]["users"] += 1
            self.cached[history]["priority"] = min(self.cached[history]["priority"], self.meta[name][0])
            self.held[name].append(history)
            self.meta[name][1] = True
        for history in reversed(new):
            self.cached[history]["inserted"] = self.tick()

    def end(self, name):
        held = self.held.pop(name)
        for history in reversed(held if self.meta[name][1] else []):
            self.cached[history]["inserted"] = self.tick()
        for history in reversed(held):
            page = self.cached[history]
            page["users"] -= 1
            page["left"] = self.tick() if not page["users"] else page["left"]
        del self.private[name], self.meta[name]

    def rank(self, history):
        page = self.cached[history]
        first = {"lfu": page["hits"], "fifo": page["inserted"], "priority": -page["priority"]}
        return first.get(self.eviction, 0), page["left"]

    @property
    def free(self):
        return self.pages - len(self.cached) - sum(self.private.values())


def random_text(rng, known):
    if known and rng.random() < 0.75:
        old = rng.choice(known)
        text = old[: rng.randint(1, len(old))] + [rng.randrange(50) for _ in range(rng.randint(0, 9))]
    else:
        text = [rng.randrange(50) for _ in range(rng.randint(1, 40))]
    known.append(text[:40])
    return text[:40]


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_both_designs_hit_and_evict_what_whole_histories_do(seed, eviction):
    rng = random.Random(seed)
    pages = [25, 40, 90][seed % 3]
    oracle = Oracle(pages, eviction)
    drivers = [Driver(design=design, num_blocks=pages + 1, eviction=eviction) for design in DESIGNS]
    live, done, known = {}, {}, []
    for i in range(80):
        text, name, priority = random_text(rng, known), str(i), rng.randint(0, 2)
        while sum(-(-len(t) // P) for t in live.values()) + -(-len(text) // P) > pages:
            gone = rng.choice(list(live))
            del live[gone]
            for one in (oracle, *drivers):
                one.end(gone)
        wanted = oracle.start(name, text, priority)
        assert [driver.start(name, text, priority=priority) for driver in drivers] == [wanted] * 2
        live[name], done[name] = text, wanted
        for one in rng.sample(sorted(live), min(len(live), 2)):
            stop = rng.randint(done[one], len(live[one]))
            oracle.compute(one, live[one], stop)
            for driver in drivers:
                driver.compute(one, stop - done[one])
            done[one] = stop
        assert [driver.histories() for driver in drivers] == [oracle.cached.keys()] * 2
        if rng.random() < 0.4:
            gone = rng.choice(list(live))
            del live[gone]
            for one in (oracle, *drivers):
                one.end(gone)
    assert drivers[0].prefix.counters == drivers[1].prefix.counters
    assert drivers[0].prefix.counters.evicted or pages == 90


class Pages:
    """Which pages of which histories a model of several groups has, by brute force, in pools without end."""

    def __init__(self, parts, unit):
        self.parts, self.unit = parts, unit
        self.units, self.states = set(), set()

    def start(self, text):
        """(tokens of the hit, tokens known at all)."""
        known = 0
        while known + self.unit < len(text) and tuple(text[: known + self.unit]) in self.units:
            known += self.unit
        n = known
        if any(part.retention.rule == "state" for part in self.parts):
            n = max((m for m in range(0, known + 1, self.unit) if not m or tuple(text[:m]) in self.states), default=0)
        return n, known


KINDS = {
    "windows": (WINDOW,), "window and full": (WINDOW, FULL), "chunks": (FULL, CHUNK), "hybrid": (FULL, STATE, STATE),
    "states": (STATE,), "compressed": (WINDOW, ENTRIES, OPEN), "all": (FULL, WINDOW, CHUNK, STATE),
}  # fmt: skip


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_hits_what_whole_histories_do_while_nothing_is_evicted(name, pools, seed):
    rng, parts = random.Random(seed + len(name)), KINDS[name]
    drivers = [Driver(*parts, design=design, num_blocks=1500, pools=pools, checked=False) for design in DESIGNS]
    unit = drivers[0].prefix.unit
    oracle, known, hits = Pages(parts, unit), [], 0
    for i in range(30):
        text = random_text(rng, known) + random_text(rng, known)[:20]
        wanted, junction = oracle.start(text)
        assert [driver.start(str(i), text) for driver in drivers] == [wanted] * 2
        for driver in drivers:
            driver.compute(str(i))
            driver.end(str(i))
        hits += wanted
        oracle.units |= {tuple(text[:n]) for n in range(unit, len(text) + 1, unit)}
        for n in (junction, (len(text) - 1) // unit * unit):
            if n > wanted:
                oracle.states.add(tuple(text[:n]))
    assert (hits > 20 or unit > 20 or seed) and not drivers[0].prefix.counters.evicted
    for driver in drivers:
        driver.manager.check_invariants()
    assert drivers[0].prefix.counters == drivers[1].prefix.counters


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("name", KINDS)
def test_both_designs_agree_under_pressure(name, pools, seed):
    """Small pools, requests that grow in turns: equal hits, equal tables, equal counters, step by step."""
    rng, parts = random.Random(seed + len(name)), KINDS[name]
    eviction = EVICTIONS[(list(KINDS).index(name) + POOLS.index(pools)) % len(EVICTIONS)]
    blocks = 8 if name == "states" else 40
    options = {"num_blocks": blocks, "pools": pools, "in_flight": 16, "eviction": eviction, "ttl": 5}
    drivers = [Driver(*parts, design=design, **options) for design in DESIGNS]
    live, known = [], []
    for i in range(30):
        for driver in drivers:
            driver.manager.tick(float(i))
        text = random_text(rng, known)
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
    assert drivers[0].prefix.counters.evicted or drivers[0].prefix.unit > 20 or seed
