"""The cache manager: one block table per request and group, pages taken and given back by retention.

Groups (see `kvlab.specs.layout.Group`) are parts of equal retention. A page id addresses that page in the buffer of
each of the group's layers; which pool the ids come from is the pool policy's affair (`kvlab.specs.pools`). A table
only grows at its end; entries that no later query reads become null when `advance` is told how far the sequence is
certain. A state has a table of one entry.

    request -> allocate(tokens)   pages so that the first `tokens` tokens have slots, in every group or in none
            -> advance(computed)  tokens up to here are certain: pages behind a window go back
            -> truncate(tokens)   back to an earlier length, exactly, or an error
            -> free()             everything goes back

With a prefix cache a request may start on the pages of others: match(request) -> Hit, allocate(..., hit=hit).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.cache.check import check_invariants
from kvlab.cache.drafts import Drafts
from kvlab.cache.kept import KeptStates, PageCopy
from kvlab.cache.pins import Pins
from kvlab.cache.pool import NULL_BLOCK, BlockPool
from kvlab.cache.prefix import Hit, PrefixCache, PrefixOptions
from kvlab.cache.sectors import SectorPages
from kvlab.cache.sharing import Sharing
from kvlab.specs.layout import Group
from kvlab.specs.pages import PAGED_RULES, cdiv, dead_pages, table_pages
from kvlab.specs.pools import PoolLayout, lay_out
from kvlab.specs.rollback import NOTHING_KEPT, RollbackPolicy


@dataclass(frozen=True)
class Restart:
    """Where a request goes on after it was cut back: `computed` tokens are in the cache once `copies` are made."""

    computed: int
    copies: tuple[PageCopy, ...] = ()


class KVCacheManager(Sharing):
    """Block tables of all live requests.

    Args:
        layout: what `kvlab.specs.pools.pool_layout` returns; groups alone get a pool each.
        num_blocks: units of each pool, the null unit included.
        in_flight: the most tokens of one request that one step may add.
        order: for tests and experiments, the order in which each pool hands out its units at first.
        rollback: what is kept for stepping back.
        prefix: how prefixes are cached; None: they are not.

    Raises:
        ValueError: a retention rule without a block table, a pool too small, or steps back promised for states of
            which no copies are made.
    """

    def __init__(
        self,
        layout: PoolLayout | Sequence[Group],
        num_blocks: Sequence[int],
        in_flight: int,
        order: Sequence[Sequence[int] | None] | None = None,
        rollback: RollbackPolicy = NOTHING_KEPT,
        prefix: PrefixOptions | None = None,
    ) -> None:
        self.layout = layout if isinstance(layout, PoolLayout) else lay_out(layout)
        self.groups, self.rollback = self.layout.groups, rollback
        for group in self.groups:
            if group.retention.rule not in PAGED_RULES:
                raise ValueError(f"group {group.name}: retention {group.retention.rule!r} is not in the engine yet")
        self.in_flight = in_flight
        num_pools = len(self.layout.buffers)
        self.unit_pools = [BlockPool(n, o) for n, o in zip(num_blocks, order or [None] * num_pools, strict=True)]
        self.pools = tuple(map(self._pool, range(len(self.groups))))
        self.tables: dict[str, tuple[array[int], ...]] = {}
        # tokens of each request that are certain; per group, table entries (behind the sinks) that are null already
        self.computed: dict[str, int] = {}
        self._cleared: dict[str, list[int]] = {}
        rules = [group.retention.rule for group in self.groups]
        # of each group, tokens that one entry of a table surely has a place for; a state has it for all
        self._reach = [2**62 if g.retention.rule == "state" else g.block_size for g in self.groups]
        self._sliding = [g for g, rule in enumerate(rules) if rule in ("window", "chunk")]
        rollback.check(
            [f"group {group.name}" for group, rule in zip(self.groups, rules, strict=True) if rule == "state"]
        )
        self.kept = KeptStates(self.rollback, {g: self.pools[g] for g, rule in enumerate(rules) if rule == "state"})
        self.prefix = PrefixCache(prefix, self.layout, self.pools, rollback.slack) if prefix else None
        self._share()
        self.drafts = Drafts(self)
        # pages that copies to or from a lower tier are reading or writing
        self.pins = Pins(self.pools)

    def _pool(self, group: int) -> BlockPool | SectorPages:
        units = self.unit_pools[self.layout.pool_of(group)]
        return SectorPages(units, self.layout.pages_per_unit[group]) if self.layout.policy == "sectors" else units

    # pages taken and given back

    def allocate(self, request_id: str, tokens: int, keep_state: bool = False, hit: Hit | None = None) -> bool:
        """Whether the request's first `tokens` tokens now have slots in every group; takes nothing when they cannot.

        Pages behind a window are not given to a request that starts late: the tokens of one step are computed
        together, so they all need slots. With `keep_state` a page for a copy of the state after `tokens` tokens is
        taken too, the oldest copy going when the policy allows no more; a copy that only others would start from is
        not made when there is no room. A new request starts on its `hit`.
        """
        if hit is not None:
            return self._begin(request_id, tokens, hit)
        if not keep_state and self._has_slots(request_id, tokens):
            # nearly every decode
            return True
        promised = keep_state and self._is_promised(request_id, tokens)
        needed = self._needed(request_id, tokens, promised)
        if self._short(needed):
            return False
        self.make_room(needed)
        if request_id not in self.tables:
            self.tables[request_id] = tuple(array("i") for _ in self.groups)
            self.computed[request_id], self._cleared[request_id] = 0, [0] * len(self.groups)
        for group, pool, table in zip(self.groups, self.pools, self.tables[request_id], strict=True):
            new = table_pages(group.retention, group.block_size, tokens) - len(table)
            if new > 0:
                table.extend(pool.allocate(new))
        if promised:
            self.kept.take(request_id, tokens)
        elif keep_state and not self._short(one := [int(g in self.kept.pools) for g in range(len(self.groups))]):
            self.make_room(one)
            self.snapshots.take(request_id, tokens)
        return True

    def advance(self, request_id: str, computed: int) -> int:
        """Pages given back now that the request's first `computed` tokens are certain (processed, not to be undone)."""
        self.computed[request_id] = computed
        self._leave(request_id, computed)
        if not self._sliding:
            return 0
        given_back = 0
        tables, cleared = self.tables[request_id], self._cleared[request_id]
        certain = max(0, computed - self.rollback.slack)
        for g in self._sliding:
            group = self.groups[g]
            dead = dead_pages(group.retention, group.block_size, certain)
            start = max(cleared[g], dead.start)
            if start >= dead.stop:
                continue
            pages = tables[g][start : dead.stop]
            tables[g][start : dead.stop] = array("i", [NULL_BLOCK]) * len(pages)
            self.pools[g].free(pages)
            cleared[g] = dead.stop
            given_back += len(pages)
        return given_back

    def free(self, request_id: str, distrust: bool = False) -> int:
        """Pages given back by forgetting the request; 0 when it holds none. With `distrust` nobody finds them again."""
        if self.prefix and distrust:
            self.prefix.distrust(request_id)
        given_back = self.kept.drop_after(request_id) + self.drafts.drop(request_id)
        self.snapshots.drop_after(request_id)
        if self.prefix:
            self.prefix.end(request_id, self.tables.get(request_id, ()))
        for pool, table in zip(self.pools, self.tables.pop(request_id, ()), strict=False):
            pool.free(table)
            given_back += len(table) - table.count(NULL_BLOCK)
        self.computed.pop(request_id, None)
        self._cleared.pop(request_id, None)
        return given_back

    def copies_for(self, request_id: str, tokens: int) -> tuple[PageCopy, ...]:
        """The page copies that keep the state now that the request has `tokens` tokens; () when none is to be kept."""
        tables = self.tables[request_id]
        kept = self.kept.copies(request_id, tokens, tables, restore=False)
        return kept or self.snapshots.copies(request_id, tokens, tables, restore=False)

    # back to an earlier length

    def truncate(self, request_id: str, tokens: int) -> Restart:
        """Where the request goes on after it was cut back to its first `tokens` tokens.

        What it holds then is what a fresh sequence of `Restart.computed` tokens holds, once the copies are made. That
        is fewer than `tokens` where a state goes back to its newest copy: the tokens between are to be computed again.

        Raises:
            ValueError: longer than what is computed; pages behind a window that the shorter sequence needs went back;
                no copy of a state is old enough. Nothing has changed then.
        """
        computed, tables = self.computed[request_id], self.tables[request_id]
        if not 0 <= tokens <= computed:
            raise ValueError(f"tokens {tokens}: must be from 0 to the {computed} that request {request_id} has")
        stale = self._stale(computed, tokens)
        try:
            start = self._restart(request_id, tokens, stale)
        except ValueError:
            # a hit brought no more of the past than going on needs: a promise is kept from the beginning
            if not (self.prefix and self.rollback.tokens):
                raise
            self.free(request_id)
            return Restart(0)
        self.kept.drop_after(request_id, start)
        copies = self.kept.copies(request_id, start, tables, restore=True) if stale else ()
        self._cut(request_id, start)
        self.computed[request_id] = start
        if self.prefix:
            self.prefix.retreat(request_id, start)
            own = self._unshare(request_id, start)
            if own is None:
                self.free(request_id)
                return Restart(0)
            copies += own
        return Restart(start, copies)

    def _cut(self, request_id: str, tokens: int) -> None:
        """Gives back the pages behind the request's first `tokens` tokens."""
        for group, pool, table in zip(self.groups, self.pools, self.tables[request_id], strict=True):
            keep = table_pages(group.retention, group.block_size, tokens)
            pool.free(table[keep:])
            del table[keep:]

    def _restart(self, request_id: str, tokens: int, stale: str) -> int:
        """The longest length up to `tokens` from which the request can go on."""
        start = tokens
        if stale:
            lengths = [n for n in self.kept.lengths(request_id) if n <= tokens]
            # no tokens, no state: that copy costs nothing
            lengths += [0] if self.rollback.checkpoint_tokens or not tokens else []
            if not lengths:
                raise ValueError(
                    f"tokens {tokens}: group {stale} has seen {self.computed[request_id]} tokens, and no copy of it "
                    f"after {tokens} or fewer was kept"
                )
            start = max(lengths)
        for g in self._sliding:
            group, cleared = self.groups[g], self._cleared[request_id][g]
            if dead_pages(group.retention, group.block_size, start).stop < cleared:
                gone = cleared * group.block_size
                raise ValueError(f"tokens {tokens}: group {group.name} gave back its pages of the first {gone} tokens")
        return start

    def _stale(self, computed: int, tokens: int) -> str:
        """The name of a state group whose state after `computed` tokens does not serve after `tokens`; "" if none."""
        for g in self.kept.pools:
            if max((part.earliest(computed) for part in self.groups[g].parts), default=0) > tokens:
                return self.groups[g].name
        return ""

    # reading

    def block_table(self, request_id: str, group: int = 0) -> array[int]:
        """The request's table in that group: page ids by position, 0 where nothing is held. Not to be changed."""
        return self.tables[request_id][group]

    def slot_mapping(self, request_id: str, start: int, end: int, group: int = 0) -> list[int]:
        """Slots (page * block_size + offset) of the tokens at positions start .. end - 1.

        Where a token has no slot of its own, in states and in entries of several tokens, all are -1.

        Raises:
            ValueError: a position whose page was given back or never taken.
        """
        if self.groups[group].retention.rule in ("stride", "state"):
            return [-1] * (end - start)
        table, size = self.tables[request_id][group], self.groups[group].block_size
        if end > len(table) * size or (start < end and NULL_BLOCK in table[start // size : cdiv(end, size)]):
            raise ValueError(f"positions {start} to {end}: not all have a page in request {request_id}")
        return [table[i // size] * size + i % size for i in range(start, end)]

    def check_invariants(self) -> None:
        """Asserts the invariants of tables and pools: see `kvlab.cache.check`.

        Raises:
            AssertionError: names the group and the block.
        """
        check_invariants(self)
