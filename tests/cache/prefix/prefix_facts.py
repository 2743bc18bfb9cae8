"""The prefix cache by brute force: a set of facts (group, history, page), nothing found by hashing, walking or runs.

A fact is a page whose tokens and all before them are known by text. A hit is the longest cut of a prompt at which every
group has the pages that its next query reads, tried one by one. Facts that nobody holds go when their pool is short, the
lowest of all by the rule of the policy, looked for among all of them.
"""

from itertools import count


def cdiv(a, b):
    return -(-a // b)


class Page:
    """A page: who holds it, and what it is known as. `fact`: (group, history, index of the page in its table)."""

    def __init__(self, pool):
        self.pool, self.users, self.fact = pool, 1, None
        self.hits = self.inserted = self.left = 0
        self.priority, self.since = None, 0.0


class Sequence:
    """A live request: pages by group and position, None where nothing is held, and how far it is in the cache."""

    def __init__(self, text, num_prompt, priority, groups):
        self.text, self.num_prompt, self.priority = text, num_prompt, priority
        self.tables = [[] for _ in groups]
        self.computed = self.put_in = self.junction = 0
        self.has_inserted = False


class Facts:
    """Pools of pages, live requests and what can be found.

    Args:
        layout: groups with their retention and tokens per page, and which of them share a pool.
        pages: in each pool. unit: tokens at whose multiples histories are cut. in_flight: tokens of a step at most.
    """

    def __init__(self, layout, pages, unit, in_flight, eviction, ttl):
        self.groups, self.pool_of, self.pages, self.unit = layout.groups, layout.pool_of, pages, unit
        self.in_flight, self.eviction, self.ttl = in_flight, eviction, ttl
        self.states = [g for g, group in enumerate(self.groups) if group.retention.rule == "state"]
        self.known, self.live, self.existing, self.sources = {}, {}, set(), []
        self.clock, self.now = count(1), 0.0
        self.evicted = self.inserted = self.adopted = 0

    # what can be found

    def needed(self, g, n):
        """Indices of the pages of group `g` that a query at position `n` reads."""
        rule, size = self.groups[g].retention, self.groups[g].block_size
        first = {"window": n - rule.size + 1, "chunk": n // rule.size * rule.size if rule.size else 0}.get(rule.rule, 0)
        return [i for i in range(self.width(g, n)) if (i + 1) * size > first]

    def width(self, g, n):
        """Entries of a table of `n` tokens."""
        rule, size = self.groups[g].retention, self.groups[g].block_size
        if rule.rule == "state":
            return min(n, 1)
        return cdiv(n // rule.size, size // rule.size) if rule.rule == "stride" else cdiv(n, size)

    def name(self, g, text, i):
        """The fact that page `i` of group `g` would be: whole units of text."""
        end = (i * self.groups[g].block_size // self.unit + 1) * self.unit
        return g, tuple(text[:end]), i

    def facts(self, g, text, n):
        """What group `g` needs to go on behind the first `n` tokens; None where a fact is missing."""
        names = [(g, tuple(text[:n]), 0)] if g in self.states else [self.name(g, text, i) for i in self.needed(g, n)]
        found = [self.known.get(name) for name in names]
        return None if None in found else dict(zip(names, found, strict=True))

    def hit(self, text):
        """The tokens of the hit of `text`."""
        cuts = range((len(text) - 1) // self.unit * self.unit, 0, -self.unit)
        return next((n for n in cuts if all(self.facts(g, text, n) is not None for g in range(len(self.groups)))), 0)

    def remembered(self, text):
        """Tokens of `text` that some fact begins with, or a request that put them in."""
        histories = [history for _, history, _ in self.known]
        histories += [tuple(live.text[: live.put_in * self.unit]) for live in self.live.values()]
        cuts = range((len(text) - 1) // self.unit * self.unit, 0, -self.unit)
        return next((n for n in cuts if any(h[:n] == tuple(text[:n]) for h in histories)), 0)

    # a request's life

    def start(self, name, text, priority):
        n, known = self.hit(text), self.remembered(text)
        live = Sequence(text, len(text), priority, self.groups)
        live.computed, live.put_in, live.junction = n, n // self.unit, known if known > n else 0
        found = [self.facts(g, text, n) if n else {} for g in range(len(self.groups))]
        room = self.has_room_beside(text, found)
        for facts in found:
            for page in facts.values():
                page.hits += 1
                page.priority = min(page.priority, priority)
        for g, facts in enumerate(found):
            if g in self.states:
                continue
            live.tables[g] = [None] * (self.width(g, n) - len(facts)) + list(facts.values())
            for page in facts.values():
                page.users += 1
        for g in self.states if n else ():
            [page] = found[g].values()
            if room or page.users:
                page.users += 1
                self.sources.append(page)
            else:
                # no room for a page beside the copy: it becomes the request's own
                del self.known[page.fact]
                page.fact, page.users = None, 1
                live.tables[g].append(page)
        self.live[name] = live
        self.grow(live, n)
        return n

    def has_room_beside(self, text, found):
        """Whether the whole sequence fits without the pages of the states that it starts from."""
        need = [0] * len(self.pages)
        for g, group in enumerate(self.groups):
            most, size = self.width(g, len(text)), group.block_size
            if group.retention.rule in ("window", "chunk"):
                span = min(group.retention.size - 1 + self.in_flight, len(text))
                most = min(most, cdiv(span - 1, size) + 1)
            if g in self.states:
                most += sum(not page.users for page in found[g].values())
            else:
                most -= sum(page.users > 0 for page in found[g].values())
            need[self.pool_of(g)] += max(0, most)
        idle = [sum(p.pool == pool and not p.users for p in self.existing) for pool in range(len(self.pages))]
        return all(n <= self.free(pool) + idle[pool] for pool, n in enumerate(need))

    def compute(self, name, end):
        live = self.live[name]
        while live.computed < end:
            keep = self.next_kept(live) if self.states else None
            stop = min(end, keep or end)
            self.grow(live, stop)
            copies = {}
            if stop == keep and self.make_room([int(g in self.states) for g in range(len(self.groups))]):
                copies = {g: self.take(g) for g in self.states}
            while self.sources:
                self.give_back([self.sources.pop(0)])
            live.computed = stop
            self.put_in(live, copies)
            for page in copies.values():
                self.give_back([page])
            for g, table in enumerate(live.tables):
                if self.groups[g].retention.rule in ("window", "chunk"):
                    dead = range(min(len(table), min(self.needed(g, stop), default=len(table))))
                    self.give_back([table[i] for i in dead if table[i]])
                    table[: len(dead)] = [None] * len(dead)

    def next_kept(self, live):
        """The next length after which a state is kept: where it left what was known, and the prompt's last unit."""
        lengths = [live.junction, (live.num_prompt - 1) // self.unit * self.unit]
        return min((n for n in lengths if n > live.computed), default=None)

    def put_in(self, live, copies):
        """Complete units become facts; pages of facts that were there already take the place of the request's own."""
        units = live.computed // self.unit
        if units == live.put_in:
            return
        for g, group in enumerate(self.groups):
            per_unit = 1 if g in self.states else self.unit // group.block_size
            for place in range(per_unit):
                new = []
                for i in range(live.put_in * per_unit + place, units * per_unit, per_unit):
                    if g not in self.states:
                        new += self.enter(live, g, self.name(g, live.text, i), live.tables[g], i)
                    elif g in copies and (i + 1) * self.unit == live.computed:
                        copy = [copies[g]]
                        new += self.enter(live, g, (g, tuple(live.text[: live.computed]), 0), copy, 0)
                        copies[g] = copy[0]
                for page in reversed(new):
                    page.inserted = next(self.clock)
        live.put_in, live.has_inserted = units, True

    def enter(self, live, g, fact, table, i):
        """[the page that is a fact from now on], or [] where there is none or the fact was known."""
        page, other = table[i], self.known.get(fact)
        if page is None:
            return []
        if other is None:
            page.fact, self.known[fact], page.priority = fact, page, live.priority
            self.inserted += 1
            return [page]
        if g in self.states:
            # its own copy goes back, and it has no part in the other
            return []
        other.priority = min(other.priority, live.priority)
        if other is not page:
            table[i] = other
            other.users += 1
            self.give_back([page])
            self.adopted += 1
        return []

    def end(self, name):
        live = self.live.pop(name)
        if live.has_inserted:
            for table in live.tables:
                for page in reversed([page for page in table if page and page.fact]):
                    page.inserted = next(self.clock)
        for table in live.tables:
            self.give_back([page for page in table if page])

    def tick(self, now):
        self.now = now
        if self.eviction == "ttl":
            for page in [p for p in self.existing if not p.users and now - p.since >= self.ttl]:
                self.evict(page)

    # pages

    def free(self, pool):
        return self.pages[pool] - sum(page.pool == pool for page in self.existing)

    def grow(self, live, tokens):
        counts = [self.width(g, tokens) - len(table) for g, table in enumerate(live.tables)]
        assert self.make_room(counts)
        for g, n in enumerate(counts):
            live.tables[g] += [self.take(g) for _ in range(n)]

    def make_room(self, counts):
        """Whether so many pages of each group are free now; the lowest facts nobody holds went for them."""
        need = [0] * len(self.pages)
        for g, n in enumerate(counts):
            need[self.pool_of(g)] += max(0, n)
        idle = [[p for p in self.existing if p.pool == pool and not p.users] for pool in range(len(need))]
        if any(n > self.free(pool) + len(idle[pool]) for pool, n in enumerate(need)):
            return False
        for pool, n in enumerate(need):
            for page in sorted(idle[pool], key=self.rank)[: max(0, n - self.free(pool))]:
                self.evict(page)
        return True

    def rank(self, page):
        first = {"lfu": page.hits, "fifo": page.inserted, "priority": -page.priority}
        return first.get(self.eviction, 0), page.left

    def evict(self, page):
        self.existing.remove(page)
        del self.known[page.fact]
        self.evicted += 1

    def take(self, g):
        page = Page(self.pool_of(g))
        self.existing.add(page)
        return page

    def give_back(self, pages):
        """One holder fewer; of a sequence its end leaves first."""
        for page in reversed(pages):
            page.users -= 1
            if not page.users and page.fact is None:
                self.existing.remove(page)
            elif not page.users:
                page.left, page.since = next(self.clock), self.now
