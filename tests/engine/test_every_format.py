"""Every storage format in the engine: the same tokens whatever the schedule, bytes as predicted, NaN never read.

What a query reads is a function of its position and of the tokens before it alone, so a lossy format too may not notice
how tokens were cut into steps, who shared them, or that a request was put back and computed again.
"""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from drafting import speculation
from kinds import KINDS, kind

from kvlab.cache.prefix import DESIGNS, PrefixOptions
from kvlab.engine import Engine, SamplingParams
from kvlab.engine.tiers import TierOptions
from kvlab.lab.paged_run import PagedRun
from kvlab.plan.policies import PolicySettings, default_block_size, sequence_bytes
from kvlab.quant import row_formats
from kvlab.schedule import SchedulingPolicy
from kvlab.specs.formats import FORMATS
from kvlab.specs.kv_dtypes import with_formats
from kvlab.specs.pools import pool_layout

GROUPED = [name for name, fmt in FORMATS.items() if fmt.group_tokens]
ROWS = [name for name in row_formats() if name not in ("fp64", "fp32", "bf16")]
PARAMS = SamplingParams(6, ignore_eos=True)


@pytest.fixture
def small_groups(monkeypatch):
    """Groups of 4 tokens, closed 6 tokens later: both happen within a short prompt."""
    for name in GROUPED:
        fmt = FORMATS[name]
        small = replace(fmt, group_tokens=4, recent=6, group_values=4 if fmt.group_values else 0)
        monkeypatch.setitem(FORMATS, name, small)


def schedules(model, kv_dtype, seed):
    """Two engines' options: one that reads everything at once, one with all else on: small steps, little room, shuffled
    pages, prefixes, victims that are swapped out."""
    rng = random.Random(seed)
    spec = with_formats(model.spec, kv_dtype)
    size = default_block_size(spec, rng.choice([1, 2, 4]))
    pages = pool_layout(spec, size).sequence_pages(36, 8)
    tight = {"num_blocks": tuple(3 + int(1.3 * n) for n in pages), "max_batched_tokens": rng.choice([3, 5, 8])}
    yield {"num_blocks": 200, "max_batched_tokens": 256, "block_size": size}
    yield tight | {
        "block_size": size, "max_num_seqs": 3, "page_seed": seed, "pad_to": rng.choice([1, 4]),
        "prefix": PrefixOptions(rng.choice(DESIGNS)), "tiers": TierOptions("4MiB"),
        "scheduling": SchedulingPolicy(preempt="swap"),
    }  # fmt: skip


def generate(engine, prompts):
    """What each prompt got; where there is a tier the one that runs is swapped out now and then."""
    requests = [engine.requests[engine.add_request(prompt, PARAMS)] for prompt in prompts]
    while engine.scheduler.has_work:
        engine.step()
        if engine.tiers and engine.scheduler.running and engine.scheduler.step_number % 4 == 0:
            engine.scheduler.preempt(engine.scheduler.running[-1].request_id, 0.0)
    assert not [request.error for request in requests if request.error]
    return [request.output for request in requests]


def check_schedules(name, kv_dtype, seed):
    tiny = kind(name)
    rng = random.Random(seed)
    first, second = ([rng.randrange(tiny.vocab) for _ in range(n)] for n in (15, 5))
    # the last begins as the first did
    prompts = [first * 2, second, first[:12] + second]
    found, answers = [], {}
    for options in schedules(tiny.model, kv_dtype, seed):
        # what the calm engine said are the other's drafts, every other one with a mistake
        if found:
            answers |= {str(i): ids for i, ids in enumerate(found[0])}
            options["speculation"] = speculation(tiny, "right", answers)
        engine = Engine(tiny.model, kv_dtype=kv_dtype, check=True, **options)
        found.append(generate(engine, prompts))
        assert engine.kv.predicted_bytes == engine.kv.allocated_bytes
        assert all(len(ids) == PARAMS.max_tokens for ids in found[-1])
    assert found[0] == found[1]
    seen = engine.speculator.acceptance
    assert engine.events.counts["swap_in"] and 0 < seen.accepted <= seen.drafted
    return found[0]


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("kv_dtype", [*ROWS, *GROUPED])
def test_full_attention_in_every_format(kv_dtype, small_groups, seed):
    check_schedules("full", kv_dtype, seed + len(kv_dtype))


