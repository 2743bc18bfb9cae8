"""What the manager does with a prefix cache: requests start on pages that others computed, and leave theirs behind."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from kvlab.cache.kept import KeptStates, PageCopy
from kvlab.cache.room import Room

if TYPE_CHECKING:
    from kvlab.cache.prefix import Hit
    from kvlab.cache.tiers.marks import Marks


class Sharing(Room):
    """The sharing half of `kvlab.cache.manager.KVCacheManager`; without a prefix cache it does nothing.

    Attributes:
        snapshots: copies of states that are made for others alone, for the length of a step.
        marks: which lengths of requests lower tiers save (see `kvlab.cache.tiers.marks`); None: none on the way.
    """

    computed: dict[str, int]
    snapshots: KeptStates
    marks: Marks | None
    _cleared: dict[str, list[int]]

    def _share(self) -> None:
        """Prepares an empty manager."""
        self.snapshots = KeptStates(self.rollback, self.kept.pools, limit=0)
        self.marks = None
        self._next_state: dict[str, tuple[int, bool]] = {}
        self._to_copy: list[PageCopy] = []
        self._sources: list[tuple[int, int]] = []

    # starting on a hit

    def match(self, request) -> Hit | None:
        """What the prefix cache has of `request`: a pure look-up; None without a prefix cache."""
        return self.prefix.match(request) if self.prefix else None

    def _begin(self, request_id: str, tokens: int, hit: Hit) -> bool:
        """As `allocate`, for a request that starts on its hit: all its pages are touched before any page is taken."""
        assert self.prefix and request_id not in self.tables, f"request {request_id} has started already"
        hit = self.prefix.renewed(hit)
        idle = [sum(1 for page in table if page and not self.pools[g].references[page])
                for g, table in enumerate(hit.tables)]  # fmt: skip
        need = self._needed(request_id, tokens, False)
        need = [n - len(table) + unused for n, table, unused in zip(need, hit.tables, idle, strict=True)]
        if self._short(need):
            return False
        copied = not hit.states or self._room_for_copies(hit)
        self.prefix.begin(request_id, hit)
        for pool, table in zip(self.pools, hit.tables, strict=True):
            pool.touch(page for page in table if page)
        self.tables[request_id] = tuple(array("i", table) for table in hit.tables)
        self.computed[request_id] = hit.tokens
        self._cleared[request_id] = [rule.dead(hit.tokens // rule.unit).stop for rule in self.prefix.rules]
        for g, page in hit.states.items():
            if not copied and not self.pools[g].references[page]:
                # no room for a page beside the copy: the copy itself becomes the request's state
                self.prefix.steal(g, page)
                self.tables[request_id][g].append(page)
            else:
                self.pools[g].touch([page])
                self._sources.append((g, page))
        taken = self.allocate(request_id, tokens)
        assert taken, f"request {request_id}: pages were counted and are not there"
        for g, page in self._sources:
            if hit.states.get(g) == page and self.tables[request_id][g][0] != page:
                self._to_copy.append((g, page, self.tables[request_id][g][0]))
        return True

    def stand(self, request) -> None:
        """Lets a request whose pages came from a lower tier leave them behind like any other: from its start on."""
        if self.prefix:
            hit = self.prefix.match(request)
            none = hit._replace(tokens=0, tables=((),) * len(hit.tables), states={})
            self.prefix.begin(request.request_id, none)

    def _room_for_copies(self, hit: Hit) -> bool:
        """Whether the states of the hit can stay where they are while the request grows to its known tokens."""
        counts = self._sequence(len(hit.history.tokens), 0, hit)
        for g, page in hit.states.items():
            counts[g] += not self.pools[g].references[page]
        return not self._short(counts)

    def take_copies(self) -> list[PageCopy]:
        """The page copies to make before the next forward: states that requests start from. They are not given again,
        and until the next page is taken nobody changes their sources."""
        copies, self._to_copy = self._to_copy, []
        self._let_sources_go()
        return copies

    def _let_sources_go(self) -> None:
        sources, self._sources = self._sources, []
        for g, page in sources:
            self.pools[g].free([page])

    # leaving something behind

    @property
    def stops(self) -> bool:
        """Whether chunks may have to end at the lengths that `next_state` names."""
        return self.keeps_states or self.marks is not None

    def next_state(self, request_id: str, computed: int, num_prompt: int) -> int | None:
        """The next length above `computed` after which the request's states are copied, or lower tiers save what it
        holds: for stepping back, or for others to start from; None when there is none."""
        wanted = self.rollback.next_after(computed, num_prompt) if self.keeps_states else None
        shared = self.prefix.keep_after(request_id, computed) if self.prefix and self.keeps_states else None
        saved = self.marks.next_after(request_id, computed, num_prompt) if self.marks else None
        found = min((n for n in (wanted, shared, saved) if n is not None), default=None)
        if found is not None:
            self._next_state[request_id] = found, found == wanted
        return found

    def _is_promised(self, request_id: str, tokens: int) -> bool:
        """Whether the state after `tokens` tokens is kept for stepping back, not only for others."""
        length, wanted = self._next_state.get(request_id, (tokens, True))
        return length != tokens or wanted

    def _leave(self, request_id: str, computed: int) -> None:
        """Puts complete units of certain tokens into the prefix cache, and the state where it was copied just now."""
        if self._sources:
            self._to_copy.clear()
            self._let_sources_go()
        if self.prefix:
            states = self.kept.newest(request_id, computed) or self.snapshots.newest(request_id, computed)
            self.prefix.advance(request_id, computed, self.tables[request_id], states, computed)
        if self.kept.pools:
            self.snapshots.drop_after(request_id)

    def tick(self, now: float) -> int:
        """Cached pages dropped because nobody used them for too long; `now` is the time from here on."""
        return self.prefix.expire(now) if self.prefix else 0

    def forget(self, request_id: str) -> None:
        """The request has ended: no count of it is kept either."""
        self._next_state.pop(request_id, None)
        if self.prefix:
            self.prefix.forget(request_id)

    # stepping back

    def _unshare(self, request_id: str, start: int) -> tuple[PageCopy, ...] | None:
        """The copies that give the request pages of its own to go on writing behind `start` tokens, where others may
        find the pages it has; None when there is no room for them."""
        found = []
        for g, group in enumerate(self.groups):
            i, table, pool = start // group.block_size, self.tables[request_id][g], self.pools[g]
            if (
                group.retention.rule != "state"
                and start % group.block_size
                and i < len(table)
                and (pool.cached[table[i]] or pool.references[table[i]] > 1)
            ):
                found.append((g, i))
        counts = [sum(g == own for own, _ in found) for g in range(len(self.groups))]
        if self._short(counts):
            return None
        self.make_room(counts)
        copies = []
        for g, i in found:
            table = self.tables[request_id][g]
            copies.append((g, table[i], self.pools[g].allocate(1)[0]))
            table[i] = copies[-1][2]
        for g, old, _ in copies:
            self.pools[g].free([old])
        return tuple(copies)
