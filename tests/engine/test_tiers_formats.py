"""Pages of every make through the tiers: a layout is said, never guessed from shapes, and quantized bytes are bytes."""

import pytest
import torch
from kinds import kind
from test_tiers import HOST, engine_of, page_bytes, plain, prompt_of, run

from kvlab.cache.tiers import HostSlots
from kvlab.engine import SamplingParams
from kvlab.engine.kv_formats import kv_formats
from kvlab.engine.storage import PagedStorage
from kvlab.engine.tiers import TierOptions
from kvlab.engine.tiers_memory import HostMemory
from kvlab.plan.policies import default_block_size
from kvlab.quant.fixed import FixedScales
from kvlab.specs.formats import get_format
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import Attention, SlidingWindow
from kvlab.specs.pools import pool_layout

__all__ = ["plain"]
CPU, ONE = torch.device("cpu"), SamplingParams(1, ignore_eos=True)


@pytest.mark.parametrize("pools", ["per_kind", "unified", "sectors"])
@pytest.mark.parametrize(("fmt", "row"), [("bf16", 256), ("int8", 128), ("int4", 64)])
def test_17_offloaded_entries_lie_where_the_layout_says(fmt, row, pools):
    """LMCache#4467: with two heads, pages of 16 and 128 values, [tokens, heads] and [heads, tokens] have one shape, and
    an entry of one was read as one of the other. Here every entry has a byte of its own; places are counted by hand."""
    heads, size, rows = 2, 16, get_format(fmt)
    parts = (Attention(heads, 128, 128, rows), SlidingWindow(heads, 128, 128, rows, window=32))
    spec = ModelSpec("m", "llama", tuple(LayerSpec(i, (part,)) for i, part in enumerate(parts)), 256, 2, 9)
    layout = pool_layout(spec, size, pools)
    storage = PagedStorage(layout, [9] * len(layout.buffers), CPU)
    storage.fill(255)
    slots = HostSlots(layout, 4 * max(map(layout.page_bytes, range(2))))
    memory = HostMemory(storage, slots)
    [[full], [window]] = storage.views(spec)

    def entries(view, page):
        """(place in a page, its bytes) of every row of codes, keys before values, one head after the other."""
        return [(row * ((half * heads + h) * size + t), codes[page, h, t].view(torch.uint8))
                for half, codes in enumerate((view.k, view.v)) for h in range(heads) for t in range(size)]  # fmt: skip

    moves = [(0, 2, slots.take(0)), (1, 3, slots.take(1))]
    for (_, page, _), view in zip(moves, (full, window), strict=True):
        for mark, (_, place) in enumerate(entries(view, page)):
            place.fill_(mark)
    memory.start(moves, True)
    for (g, page, slot), view in zip(moves, (full, window), strict=True):
        host = bytes(memory.memory(g, slot))
        for mark, (start, _) in enumerate(entries(view, page)):
            assert host[start : start + row] == bytes([mark]) * row
    storage.fill(0)
    memory.start([(0, 5, moves[0][2]), (1, 6, moves[1][2])], False)
    for page, view in ((5, full), (6, window)):
        assert all(bool((place == mark).all()) for mark, (_, place) in enumerate(entries(view, page)))


BY_ROW, BY_GROUP = ("int8_g32", "fp8_e4m3_row", "int4", "int3_had", "nvfp4"), ("kivi2", "kvquant3")


@pytest.mark.parametrize(("fmt", "tokens"), [(f, 64) for f in BY_ROW] + [(f, 68) for f in BY_GROUP])
def test_quantized_pages_survive_a_restart_bit_for_bit(tmp_path, plain, monkeypatch, fmt, tokens):
    """Rows coded one by one are saved by the page; groups and the last tokens in full only with the end they are of."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    model, params = kind("full"), SamplingParams(5, ignore_eos=True)
    options = {"kv_dtype": fmt, "block_size": default_block_size(kv_formats(model.model, fmt)[1], 16),
               "tiers": TierOptions(HOST, tmp_path, 1 << 22), "max_batched_tokens": 200}  # fmt: skip
    first, prompt, bytes_of = engine_of(model, **options), prompt_of(model, 64), {}
    first.events.subscribe(lambda e: e.kind == "save" and bytes_of.update(saved=page_bytes(first, e.request_id)))
    output, _ = run(first, prompt, params)
    second, longer = engine_of(model, **options), [*prompt, *output, 3]
    second.events.subscribe(lambda e: e.kind == "load" and bytes_of.update(loaded=page_bytes(second, e.request_id)))
    said, loaded = run(second, longer, params)
    assert loaded == tokens
    pairs = list(zip(bytes_of["loaded"], bytes_of["saved"], strict=False))
    assert len(pairs) == second.events.of("load")[0].pages and all(torch.equal(a, b) for a, b in pairs)
    # an engine of that format which knows no tier says the same
    assert said == run(engine_of(model, **(options | {"tiers": None})), longer, params)[0]


def test_pages_of_other_calibrated_scales_are_other_pages(tmp_path, plain, monkeypatch):
    """A code means something only together with its scale, which lies in no page: one scale of one layer, of keys or of
    values, changed or absent, and nothing is found."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    model, prompt = kind("full"), prompt_of(kind("full"), 20)

    def scales(layer=0, k=1.0, v=1.0):
        found = {i: FixedScales(torch.full((1, 1), 0.5), torch.full((1, 1), 0.25)) for i in range(2)}
        return found | {layer: FixedScales(found[layer].k * k, found[layer].v * v)}

    def run_with(kv_scales):
        tiers = TierOptions(HOST, tmp_path, 1 << 22)
        return run(engine_of(model, kv_dtype="fp8_e4m3", kv_scales=kv_scales, tiers=tiers), prompt, ONE)

    first, loaded = run_with(scales())
    assert loaded == 0 and run_with(scales()) == (first, 16)
    changed = [scales(0, k=0.5), scales(1, v=2.0), scales(1, k=0.5, v=2.0)]
    # the same numbers by head; a layer without; none at all
    by_head = {i: FixedScales(x.k.expand(2, 1), x.v) for i, x in scales().items()}
    for other in (*changed, by_head, {0: scales()[0]}, None):
        assert run_with(other)[1] == 0
    assert run_with(scales()) == (first, 16), "files of another are left to their owner"
