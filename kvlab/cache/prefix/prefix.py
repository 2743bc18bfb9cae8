"""The prefix cache: what requests computed stays findable, page by page, until its page is needed for something else.

It stands between the manager, which owns tables and pools, and an index (`chain.py` or `radix.py`), which knows where
a history lies. What it decides is the same over both: how much of a request is a hit, what is put in, who goes first.

    match    pure: the hit of a request; its last token is never part of it, as its logits are wanted
    begin    the request stands on its hit
    advance  complete units of certain tokens are put in; where another request's page of the same history is there
             already, the request takes that one and gives its own back (two that computed it in one step: the first
             keeps its pages). Drafts are never put in: nobody is certain of them
    end      what the request held stays, and goes when it is its turn
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from kvlab.cache.pool import NULL_BLOCK
from kvlab.cache.prefix.chain import HashChain
from kvlab.cache.prefix.evicting import Evicting, Pages
from kvlab.cache.prefix.index import Column, Path
from kvlab.cache.prefix.keys import History
from kvlab.cache.prefix.options import PrefixOptions
from kvlab.cache.prefix.order import eviction_order
from kvlab.cache.prefix.radix import RadixTree
from kvlab.cache.prefix.records import Counters, Hit, Standing
from kvlab.cache.prefix.rules import GroupRule, longest_common, unit_tokens
from kvlab.specs.pools import PoolLayout


class PrefixCache(Evicting):
    """See the module's docstring.

    Args:
        options: design, eviction, which states are kept.
        layout: of the pools. pools: the pages of each group.
        slack: tokens by which windows keep pages longer, for stepping back.

    Attributes:
        unit: tokens by which histories are cut: the pages of all groups end there. Their least common multiple, it is
            long where pools are shared and pages of unlike entries are filled with as many tokens as fit, and a prompt
            that is not longer than it is never a hit.
        counters: since the start.
        on_evict: called with the numbers of pages (see `named`) and the reason before they are dropped, while the index
            still has them.
    """

    def __init__(
        self, options: PrefixOptions, layout: PoolLayout, pools: Sequence[Pages], slack: int = 0
    ) -> None:  # fmt: skip
        self.options, self.pools, self._layout = options, tuple(pools), layout
        self.unit = unit_tokens(layout.groups)
        spaces = list({id(pool): pool for pool in pools}.values())
        starts = [sum(p.num_blocks for p in spaces[:i]) for i in range(len(spaces))]
        self._spaces = list(zip(starts, spaces, strict=True))
        base = {id(pool): start for start, pool in self._spaces}
        self.columns: list[Column] = []
        self.rules = []
        for g, group in enumerate(layout.groups):
            count = 1 if group.retention.rule == "state" else self.unit // group.block_size
            first = len(self.columns)
            self.columns += [Column(g, place, base[id(pools[g])]) for place in range(count)]
            columns = tuple(range(first, first + count))
            self.rules.append(GroupRule(g, group.retention, group.block_size, columns, self.unit, slack))
        design = RadixTree if options.design == "radix" else HashChain
        size = sum(p.num_blocks for p in spaces)
        self.index = design(self.columns, options, size)
        # of each pool of units, the pages in it that nobody holds
        self.orders = [eviction_order(options, size) for _ in layout.buffers]
        self.counters, self.version, self.now = Counters(), 0, 0.0
        self.on_evict: Callable[[Sequence[int], str], None] | None = None
        self._needed = f"{options.eviction}, its place was needed"
        # pages of groups that close (`kvlab.specs.grouped`) are written again after they are full
        self._closes = any(part.kind == "closed" for group in layout.groups for part in group.parts)
        self._standing: dict[str, Standing] = {}
        self._histories: dict[str, tuple[int, History]] = {}
        self._counted: set[str] = set()
        for start, pool in self._spaces:
            units = layout.pool_of(self._group_of(pool))
            order = self.orders[units]
            pool.on_short = lambda count, pool=pool, units=units: self._give_up(pool, units, count)
            pool.on_idle = lambda pages, order=order, start=start: order.add(
                [page + start for page in pages] if start else pages, self.now
            )
            pool.on_busy = lambda pages, order=order, start=start: order.remove(
                [page + start for page in pages] if start else pages
            )

    # finding

    def match(self, request) -> Hit:
        """The hit of `request` (its request_id, tokens, num_prompt, adapter, salt, media and priority count)."""
        tokens = request.tokens
        length, history = self._histories.get(request.request_id, (0, None))
        if history is None or history.tokens is not tokens or length != len(tokens):
            history = History(tokens, self.unit, request.adapter, request.salt, request.media)
            self._histories[request.request_id] = len(tokens), history
        path = self.index.walk(history, (len(tokens) - 1) // self.unit)
        return self._hit(history, path, request.num_prompt, request.priority)

    def _hit(self, history: History, path: Path, num_prompt: int, priority: int) -> Hit:
        if not path.units:
            # most requests of a cold cache end here
            return Hit(0, ((),) * len(self.rules), {}, 0, history, path, self.version, num_prompt, priority)
        units, pages = longest_common(self.rules, path, path.units)
        tables, states = [], {}
        for rule, own in zip(self.rules, pages, strict=True):
            if rule.is_state:
                tables.append(())
                if units:
                    states[rule.group] = own[units - 1]
                continue
            # nobody else has that list
            table = own
            del table[units * len(rule.columns) :]
            dead = rule.dead(units)
            if dead:
                table[dead.start : dead.stop] = array("i", [NULL_BLOCK]) * len(dead)
            tables.append(table)
        known = path.units * self.unit
        return Hit(units * self.unit, tuple(tables), states, known, history, path, self.version, num_prompt, priority)

    def renewed(self, hit: Hit) -> Hit:
        """`hit`, looked up again if the cache has changed since.

        Raises:
            ValueError: it is no longer of that length.
        """
        if hit.version == self.version:
            return hit
        path = self.index.walk(hit.history, hit.known // self.unit)
        found = self._hit(hit.history, path, hit.num_prompt, hit.priority)
        if found.tokens != hit.tokens:
            raise ValueError(f"hit of {hit.tokens} tokens: the cache has {found.tokens} of them now, match again")
        return found

    def by_group(self, hit: Hit) -> dict[str, int]:
        """Tokens that each group could go on from if it were alone, by group name."""
        found = {}
        for rule, group in zip(self.rules, self._layout.groups, strict=True):
            pages = rule.pages(hit.path, hit.path.units)
            found[group.name] = rule.longest(pages, hit.path.units) * self.unit
        return found

    # a request's life

    def begin(self, request_id: str, hit: Hit) -> None:
        """The request stands on its hit, whose pages the caller has touched."""
        history, counters = hit.history, self.counters
        self._histories.pop(request_id, None)
        self.version += 1
        handle = self.index.lock(history, hit.path, hit.tokens // self.unit)
        standing = Standing(history, handle, hit.num_prompt, hit.priority)
        self._standing[request_id] = standing
        if self.options.junctions and hit.known > hit.tokens:
            standing.junction = hit.known
        if request_id in self._counted:
            counters.again_queries += len(history.tokens)
            counters.again_hits += hit.tokens
        else:
            self._counted.add(request_id)
            counters.requests += 1
            counters.queries += len(history.tokens)
            counters.hits += hit.tokens
        for rule, table in zip(self.rules, hit.tables, strict=True):
            pages = [hit.states[rule.group]] if rule.group in hit.states else [page for page in table if page]
            if pages:
                self._used(rule, pages, hit.priority, True)

    def _used(self, rule: GroupRule, pages: Sequence[int], priority: int, hit: bool) -> None:
        base, order = self.columns[rule.columns[0]].base, self.orders[self._layout.pool_of(rule.group)]
        if order.ranks:
            items = [page + base for page in pages]
            order.used(items, priority)
            if hit:
                order.hit(items)

    def keep_after(self, request_id: str, computed: int) -> int | None:
        """The next length above `computed` after which the request's states are to be kept for others; None: none."""
        standing = self._standing.get(request_id)
        if standing is None:
            return None
        found = [standing.junction, self.options.next_after(computed, standing.num_prompt, self.unit)]
        return min((n for n in found if n and n > computed), default=None)

    def advance(
        self, request_id: str, computed: int, tables: Sequence[array[int]], states: dict[int, int], length: int
    ) -> None:
        """Puts in the request's complete units of its first `computed` tokens.

        Args:
            tables: of the request; pages that another request has of the same history take the place of its own.
            states: for each group of states a page that is a copy of it after `length` tokens.
        """
        standing = self._standing.get(request_id)
        if standing is None or standing.handle.closed:
            return
        first, last = standing.handle.units, computed // self.unit
        if last > first and self._closes and self.index.walk(standing.history, last).units > first:
            # groups in another's pages may still be open, as who fills them has not come as far or has left: this
            # request keeps its own pages, and what follows on them is not put behind the other's
            standing.handle.closed = True
        elif last > first:
            self._insert(standing, first, last, tables, states, length)

    def _insert(self, standing: Standing, first: int, last: int, tables, states: dict[int, int], length: int) -> None:
        own = []
        for rule in self.rules:
            count = len(rule.columns)
            if rule.is_state:
                pages = array("i", [0]) * (last - first)
                if rule.group in states and first * self.unit < length <= last * self.unit:
                    pages[length // self.unit - 1 - first] = states[rule.group]
                own.append(pages)
                continue
            pages = tables[rule.group][first * count : last * count]
            own += [pages[place::count] for place in range(count)] if count > 1 else [pages]
        self.version += 1
        kept = self.index.insert(standing.handle, standing.history, own)
        standing.has_inserted = True
        for rule in self.rules:
            for column in rule.columns:
                mine, theirs = own[column], kept[column]
                if mine != theirs:
                    self._adopt(rule, first, mine, theirs, tables, self.columns[column].place)
                self._mark(rule, mine, theirs, standing.priority)

    def _adopt(self, rule: GroupRule, first: int, mine, theirs, tables, place: int) -> None:
        """Takes the pages that the index has, in place of the request's own of the same tokens."""
        if rule.is_state:
            return
        pool, table, count = self.pools[rule.group], tables[rule.group], len(rule.columns)
        for i, (old, new) in enumerate(zip(mine, theirs, strict=False)):
            if old and old != new:
                table[(first + i) * count + place] = new
                pool.touch([new])
                pool.free([old])
                self.counters.adopted += 1

    def _mark(self, rule: GroupRule, mine: array[int], pages: array[int], priority: int) -> None:
        """Notes that `pages` are cached, and that the request uses those that stand in the place of its own."""
        cached = self.pools[rule.group].cached
        new = [page for page in pages.tolist() if page and not cached[page]]
        for page in new:
            cached[page] = True
        self.counters.inserted += len(new)
        order = self.orders[self._layout.pool_of(rule.group)]
        if order.ranks:
            base = self.columns[rule.columns[0]].base
            # a page behind its window, or another's copy of a state, is not the request's: who may be idle stays so
            own = [new for old, new in zip(mine, pages, strict=False) if old and (new == old or not rule.is_state)]
            self._used(rule, own, priority, False)
            order.inserted([page + base for page in new])

    def retreat(self, request_id: str, tokens: int) -> None:
        """The request goes back to its first `tokens` tokens, the ones behind them will be others."""
        standing = self._standing.get(request_id)
        if standing:
            self.version += 1
            units = tokens // self.unit
            if units < standing.handle.units:
                self.index.retreat(standing.handle, standing.history, units)
            standing.history.cut(tokens)

    def distrust(self, request_id: str) -> int:
        """How many pages were dropped: all that are cached of the history that the request stands on, in every group,
        whoever holds them. Its numbers are not finite, and it may have read that from any of them."""
        standing = self._standing.get(request_id)
        if standing is None:
            return 0
        path = self.index.walk(standing.history, standing.handle.units)
        return sum(self._expel(rule.group, list(rule.pages(path, path.units))) for rule in self.rules)

    def end(self, request_id: str, tables: Sequence[array[int]]) -> None:
        """The request is about to give its pages back."""
        self._histories.pop(request_id, None)
        standing = self._standing.pop(request_id, None)
        if standing is None:
            return
        if standing.has_inserted and self.options.eviction == "fifo":
            for rule, table in zip(self.rules, tables, strict=True):
                base, cached = self.columns[rule.columns[0]].base, self.pools[rule.group].cached
                items = [page + base for page in table if page != NULL_BLOCK and cached[page]]
                self.orders[self._layout.pool_of(rule.group)].inserted(items)
        self.version += 1
        self.index.release(standing.handle)

    def forget(self, request_id: str) -> None:
        """The request will not come back."""
        self._counted.discard(request_id)
        self._histories.pop(request_id, None)