SOME = {
    "windows": "int3_had", "latent": "int4", "compressed": "mxfp4", "indexed": "nvfp4", "shared": "int8_asym",
    "sinks": "int4_had", "chunks": "fp8_e5m2",
}  # fmt: skip


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize(("name", "kv_dtype"), SOME.items())
def test_other_kinds_in_one_each(name, kv_dtype, seed):
    check_schedules(name, kv_dtype, seed + len(name))


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ROWS)
@pytest.mark.parametrize("name", SOME)
def test_every_kind_in_every_format(name, kv_dtype):
    check_schedules(name, kv_dtype, seed=len(name) + len(kv_dtype))


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize(("name", "kv_dtype"), [("windows", "kvquant3"), ("sinks", "kivi2"), ("shared", "kivi4")])
def test_groups_beside_windows(name, kv_dtype, small_groups, seed):
    check_schedules(name, kv_dtype, seed + len(name))


@pytest.mark.parametrize("seed", [0])
def test_a_rule_per_layer(seed):
    check_schedules("windows", "int4,sliding=native,first=1:int8", seed + 3)


# KL and top-1 agreement of one step with full precision; attention of these random models is sharp on purpose: no text is
# this hard. About twice what is measured
BOUNDS = {
    "fp16": (1e-5, 0.97), "bf16": (5e-4, 0.9), "int8": (2e-3, 0.9), "int8_asym": (2e-3, 0.9),
    "int8_g32": (2e-3, 0.9), "int8_asym_g32": (2e-3, 0.9), "int4_sym_g32": (0.4, 0.5),
    "fp8_e4m3": (0.06, 0.75), "fp8_e4m3_row": (0.06, 0.75), "fp8_e5m2": (0.2, 0.6), "fp8_e5m2_row": (0.2, 0.6),
    "kivi4": (0.06, 0.8), "int4": (0.4, 0.5), "int4_sym": (0.4, 0.5), "int4_g32": (0.4, 0.5), "int4_had": (0.4, 0.5),
    "nvfp4": (0.5, 0.45), "mxfp4": (0.7, 0.45), "kivi2": (0.5, 0.45), "kvquant3": (0.6, 0.45), "int3_had": (0.6, 0.35),
}  # fmt: skip


def test_every_format_has_a_bound():
    assert BOUNDS.keys() == FORMATS.keys() - {"fp64", "fp32"}


@pytest.mark.parametrize("kv_dtype", BOUNDS)
def test_one_step_is_near_full_precision(kv_dtype, small_groups):
    """Bounds compare with full precision, never with the format itself; finer formats are nearer."""
    tiny = kind("full")
    ids = [(7 * i + 3) % tiny.vocab for i in range(48)]
    full, lossy = (
        torch.log_softmax(tiny.model.decoder.logits(PagedRun(tiny.model, f, 48).read(ids)), -1)
        for f in ("fp64", kv_dtype)
    )
    kl = float((full.exp() * (full - lossy)).sum(-1).mean())
    top1 = float((full.argmax(-1) == lossy.argmax(-1)).double().mean())
    assert 0 < kl < BOUNDS[kv_dtype][0] and top1 >= BOUNDS[kv_dtype][1], (kl, top1)


NO_KEYS, NO_GROUPS = "is for keys and values of every token", "no layer keeps the keys and values of all tokens"
REFUSED = dict.fromkeys(("latent", "indexed", "kda", "compressed"), NO_KEYS)
REFUSED |= dict.fromkeys(("states", "linear", "averages"), NO_GROUPS)
UNROTATED = dict.fromkeys(("shared", "shared blocks"), "how layer 1 rotates its keys is not known")
"""Kinds for which formats of groups, and beside them the one of keys before rotation, have no meaning, and what is said."""


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_predicted_is_allocated_for_every_kind(kv_dtype):
    """Nothing runs: pools are made, and their distinct storages add up to the plan's bytes, or the format is refused."""
    refused = (REFUSED if kv_dtype in GROUPED else {}) | (UNROTATED if kv_dtype == "kvquant3" else {})
    for name in KINDS:
        model = kind(name).model
        if name in refused:
            with pytest.raises(ValueError, match=refused[name]):
                Engine(model, kv_dtype=kv_dtype, num_blocks=5, block_size=32)
            continue
        size = default_block_size(with_formats(model.spec, kv_dtype), 4)
        engine = Engine(model, kv_dtype=kv_dtype, num_blocks=5, block_size=size)
        found = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in engine.storage.buffers.values()}
        assert sum(found.values()) == engine.kv.predicted_bytes == engine.pool_use.storage, name
        one = sequence_bytes(engine.spec, 30, PolicySettings("paged", size, 8))
        planned = [group.block_bytes for group in one.groups]
        assert planned == [engine.layout.page_bytes(g) for g in range(len(engine.groups))], name
        assert sum(found.values()) == 5 * sum(planned), name


