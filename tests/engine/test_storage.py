"""Predicted bytes, allocated bytes and written bytes are the same number, looked at from outside the engine."""

import pytest
import torch

from kvlab.engine import Engine, SamplingParams
from kvlab.engine.sizing import _container
from kvlab.engine.storage import apart
from kvlab.plan.policies import paged_pool_bytes

FORMATS = ["fp64", "fp32", "bf16", "fp16", "fp8_e4m3", "int8"]
SENTINEL = 0xA5


@pytest.fixture(autouse=True)
def plain_operations(monkeypatch):
    """Where bytes lie does not depend on the kernel that writes them; the plain one needs no compiling."""
    monkeypatch.setenv("KVLAB_OPS", "reference")


def storages(engine):
    """Bytes of each distinct storage the pool's tensors live in."""
    return {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in engine.storage.buffers.values()}


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_the_pool_is_what_the_plan_says(every_tiny, kv_dtype):
    engine = Engine(every_tiny.model("fp32"), kv_dtype=kv_dtype, num_blocks=9, block_size=3)
    # by hand: 9 pages of k and v, 2 heads, 3 tokens, rows of 6 values padded to 16 bytes, then the scales
    codes = {"fp64": 48, "fp32": 32, "bf16": 16, "fp16": 16, "fp8_e4m3": 16, "int8": 16}[kv_dtype]
    scales = 2 * 32 if kv_dtype == "int8" else 0  # 2 heads x 3 tokens x 4 bytes, to 16 each
    page = 2 * 2 * 3 * codes + scales
    layers = every_tiny.config["num_hidden_layers"]
    assert sum(storages(engine).values()) == 9 * layers * page
    assert len(storages(engine)) == layers
    assert engine.kv.predicted_bytes == engine.kv.allocated_bytes == paged_pool_bytes(engine.groups, engine.num_blocks)
    assert sum(storages(engine).values()) == engine.kv.predicted_bytes


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("prompt_tokens", [1, 4, 7])
def test_bytes_written_after_n_tokens_are_the_bytes_of_n(every_tiny, kv_dtype, prompt_tokens):
    """Two fills, because a written byte may happen to equal one of them: it cannot equal both."""
    changed = {}
    for sentinel in (SENTINEL, SENTINEL ^ 0xFF):
        engine = Engine(every_tiny.model("fp32"), kv_dtype=kv_dtype, num_blocks=9, block_size=3)
        engine.storage.fill(sentinel)
        engine.add_request(list(range(prompt_tokens)), SamplingParams(2))
        engine.step()
        used = engine.kv.used_bytes
        for member, buffer in engine.storage.buffers.items():
            changed[member] = changed.get(member, False) | (buffer != sentinel)
    # up to the window of 7 nothing is dropped
    assert sum(int(mask.sum()) for mask in changed.values()) == engine.spec.bytes_at(prompt_tokens) == used
    assert not any(bool(mask[0].any()) for mask in changed.values()), "the null page was written"


def test_used_bytes_follow_the_window_and_peaks_stay(tiny):
    engine = Engine(tiny("window").model("fp32"), num_blocks=20, block_size=2)
    engine.add_request(list(range(12)), SamplingParams(3))
    engine.step()
    entry = 2 * 2 * 6 * 4 * 2  # k and v, heads, values, fp32, layers
    assert engine.kv.used_bytes == 7 * entry
    # the next query, at 12, reads 6 on: pages 3, 4, 5
    assert engine.kv.held_bytes == 3 * engine.groups[0].block_bytes
    while engine.scheduler.has_work:
        engine.step()
    assert engine.kv.held_bytes == engine.kv.used_bytes == 0
    assert engine.kv.peak_held_bytes == 6 * engine.groups[0].block_bytes
    assert engine.kv.peak_used_bytes == 7 * entry


def test_a_budget_in_bytes_is_split_so_that_both_groups_fit_as_many_sequences(tiny):
    model = tiny("both").model("fp32")
    engine = Engine(model, kv_bytes=400_000, block_size=4, max_batched_tokens=16)
    full, window = engine.groups
    # at 128 tokens: 32 pages of the one layer, and for 7 - 1 + 16 tokens 7 of the other two
    sequence = 32 * full.block_bytes + 7 * window.block_bytes
    left = 400_000 - full.block_bytes - window.block_bytes
    assert engine.num_blocks == (1 + 32 * left // sequence, 1 + 7 * left // sequence)
    assert engine.kv.allocated_bytes <= 400_000


def test_no_more_is_taken_than_all_sequences_can_fill(tiny):
    engine = Engine(tiny("full").model("fp32"), kv_bytes=10**9, block_size=4, max_num_seqs=3)
    assert engine.num_blocks == (1 + 3 * 32,)


def test_pages_are_taken_from_free_memory_when_nothing_is_said(tiny, caplog):
    with caplog.at_level("INFO", "kvlab.engine"):
        engine = Engine(tiny("full").model("fp32"), max_num_seqs=2)
    assert engine.num_blocks == (1 + 2 * 8,)
    assert "16 pages of full, 16 tokens each; at most 2 sequences of 128 tokens" in caplog.text


def test_files_that_were_read_do_not_count_as_used_by_the_container(tmp_path):
    for name, text in (
        ("memory.max", "1000"),
        ("memory.current", "990"),
        ("memory.stat", "anon 300\ninactive_file 600"),
    ):
        (tmp_path / name).write_text(text + "\n")
    assert _container(tmp_path) == 610
    (tmp_path / "memory.max").write_text("max\n")
    assert _container(tmp_path) is None


def test_pages_that_the_kernels_could_not_read_are_refused(tiny, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", "cpu")
    with pytest.raises(ValueError, match="kv_dtype 'fp64': needs a model in fp64"):
        Engine(tiny("full").model("fp32"), num_blocks=4, kv_dtype="fp64")
    Engine(tiny("full").model("fp64"), num_blocks=4, kv_dtype="fp64")


def test_nothing_of_the_pool_is_a_float_tensor(tiny):
    engine = Engine(tiny("full").model("fp32"), num_blocks=4)
    assert {b.dtype for b in engine.storage.buffers.values()} == {torch.uint8}


def test_copies_happen_as_if_one_after_the_other(every_tiny):
    """One launch may do its pairs in any order, so pages that an earlier copy wrote or still reads begin another."""
    copies = [(0, 1, 4), (0, 1, 5), (0, 4, 6), (0, 2, 1), (0, 3, 1), (0, 7, 8)]
    assert apart(copies) == [
        (0, [(1, 4), (1, 5)]), (0, [(4, 6), (2, 1)]), (0, [(3, 1), (7, 8)]),
    ]  # fmt: skip
    assert apart([(0, 1, 2), (1, 1, 2), (0, 3, 2)]) == [(0, [(1, 2)]), (1, [(1, 2)]), (0, [(3, 2)])]
    engine = Engine(every_tiny.model("fp32"), num_blocks=9, block_size=3)
    for rows in engine.storage.rows(0):
        rows.copy_(torch.arange(9, dtype=torch.uint8)[:, None].expand_as(rows))
    engine.copy_pages(copies)
    for rows in engine.storage.rows(0):
        assert (rows == torch.tensor([0, 3, 2, 3, 1, 1, 1, 7, 7], dtype=torch.uint8)[:, None]).all()
