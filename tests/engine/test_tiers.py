"""Tiers below a real engine's pool: pages come back bit for bit, prefixes survive a restart, damage is recomputed."""

from dataclasses import replace

import pytest
import torch
from kinds import kind

from kvlab.cache.prefix import PrefixOptions
from kvlab.engine import Engine, SamplingParams
from kvlab.engine.tiers import TierOptions, fingerprint, swap_costs
from kvlab.plan.policies import default_block_size
from kvlab.schedule import SchedulingPolicy
from kvlab.specs.formats import FORMATS

GREEDY = SamplingParams(6, ignore_eos=True)
SWAP = SchedulingPolicy(preempt="swap")
HOST = 1 << 20


def prompt_of(model, length, first=1):
    return [(first + 7 * i * i) % model.vocab for i in range(length)]


def engine_of(model, **options):
    options = {"num_blocks": 40, "block_size": 4, "check": True, "max_batched_tokens": 64} | options
    return Engine(model.model if hasattr(model, "model") else model, **options)


def run(engine, prompt, params=GREEDY, **fields):
    """The request's tokens, and how many of its tokens came out of a lower tier."""
    before = len(engine.events.of("load"))
    request = engine.requests[engine.add_request(prompt, params, **fields)]
    while not request.finish_reason:
        engine.step()
    if engine.tiers:
        engine.tiers.drain()
    return request.output, sum(event.tokens for event in engine.events.of("load")[before:])


def page_bytes(engine, request_id):
    """The bytes of every page that the request holds, in the order of its tables."""
    return [
        torch.cat([rows[page] for rows in engine.storage.rows(g)])
        for g, table in enumerate(engine.cache.tables[request_id])
        for page in table
        if page
    ]


@pytest.fixture
def plain(monkeypatch):
    """Operations in torch: these tests are about moving pages, whatever computes on them, and compile no kernel. Groups
    of tokens are small, so that some are closed within a short prompt."""
    monkeypatch.setenv("KVLAB_OPS", "torch")
    for name, fmt in FORMATS.items():
        if fmt.group_tokens:
            small = replace(fmt, group_tokens=4, recent=6, group_values=4 if fmt.group_values else 0)
            monkeypatch.setitem(FORMATS, name, small)


@pytest.mark.parametrize("kv_dtype", [name for name in FORMATS if name != "fp64"])
def test_a_swapped_sequence_comes_back_bit_for_bit(tiny, plain, kv_dtype):
    model = tiny("both").model(torch.float32)
    engine = engine_of(model, kv_dtype=kv_dtype, scheduling=SWAP, tiers=TierOptions(HOST))
    prompt, params = [(3 * i) % 50 for i in range(17)], SamplingParams(5, ignore_eos=True)
    name = engine.add_request(prompt, params)
    other = engine.add_request([5] * 9, SamplingParams(6, ignore_eos=True))
    while engine.requests[name].num_computed < 19:
        engine.step()
    before = page_bytes(engine, name)
    assert engine.scheduler.preempt(name, 0.0)
    assert name not in engine.cache.tables and engine.tiers.parked(name)
    [event] = engine.events.of("swap_out")
    assert (event.request_id, event.tokens, event.pages) == (name, 19, len(before))
    # other pages than before, other bytes in between
    for g, pool in enumerate(engine.cache.pools):
        engine.storage.fill(7, g, list(pool.free_blocks()))
    seen = []
    engine.events.subscribe(lambda e: e.kind == "swap_in" and seen.extend(page_bytes(engine, name)))
    engine.step()
    assert len(seen) == len(before) and all(map(torch.equal, seen, before))
    assert engine.events.of("preempt")[0].tokens == 0, "no work was lost"
    request = engine.requests[name]
    while engine.scheduler.has_work:
        engine.step()
    assert request.output == run(engine_of(model, kv_dtype=kv_dtype), prompt, params)[0]
    assert other not in engine.requests


@pytest.mark.parametrize(("name", "tokens"), [("full", 24), ("windows", 25), ("delta", 25), ("compressed", 25)])
def test_a_new_process_with_the_same_model_finds_prefixes_on_disk(tmp_path, name, tokens):
    model = kind(name)
    size = default_block_size(model.model.spec, 4)
    tiers = TierOptions(HOST, tmp_path, 1 << 22)
    prompt = prompt_of(model, 20)
    output, loaded = run(engine_of(model, tiers=tiers, block_size=size), prompt)
    assert (output, loaded) == (model.tokens(prompt, GREEDY), 0)
    # a second engine: the next turn of the conversation begins with all of the first
    longer = prompt + output + prompt_of(model, 5, 3)
    second = engine_of(model, tiers=tiers, block_size=size)
    assert run(second, longer) == (model.tokens(longer, GREEDY), tokens)
    # another tenant finds nothing
    assert run(engine_of(model, tiers=tiers, block_size=size), longer, salt="another") == (
        model.tokens(longer, GREEDY), 0,
    )  # fmt: skip


