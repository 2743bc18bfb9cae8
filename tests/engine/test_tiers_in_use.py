"""A beginning that everybody shares stays in the lower tiers while the pool has it, and is found there afterwards."""

from types import SimpleNamespace

import pytest
from late_disk import AtOnce

from kvlab.cache import KVCacheManager, PrefixOptions
from kvlab.cache.tiers.files import HEADER, SUM_BYTES
from kvlab.cache.tiers.slots import HostSlots
from kvlab.cache.tiers.tiers import Tiers
from kvlab.engine.tiers_disk import DiskStore
from kvlab.engine.tiers_disk_worker import DiskWorker
from kvlab.schedule import EventLog, Request, SamplingParams, Scheduler
from kvlab.schedule.scheduler import Limits
from kvlab.specs.formats import get_format
from kvlab.specs.layout import group_parts
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import Attention, RecurrentState, SlidingWindow, StateArray

BF16 = get_format("bf16")
KINDS = {
    "one group": (Attention(1, 16, 16, BF16),),
    "windows": (Attention(1, 16, 16, BF16), SlidingWindow(1, 16, 16, BF16, window=8)),
    "states": (Attention(1, 16, 16, BF16), RecurrentState("mamba2", (StateArray("ssm", ((4, 8),), 8, BF16),))),
}
PAGE = 64
FILE = HEADER.size + PAGE + SUM_BYTES


class Memory:
    """Moves nothing: these tests are about which pages stay."""

    def start(self, moves, down):
        return None

    def done(self, ticket):
        return True

    def memory(self, group, slot):
        return memoryview(bytearray(PAGE))


@pytest.mark.parametrize("with_disk", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_beginning_in_use_outlasts_what_came_later(tmp_path, monkeypatch, kind, with_disk):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    layers = tuple(LayerSpec(i, (part,)) for i, part in enumerate(KINDS[kind]))
    groups = group_parts(ModelSpec("m", "m", layers, 32, 4, 64), 4)
    cache = KVCacheManager(groups, [99] * len(groups), 64, prefix=PrefixOptions(checkpoint_tokens=4))
    slots = HostSlots(SimpleNamespace(groups=groups, page_bytes=lambda group: PAGE), PAGE * (9 if with_disk else 16))
    most = (12 if kind == "one group" else 20) * FILE
    disk = DiskWorker(DiskStore(tmp_path, bytes(32), most), pool=AtOnce()) if with_disk else None
    tiers = Tiers(cache, slots, Memory(), disk)
    scheduler = Scheduler(cache, Limits(4, 64, 60), EventLog(10_000), tiers=tiers)

    def serve(name, prompt):
        scheduler.add(Request(name, prompt, SamplingParams(max_tokens=2)), 0.0)
        while scheduler.has_work:
            step = scheduler.schedule(0.0)
            cache.take_copies()
            scheduler.update(step, [1] * len(step.sampling), 0.0)
        return {kind: event.tokens for kind in ("hit", "load") for event in scheduler.events.of(kind, name)}

    start = list(range(2, 17))
    assert serve("first", start) == {}
    for i in range(8):
        # all 16 tokens that are known of the first one: the pool has them, and the tiers save what follows
        assert serve(f"tail {i}", [*start, 1, *range(20 + 10 * i, 27 + 10 * i)]) == {"hit": 16}
    where = "disk: lru" if disk else "host: lru"
    assert len({e.request_id for e in scheduler.events.of("save")}) == 9
    assert any(e.reason.startswith(where) for e in scheduler.events.of("evict"))
    if kind == "one group":
        assert [e.pages for e in scheduler.events.of("save")] == [4] + 8 * [2], (
            "the beginning went, and was saved again"
        )
    cache.prefix.clear()
    assert serve("last", [*start, 1, 9, 9]) == {"load": 16}
