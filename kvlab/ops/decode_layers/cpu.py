"""decode_layers in one launch: what the kernel needs of weights and pages, gathered as addresses.

A model's weights are told to the kernel as a table of addresses, one row a layer, so that one compiled kernel fits
every number and size of layers, and a step hands over a few arrays instead of hundreds.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.decode_layers import LayerStack
from kvlab.ops.decode_layers.cpu_layers import run
from kvlab.ops.numba_support import launch, num_threads
from kvlab.ops.views import PageViews


def decode_layers(
    x: torch.Tensor,
    stack: LayerStack,
    views: Sequence[PageViews],
    batches: Sequence[AttentionBatch],
    angles: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """See `kvlab.ops.decode_layers.decode_layers`; fp32 only."""
    if "weights" not in stack.prepared:
        stack.prepared["weights"] = _weights(stack)
    weights, reals, sizes = stack.prepared["weights"]
    y = x.clone(memory_format=torch.contiguous_format)
    rows = tuple(a.contiguous().numpy() for a in angles)
    batch = batches[0]
    kinds, kind_of, alive = _kinds(stack, batches)
    step = (*rows, batch.seq_lens.numpy(), batch.num_decodes, kinds, kind_of)
    launch(run, weights, reals, _pages(stack, views), sizes, step, y.numpy(), num_threads())
    del alive  # the kernel has read them
    return y


def _address(tensor: torch.Tensor | None) -> int:
    if tensor is None:
        return 0
    if tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise ValueError(f"weight {tuple(tensor.shape)} {tensor.dtype}: must be contiguous fp32")
    return tensor.data_ptr()


def _weights(stack: LayerStack) -> tuple[np.ndarray, np.ndarray, tuple[int, int, int, int]]:
    """(addresses int64 [L, 12], (attention eps, scale, softcap, mlp eps) fp64 [L, 4], sizes)."""
    table, reals = [], []
    for layer in stack.layers:
        a, m = layer.qkv, layer.mlp
        tensors = (a.norm, a.weight, a.bias, a.q_norm, a.k_norm, layer.out, layer.out_bias,
                   m.norm, m.gate_up, m.gate_up_bias, m.down, m.down_bias)  # fmt: skip
        table.append([*map(_address, tensors)])
        reals.append([a.eps, layer.scale, layer.softcap, m.eps])
    return np.array(table, np.int64), np.array(reals, np.float64), stack.layers[0].sizes


def _pages(stack: LayerStack, views: Sequence[PageViews]) -> np.ndarray:
    """int64 [L, 11]: address, number of pages, values of a page, geometry; made once for the pools of an engine."""
    known, table = stack.prepared.get("pages", ((), None))
    if len(known) != len(views) or any(a() is not b for a, b in zip(known, views, strict=True)):
        table = np.array([[v.buffer.data_ptr(), *v.codes.shape, *v.geometry] for v in views], np.int64)
        # the layers outlive the engine whose pages these are, and must not keep them
        stack.prepared["pages"] = (tuple(map(weakref.ref, views)), table)
    return table


def _kinds(stack: LayerStack, batches: Sequence[AttentionBatch]) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Kinds of layers, by block table and window.

    Returns (int64 [n, 4]: addresses of block table and slots, width of the table, window; int64 [L], each layer's
    kind; arrays that must live until the launch is over).
    """
    rows: list[list[int]] = []
    alive: list[np.ndarray] = []
    seen: dict[tuple[int, int], int] = {}
    kind_of = []
    for layer, batch in zip(stack.layers, batches, strict=True):
        key = (id(batch), layer.window)
        if key not in seen:
            seen[key] = len(rows)
            table, slots = batch.arrays[2], batch.slot_mapping.contiguous().numpy()
            rows.append([table.ctypes.data, slots.ctypes.data, table.shape[1], layer.window])
            alive += [table, slots]
        kind_of.append(seen[key])
    return np.array(rows, np.int64), np.array(kind_of, np.int64), alive