class OtherTokenizer:
    eos_ids = ()

    def fingerprint(self):
        return b"another"

    def decode(self, ids):
        return ""


def test_another_model_tokenizer_type_or_layout_is_another_fingerprint(tmp_path):
    model = kind("full")
    tiers = TierOptions(HOST, tmp_path, 1 << 22)
    prompt = prompt_of(model, 20)
    run(engine_of(model, tiers=tiers), prompt)
    files = set(tmp_path.iterdir())
    changed = kind("windows").model.decoder.weights.named
    one = next(iter(changed.values()))
    first = one.flatten()[0].clone()
    marks = {"same": fingerprint(engine_of(model)), "size": fingerprint(engine_of(model, block_size=8)),
             "length": fingerprint(engine_of(model, max_model_len=60)),
             "tokenizer": fingerprint(engine_of(replace(model.model, tokenizer=OtherTokenizer()))),
             "type": fingerprint(engine_of(model, kv_dtype="fp32")),
             "model": fingerprint(engine_of(kind("windows")))}  # fmt: skip
    one.view(-1)[0] += 1e-9
    marks["one weight"] = fingerprint(engine_of(kind("windows")))
    one.view(-1)[0] = first
    assert len(set(marks.values())) == len(marks)
    assert marks["same"] == fingerprint(engine_of(model, num_blocks=50)), "the size of the pool is no part of it"
    for options in ({"block_size": 8}, {"max_model_len": 60}):
        assert run(engine_of(model, tiers=tiers, **options), prompt) == (model.tokens(prompt, GREEDY), 0)
    assert files <= set(tmp_path.iterdir()), "files of another are left to their owner"
    assert run(engine_of(model, tiers=tiers), prompt)[1] == 16


@pytest.mark.parametrize(("name", "asked"), [("full", [6]), ("delta", [7, 1])])
def test_damage_is_found_and_computed_again(tmp_path, name, asked):
    model = kind(name)
    tiers = TierOptions(HOST, tmp_path, 1 << 22)
    prompt = prompt_of(model, 20)
    output, _ = run(engine_of(model, tiers=tiers), prompt)
    longer = prompt + output + [3]
    files = sorted(p for p in tmp_path.iterdir() if p.stat().st_size > 1000)
    for i, path in enumerate(files):
        data = bytearray(path.read_bytes())
        data[-40 - i] ^= 4
        path.write_bytes(data)
    engine = engine_of(model, tiers=tiers)
    assert run(engine, longer) == (model.tokens(longer, GREEDY), 0)
    # of each group, all pages that were asked for
    assert sorted(e.pages for e in engine.events.of("lost")) == sorted(asked) and engine.tiers.saved.disk.failures


def test_a_full_disk_changes_no_token(tmp_path, monkeypatch):
    model = kind("full")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    engine = engine_of(model, tiers=TierOptions(HOST, tmp_path, 1 << 22))
    prompt = prompt_of(model, 20)
    assert run(engine, prompt) == (model.tokens(prompt, GREEDY), 0)
    # host memory has it nonetheless
    assert run(engine, prompt) == (model.tokens(prompt, GREEDY), 16)
    assert list(tmp_path.iterdir()) == [] and engine.tiers.saved.disk.failures
    lost = engine.events.of("lost")
    assert sum(e.pages for e in lost) == 6
    assert {(e.request_id, e.reason) for e in lost} == {("", "disk: write: No space left on device")}


def test_prefixes_pushed_out_of_host_memory_are_read_from_disk(tmp_path):
    model = kind("full")
    one = engine_of(model).layout.page_bytes(0)
    engine = engine_of(model, tiers=TierOptions(7 * one, tmp_path, 1 << 22))
    first, second = prompt_of(model, 20), prompt_of(model, 20, 2)
    run(engine, first)
    run(engine, second)
    assert len(engine.tiers.saved) == 7
    assert run(engine, first) == (model.tokens(first, GREEDY), 16)
    assert {e.reason for e in engine.events.of("evict")} == {"host: lru, its place was needed; on disk still"}


