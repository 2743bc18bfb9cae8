"""Every storage format in the engine: the same tokens whatever the schedule, bytes as predicted, NaN never read.

What a query reads is a function of its position and of the tokens before it alone, so a lossy format too may not notice
how tokens were cut into steps, who shared them, or that a request was put back and computed again.
"""

import random
from dataclasses import replace

import pytest
import torch
from kinds import kind

from kvlab.engine import Engine, SamplingParams
from kvlab.lab.paged_run import PagedRun
from kvlab.plan.policies import default_block_size
from kvlab.quant import row_formats
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
    """Two engines' options: one that reads everything at once, one with small steps, little room, shuffled pages."""
    rng = random.Random(seed)
    spec = with_formats(model.spec, kv_dtype)
    size = default_block_size(spec, rng.choice([1, 2, 4]))
    pages = pool_layout(spec, size).sequence_pages(36, 8)
    tight = {"num_blocks": tuple(2 + int(1.3 * n) for n in pages), "max_batched_tokens": rng.choice([1, 5, 8])}
    yield {"num_blocks": 200, "max_batched_tokens": 256, "block_size": size}
    yield tight | {"block_size": size, "max_num_seqs": 3, "page_seed": seed, "pad_to": rng.choice([1, 4])}


def check_schedules(name, kv_dtype, seed):
    tiny = kind(name)
    rng = random.Random(seed)
    prompts = [[rng.randrange(tiny.vocab) for _ in range(n)] for n in (5, 30, 17)]
    found = []
    for options in schedules(tiny.model, kv_dtype, seed):
        engine = Engine(tiny.model, kv_dtype=kv_dtype, check=True, **options)
        found.append([c.token_ids for c in engine.generate(prompts, PARAMS)])
        assert engine.kv.predicted_bytes == engine.kv.allocated_bytes
        assert all(len(ids) == PARAMS.max_tokens for ids in found[-1])
    assert found[0] == found[1]
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


def test_keys_before_rotation_need_a_rotation_that_is_known(small_groups):
    with pytest.raises(ValueError, match="how layer 1 rotates its keys is not known"):
        Engine(kind("shared").model, kv_dtype="kvquant3", num_blocks=9, block_size=4)


@pytest.mark.parametrize("seed", [0])
def test_a_rule_per_layer(seed):
    check_schedules("windows", "int4,sliding=native,first=1:int8", seed + 3)


@pytest.mark.parametrize("name", ["latent", "compressed", "indexed"])
def test_groups_are_refused_where_there_are_no_keys_and_values(name):
    with pytest.raises(ValueError, match="is for keys and values of every token"):
        Engine(kind(name).model, kv_dtype="kivi2", num_blocks=9, block_size=128)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "nvfp4", "kivi2", "kvquant3"])
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
    # attention of these random models is sharp on purpose: no text is this hard
    bounds = {"int8": (2e-3, 0.9), "int4": (1.0, 0.5), "nvfp4": (1.0, 0.5), "kivi2": (2.0, 0.3), "kvquant3": (1.0, 0.4)}
    assert 0 < kl < bounds[kv_dtype][0] and top1 >= bounds[kv_dtype][1], (kl, top1)


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


@pytest.mark.parametrize("kv_dtype", ["int4", "nvfp4", "int8", "kivi2"])
def test_pages_survive_a_copy_bit_for_bit(kv_dtype, small_groups):
    """Scales lie in the page, so whoever moves pages moves them too."""
    tiny = kind("full")
    engine = Engine(tiny.model, kv_dtype=kv_dtype, num_blocks=40, block_size=4)
    engine.add_request(list(range(20)), PARAMS)
    engine.step()
    for group in range(len(engine.groups)):
        page = next(p for p in engine.cache.block_table("0", group) if p)
        engine.storage.copy([(group, page, 39)])
        for buffer in engine.storage.buffers.values():
            assert buffer.shape[0] == 40
        moved = [b for b in engine.storage.buffers.values() if torch.equal(b[39], b[page])]
        assert moved


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
