"""A manager with a prefix cache, driven without scheduler and model: requests start, compute tokens and end."""

from kvlab.cache import KVCacheManager, PrefixOptions
from kvlab.schedule import Request, SamplingParams
from kvlab.specs.formats import get_format
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import (
    Attention,
    ChunkedLocal,
    CompressedEntries,
    OpenBuffer,
    RecurrentState,
    SlidingWindow,
    StateArray,
)
from kvlab.specs.pools import pool_layout
from kvlab.specs.rollback import RollbackPolicy

BF16 = get_format("bf16")
FULL = Attention(2, 16, 16, BF16)
WINDOW = SlidingWindow(2, 16, 16, BF16, window=7)
CHUNK = ChunkedLocal(2, 16, 16, BF16, chunk=9)
STATE = RecurrentState("mamba2", (StateArray("ssm", ((4, 8),), 8, BF16),))
ENTRIES = CompressedEntries(4, 8, BF16)
OPEN = OpenBuffer((StateArray("open", ((4, 8),), 8, BF16),), ratio=4)


class Driver:
    """Requests on a manager; invariants are checked after everything that is done."""

    def __init__(self, *parts, design="hash", num_blocks=200, block_size=4, pools="per_kind", in_flight=64,
                 rollback=None, checked=True, **options):  # fmt: skip
        layers = tuple(LayerSpec(i, (part,)) for i, part in enumerate(parts or (FULL,)))
        layout = pool_layout(ModelSpec("m", "m", layers, 32, 4, 64), block_size, pools)
        sizes = num_blocks if isinstance(num_blocks, list) else [num_blocks] * len(layout.buffers)
        self.manager = KVCacheManager(
            layout, sizes, in_flight, rollback=rollback or RollbackPolicy(),
            prefix=PrefixOptions(design, **options),
        )  # fmt: skip
        self.requests, self.checked = {}, checked

    @property
    def prefix(self):
        return self.manager.prefix

    def start(self, name, tokens, **fields):
        """The tokens of the hit that request `name` starts on; None when it does not fit."""
        request = Request(name, tokens, SamplingParams(), **fields)
        hit = self.manager.match(request)
        if not self.manager.has_room(len(tokens), hit=hit):
            return None
        assert self.manager.allocate(name, hit.tokens, hit=hit)
        request.num_computed = hit.tokens
        self.requests[name] = request
        self.check()
        return hit.tokens

    def compute(self, name, count=None):
        """Computes the next tokens of a request, all that are known by default, in chunks that end at kept states."""
        request = self.requests[name]
        end = len(request.tokens) if count is None else request.num_computed + count
        while request.num_computed < end:
            stop = self.manager.next_state(name, request.num_computed, request.num_prompt)
            keeps = self.manager.keeps_states and stop is not None and stop <= end
            stop = stop if keeps else end
            assert self.manager.allocate(name, stop, keeps), f"no room for {name}"
            self.manager.take_copies()
            self.manager.advance(name, stop)
            request.num_computed = stop
        self.check()

    def end(self, name):
        del self.requests[name]
        self.manager.free(name)
        self.manager.forget(name)
        self.check()

    def check(self):
        if self.checked:
            self.manager.check_invariants()

    def run(self, name, tokens, **fields):
        """The tokens of the hit of a request that starts, computes everything and ends."""
        hit = self.start(name, tokens, **fields)
        self.compute(name)
        self.end(name)
        return hit

    def table(self, name, group=0):
        return list(self.manager.block_table(name, group))

    def histories(self, column=0):
        """The token ids of every cached history of that column; for plain requests."""
        from array import array

        found = set()
        for _, history, own in self.prefix.index.entries():
            if own == column:
                ids = array("i")
                ids.frombytes(history)
                found.add(tuple(ids))
        return found
