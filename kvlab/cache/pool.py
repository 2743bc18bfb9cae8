"""The block pool: page ids, how many tables hold each, and the list of free ones.

Invariants:
    block 0 is the null block: never free, never handed out, never freed; tables put it where nothing is held;
    a block is in the free list exactly when its reference count is 0 and the prefix cache has no use for it;
    free + idle + held = num_blocks - 1, where idle blocks are cached and nobody holds them.

The free list is a stack: what was freed last is taken first. Idle blocks are not in it: the prefix cache has them in the
order in which it gives them up (`kvlab.cache.prefix.order`), so nothing is ever taken out of the stack's middle.
Source: vLLM v1/core/block_pool.py, whose doubly linked list also holds idle blocks; it differs further by counting down
with a check, so a double free fails where it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

NULL_BLOCK = 0


class BlockPool:
    """Page ids 1 .. num_blocks - 1, handed out one by one; 0 is the null block.

    What it counts are its units: here pages themselves (see `kvlab.cache.sectors` for pages cut from larger units).

    Args:
        num_blocks: pages in the pool, the null page included.
        order: the order in which free blocks are handed out at first; every id from 1 exactly once.

    Raises:
        ValueError: fewer than 2 blocks, or `order` is not a permutation of 1 .. num_blocks - 1.
    """

    pages_per_unit = 1

    def __init__(self, num_blocks: int, order: Sequence[int] | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks {num_blocks}: must be at least 2, the null block and one that holds tokens")
        if order is None:
            order = range(1, num_blocks)
        elif sorted(order) != list(range(1, num_blocks)):
            raise ValueError(f"order: must hold every block id from 1 to {num_blocks - 1} once")
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        # blocks that the prefix cache can find, and how many of them nobody holds
        self.cached, self.num_idle = [False] * num_blocks, 0
        self.on_free: Callable[[list[int]], None] | None = None
        self.on_idle: Callable[[list[int]], None] | None = None
        self.on_busy: Callable[[list[int]], None] | None = None
        # asked to give up idle blocks until so many are free
        self.on_short: Callable[[int], None] | None = None
        # the next to be handed out is the last
        self._free = list(order)[::-1]

    @property
    def units(self) -> BlockPool:
        """The pool that units come from: itself."""
        return self

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    @property
    def num_open(self) -> int:
        """Free pages inside held units: none, a unit is one page."""
        return 0

    @property
    def num_held(self) -> int:
        """Blocks that at least one table holds."""
        return self.num_blocks - 1 - self.num_free - self.num_idle

    @property
    def num_spare(self) -> int:
        """Free and idle pages inside units that are held anyway: none, a unit is one page."""
        return 0

    @property
    def num_quiet(self) -> int:
        """Held units without a page that anybody holds: idle pages."""
        return self.num_idle

    def allocate(self, count: int) -> list[int]:
        """`count` free blocks, taken from the front of the free list, each with one reference.

        Raises:
            ValueError: fewer than `count` blocks are free; none is taken then.
        """
        if count > self.num_free and self.on_short:
            self.on_short(count)
        if count > self.num_free:
            raise ValueError(f"count {count}: only {self.num_free} blocks are free")
        rest, references = self.num_free - count, self.references
        blocks = self._free[rest:]
        blocks.reverse()
        del self._free[rest:]
        for block in blocks:
            references[block] = 1
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each block, which is held or idle; an idle one is held from now on."""
        references, cached, busy = self.references, self.cached, []
        for block in blocks:
            assert block != NULL_BLOCK, "the null block is not counted"
            if not references[block]:
                assert cached[block], f"block {block} is free: nobody can touch it"
                busy.append(block)
            references[block] += 1
        self.num_idle -= len(busy)
        if busy and self.on_busy:
            self.on_busy(busy)

    def free(self, blocks: Sequence[int]) -> None:
        """Drops one reference per listed block; null blocks are skipped.

        The list is walked backwards and each block that nobody holds any more goes to the front of the free list:
        the next request gets the same pages in the same order, still warm in the processor's cache. Cached blocks
        become idle instead, the last one first.
        """
        released, idle = [], []
        references, cached = self.references, self.cached
        for block in reversed(blocks):
            if block != NULL_BLOCK:
                left = references[block] - 1
                assert left >= 0, f"block {block} is freed more often than it was taken"
                references[block] = left
                if not left:
                    (idle if cached[block] else released).append(block)
        self._free += released
        self.num_idle += len(idle)
        if idle and self.on_idle:
            self.on_idle(idle)
        if released and self.on_free:
            self.on_free(released)

    def uncache(self, blocks: Sequence[int]) -> None:
        """The prefix cache has no more use for the blocks; those that nobody holds are free, and the next to be taken."""
        released, references, cached = [], self.references, self.cached
        for block in blocks:
            cached[block] = False
            if not references[block]:
                released.append(block)
        self._free += released
        self.num_idle -= len(released)
        if released and self.on_free:
            self.on_free(released)

    def free_blocks(self) -> Iterator[int]:
        """The free blocks in the order in which they will be handed out."""
        return reversed(self._free)

    def check_invariants(self) -> None:
        """Asserts that the free list holds exactly what nobody holds and the prefix cache has no use for, once.

        Raises:
            AssertionError: which invariant is broken, and at which block.
        """
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert self.references[NULL_BLOCK] == 0, "the null block is counted"
        for block in range(1, self.num_blocks):
            count = self.references[block]
            held = count > 0 or self.cached[block]
            assert count >= 0 and held != (block in free), f"block {block}: {count} references, free and held"
        idle = sum(1 for block in range(1, self.num_blocks) if self.cached[block] and not self.references[block])
        assert idle == self.num_idle, f"{idle} blocks are cached and unused, {self.num_idle} counted"