def beginning():
    return [(7 * i * i + 3) % kind("full").vocab for i in range(24)]


@cache
def tokens_alone(kv_dtype, length):
    """What the first `length` tokens get in an engine of their own; the same in every test, with `small_groups`."""
    calm = Engine(kind("full").model, kv_dtype=kv_dtype, num_blocks=60, block_size=4)
    return calm.generate([beginning()[:length]], PARAMS)[0].token_ids


@pytest.mark.parametrize("first", [5, 9, 12])
@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("kv_dtype", GROUPED)
def test_a_page_whose_groups_are_open_takes_no_other_ones_place(kv_dtype, design, first, small_groups):
    """Two begin alike in one step. The shorter's pages are cached with groups that it does not come to close; the longer
    has closed its own, and a third finds what there is."""
    tiny, ids = kind("full"), beginning()
    prompts = [ids[:first], ids[:20], ids]
    one = SamplingParams(1, ignore_eos=True)
    wanted = [tokens_alone(kv_dtype, len(prompt)) for prompt in prompts]
    engine = Engine(
        tiny.model, kv_dtype=kv_dtype, check=True, num_blocks=60, block_size=4, prefix=PrefixOptions(design)
    )
    got = engine.generate(prompts[:2], [one, PARAMS]) + engine.generate(prompts[2:], PARAMS)
    assert [c.error for c in got] == [""] * 3
    assert [c.token_ids for c in got] == [wanted[0][:1], *wanted[1:]]


def test_a_token_in_a_closed_group_reads_codes_and_a_recent_one_does_not(small_groups):
    """The first 9 tokens (6 recent, 4 in a group, less one) are exact; from then on the first group is codes."""
    tiny = kind("full")
    ids = [(5 * i + 2) % tiny.vocab for i in range(14)]
    full, lossy = (PagedRun(tiny.model, f, 14).read(ids) for f in ("fp64", "kivi2"))
    near = (full - lossy).abs().amax(-1) < 1e-9
    assert near.tolist() == [True] * 9 + [False] * 5


def test_chunks_of_a_group_format_change_nothing(small_groups):
    tiny = kind("full")
    ids = [(5 * i + 2) % tiny.vocab for i in range(40)]
    for kv_dtype in GROUPED:
        whole, parts = PagedRun(tiny.model, kv_dtype, 40), PagedRun(tiny.model, kv_dtype, 40)
        hidden = torch.cat([parts.read(ids[i : i + n]) for i, n in ((0, 3), (3, 1), (4, 20), (24, 16))])
        assert (whole.read(ids) - hidden).abs().max() < 1e-9


@pytest.mark.parametrize("kv_dtype", [name for name in FORMATS if name != "fp64"])
def test_pages_survive_a_copy_bit_for_bit(kv_dtype, small_groups, monkeypatch):
    """Scales lie in the page, so whoever moves pages moves them too."""
    monkeypatch.setenv("KVLAB_OPS", "torch")
    tiny = kind("full")
    engine = Engine(tiny.model, kv_dtype=kv_dtype, num_blocks=40, block_size=4)
    engine.add_request(list(range(20)), PARAMS)
    engine.step()
    held = [next(p for p in engine.cache.block_table("0", g) if p) for g in range(len(engine.groups))]
    for group, page in enumerate(held):
        engine.storage.fill(0xA5, group, [39])
        before = {member: buffer.clone() for member, buffer in engine.storage.buffers.items()}
        engine.storage.copy([(group, page, 39)])
        own = engine.groups[group].members
        for member, buffer in engine.storage.buffers.items():
            assert not torch.equal(before[member][39], before[member][page])
            assert torch.equal(buffer[39], before[member][page if member in own else 39]), member
            assert torch.equal(buffer[:39], before[member][:39]), "nothing else was touched"


def test_layers_that_share_keep_the_scales_of_the_layer_that_wrote():
    """Pitfall: vllm#51091: sharing layers set inline scales to 1.0 after the target layer wrote them."""
    tiny = kind("shared")
    run = PagedRun(tiny.model, "int8", 12)
    owners = [i for i, parts in enumerate(run.views) if parts[0] is not None]
    assert len(owners) < len(run.views), "some layers share"
    hidden = run.read(list(range(12)))
    for i in owners:
        assert not (run.views[i][0].k_scale[1, :, :12] == 1.0).any()
    full = PagedRun(tiny.model, "fp64", 12).read(list(range(12)))
    assert (hidden - full).norm() < 0.2 * full.norm()