@pytest.mark.parametrize("design", ["hash", "radix"])
@pytest.mark.parametrize("name", ["full", "latent"])
def test_only_what_the_pool_has_not_is_moved(name, design):
    model = kind(name)
    engine = engine_of(model, tiers=TierOptions(HOST), prefix=PrefixOptions(design), page_seed=3)
    prompt = prompt_of(model, 30)
    output, _ = run(engine, prompt)
    moved, start = [], engine.tiers.copier.start

    def counted(moves, down):
        if not down:
            moved.append(len(moves))
        return start(moves, down)

    engine.tiers.copier.start = counted
    saved = engine.tiers.saved
    # the first tokens' pages were saved first
    beginning = list(saved._entries)[:2]
    for gone in (3, 4):
        # the end of a sequence goes first: 32 tokens are known, the pool keeps 20 of them, then 16
        engine.cache.prefix.evict(0, engine.cache.unit_pools[0].num_idle - 8 + gone)
        # what the pool has the tier need not have
        saved.drop(beginning.pop())
        longer = [*prompt, *output[:2], gone, 3]
        assert run(engine, longer) == (model.tokens(longer, GREEDY), 4 * gone)
        assert [e.tokens for e in engine.events.of("hit")][-1] == 32 - 4 * gone
        assert moved.pop() == gone == engine.events.of("load")[-1].pages and not moved
    # what was brought back is found in the pool from now on, by everybody
    assert run(engine, longer[:33]) == (model.tokens(longer[:33], GREEDY), 0)
    assert engine.events.of("hit")[-1].tokens == 32 and engine.cache.pins.last_holds == 0


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_pages_that_the_lowest_tier_gives_up_are_told(tmp_path, tier):
    model = kind("full")
    one = engine_of(model).layout.page_bytes(0)
    most = 7 * (one + 500)
    sizes = (7 * one,) if tier == "host" else (HOST, tmp_path, most)
    engine = engine_of(model, tiers=TierOptions(*sizes))
    for first in (1, 2):
        run(engine, prompt_of(model, 20, first))
    why = f"{tier}: lru, " + ("its place was needed" if tier == "host" else f"disk_bytes {most}")
    gone = engine.events.of("evict")
    assert {e.reason for e in gone} == {why} and sum(e.pages for e in gone) == 5
    assert tier == "host" or len(list(tmp_path.iterdir())) == 7


def test_the_cheaper_way_is_taken_and_said():
    model = kind("full")
    for link, expected in ((1e12, "swap_out"), (1.0, "preempt")):
        policy = SchedulingPolicy(preempt="auto", costs=swap_costs(model.model, link, 1e6))
        engine = engine_of(model, scheduling=policy, tiers=TierOptions(HOST))
        name = engine.add_request(prompt_of(model, 20), GREEDY)
        engine.step()
        engine.scheduler.preempt(name, 0.0)
        event = engine.events.of(expected)[-1]
        assert "swap" in event.reason and "recompute" in event.reason
        assert engine.events.counts["swap_out"] == (expected == "swap_out")


def test_a_tier_that_is_full_means_computing_again():
    model = kind("full")
    one = engine_of(model).layout.page_bytes(0)
    engine = engine_of(model, scheduling=SWAP, tiers=TierOptions(2 * one))
    name = engine.add_request(prompt_of(model, 20), GREEDY)
    engine.step()
    engine.scheduler.preempt(name, 0.0)
    [event] = engine.events.of("preempt")
    assert (event.reason, event.tokens) == ("asked for; the tier below is full", 20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_bytes": 0}, "host_bytes 0: must be positive"),
        ({"host_bytes": 1, "disk_dir": "x"}, "disk_dir and disk_bytes: give both, or none"),
        ({"host_bytes": 1, "disk_dir": __file__, "disk_bytes": 1}, "is not a directory"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        TierOptions(**options)


def test_host_memory_smaller_than_a_page_is_refused():
    with pytest.raises(ValueError, match="host_bytes 8: must hold a unit"):
        engine_of(kind("full"), tiers=TierOptions(8))


@pytest.mark.parametrize("pools", ["per_kind", "unified", "sectors"])
def test_both_ways_of_copying_move_the_same_bytes(pools):
    """On CUDA pages are gathered on the device and sent whole; here layer by layer in runs. Same slots, same bytes."""
    engine = engine_of(kind("delta"), tiers=TierOptions(HOST), pools=pools, num_blocks=9, max_batched_tokens=2)
    memory = engine.tiers.copier
    generator = torch.Generator().manual_seed(0)
    moves = []
    for g, pool in enumerate(engine.cache.pools):
        for rows in engine.storage.rows(g):
            rows.copy_(torch.randint(256, rows.shape, generator=generator, dtype=torch.uint8))
        pages = list(range(pool.pages_per_unit, min(pool.num_blocks, pool.pages_per_unit + 5)))
        moves += [(g, page, engine.tiers.slots.take(g)) for page in pages[:2] + pages[:1:-1]]
    memory.start(moves, True)
    runs = [bytes(memory.memory(g, slot)) for g, _, slot in moves]
    memory.buffer.zero_()
    for g, page, slot in moves:
        memory._down(g, [page], [slot])
    assert [bytes(memory.memory(g, slot)) for g, _, slot in moves] == runs
    before = {g: [rows.clone() for rows in engine.storage.rows(g)] for g, _, _ in moves}
    for back in (lambda: memory.start(moves, False), lambda: [memory._up(g, [p], [s]) for g, p, s in moves]):
        for g, page, _ in moves:
            for rows in engine.storage.rows(g):
                rows[page] = 0
        back()
        assert all(torch.equal(a, b) for g in before for a, b in zip(before[g], engine.storage.rows(g), strict=True))
