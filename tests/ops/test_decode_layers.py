"""A run of layers in one launch against the small operations: equal to 1e-5, in the stream and in the pages."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch
from paged import fill

from kvlab.ops import numba_support
from kvlab.ops.decode_layers import DecodeLayer, LayerStack, decode_layers, fuses
from kvlab.ops.decode_layers import reference as composed
from kvlab.ops.mlp import MLPWeights
from kvlab.ops.qkv import QKVWeights

pytestmark = pytest.mark.skipif(not numba_support.available(), reason="Numba is not installed")
HIDDEN, HEADS, KV_HEADS, DIM, WIDTH = 44, 6, 2, 12, 37


@pytest.fixture(autouse=True)
def cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAB_OPS", "cpu")


def layer(extras: bool, window: int, seed: int) -> DecodeLayer:
    rng = torch.Generator().manual_seed(seed)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng) / shape[-1] ** 0.5

    def extra(*shape: int) -> torch.Tensor | None:
        return new(*shape) if extras else None

    total = HEADS + 2 * KV_HEADS
    qkv = QKVWeights(
        1 + new(HIDDEN), new(total * DIM, HIDDEN), extra(total * DIM), extra(DIM), extra(DIM), 1e-5,
        HEADS, KV_HEADS, DIM,
    )  # fmt: skip
    feed = MLPWeights(
        1 + new(HIDDEN), new(2 * WIDTH, HIDDEN), new(HIDDEN, WIDTH), 1e-6, extra(2 * WIDTH), extra(HIDDEN)
    )
    softcap = 2.0 if extras else 0.0
    return DecodeLayer(qkv, new(HIDDEN, HEADS * DIM), extra(HIDDEN), feed, 0.4, window, softcap)


def case(seq_lens: list[int], padded: int, windows: list[int], extras: bool):
    """(x, stack, views, batches, angles): layers with pools of their own, one block table for each window."""
    stack = LayerStack(tuple(layer(extras, w, i) for i, w in enumerate(windows)))
    lens = ([1] * len(seq_lens), seq_lens)
    # a seed draws a block table and what stands in the pages it names
    paged = [fill("fp32", (KV_HEADS, DIM, 5), lens, padded, seed=w) for w in windows]
    batch = {w: p.batch for w, p in zip(windows, paged, strict=True)}
    rows = len(seq_lens) + padded
    if padded:  # as the runner pads: sequences of length 0 behind the live ones
        for w, b in batch.items():
            batch[w] = dataclasses.replace(
                b,
                query_start_loc=torch.cat((b.query_start_loc, b.query_start_loc[-1:].repeat(padded))),
                seq_lens=torch.cat((b.seq_lens, torch.zeros(padded, dtype=torch.int32))),
                block_table=torch.cat((b.block_table, torch.zeros_like(b.block_table[:1]).repeat(padded, 1))),
                num_seqs=rows,
            )
    angles = torch.randn(rows, DIM // 2)
    return torch.randn(rows, HIDDEN), stack, [p.views for p in paged], [batch[w] for w in windows], angles


@pytest.mark.parametrize("extras", [False, True], ids=["plain", "biases-norms-softcap"])
@pytest.mark.parametrize("padded", [0, 2])
@pytest.mark.parametrize("seq_lens", [[1], [300], [7, 130, 128, 1, 45]], ids=str)
def test_one_launch_gives_the_bits_of_the_small_operations(seq_lens, padded: int, extras: bool) -> None:
    x, stack, views, batches, angles = case(seq_lens, padded, [0, 6, 0], extras)
    tables = angles.cos(), angles.sin()
    assert fuses(x, stack, views, batches)
    kept, before = x.clone(), [v.buffer.clone() for v in views]
    want = composed.decode_layers(x, stack, views, batches, tables)
    pages = [v.buffer.clone() for v in views]
    for v, bytes_ in zip(views, before, strict=True):
        v.buffer.copy_(bytes_)
    for _ in range(3):  # threads meet differently every time
        got = decode_layers(x, stack, views, batches, tables)
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        for v, bytes_ in zip(views, pages, strict=True):
            a, b = v.buffer.view(torch.float32), bytes_.view(torch.float32)
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.equal(x, kept), "the residual stream is the caller's"


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    x, stack, views, batches, angles = case([300, 5, 257, 64], 0, [0, 0, 9], True)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 2, 2):
            torch.set_num_threads(threads)
            results.append(decode_layers(x, stack, views, batches, (angles.cos(), angles.sin())))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], r) for r in results[1:])


def test_other_pools_of_the_same_model_are_not_mistaken_for_the_first() -> None:
    x, stack, views, batches, angles = case([20, 33], 0, [0], False)
    tables = angles.cos(), angles.sin()
    first = decode_layers(x, stack, views, batches, tables)
    other = fill("fp32", (KV_HEADS, DIM, 5), ([1, 1], [20, 33]), seed=5)
    second = decode_layers(x, stack, [other.views], [other.batch], tables)
    want = composed.decode_layers(x, stack, [other.views], [other.batch], tables)
    torch.testing.assert_close(second, want, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(first, second, rtol=1e-3)


def test_layers_do_not_keep_the_pages_of_an_engine_that_is_gone() -> None:
    x, stack, views, batches, angles = case([20, 33], 0, [0, 0], False)
    decode_layers(x, stack, views, batches, (angles.cos(), angles.sin()))
    buffers = [weakref.ref(v.buffer) for v in views]
    assert all(buffer() is not None for buffer in buffers)
    del views
    gc.collect()
    assert all(buffer() is None for buffer in buffers) and stack.layers


@pytest.mark.parametrize("change", ["rows", "chunk", "format", "widths", "fp64"])
def test_what_the_launch_cannot_run_goes_the_other_way(change: str) -> None:
    x, stack, views, batches, _ = case([3, 4], 0, [0, 0], False)
    if change == "rows":
        x = x.repeat(200, 1)
    if change == "chunk":
        batches = [dataclasses.replace(b, max_query_len=2) for b in batches]
    if change == "format":
        views = [views[0], fill("bf16", (KV_HEADS, DIM, 5), ([1], [3])).views]
    if change == "widths":
        narrow = stack.layers[1]
        feed = dataclasses.replace(narrow.mlp, down=torch.randn(HIDDEN, WIDTH - 1))
        stack = LayerStack((stack.layers[0], dataclasses.replace(narrow, mlp=feed)))
    if change == "fp64":
        x = x.double()
    assert not fuses(x, stack, views, batches)
