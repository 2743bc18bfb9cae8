"""Times on a GPU: a call captured as a graph, repeated, over as many layers as keep the cache cold."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from kvlab.lab.kernels.cost import Cost
from kvlab.lab.kernels.tensors import on
from kvlab.ops.triton_support import Launch

WARM, REPEATS = 3, 11


def captured(run: Callable[[], Any]) -> Callable[[], None]:
    """`run` as one CUDA graph, as an engine replays a decode: without it Python's launches would be what is timed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles and allocates before the capture
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def seconds(run: Callable[[], Any]) -> float:
    """Median time of `run` on the device, captured as a graph, after warm-up."""
    run, times = captured(run), []
    for repeat in range(WARM + REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        if repeat >= WARM:
            times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def layers_for(n_bytes: int, device: torch.device) -> int:
    """How many layers take their turn so that their bytes are at least four times the L2 cache; 256 at most."""
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 * 2**20)
    return min(256, max(2, -(-4 * cache // n_bytes)))


def rate(cost: Cost, time: float) -> dict[str, float]:
    """A time with the bandwidth and the arithmetic rate that it means for what had to move and to be computed."""
    return {
        "us": time * 1e6,
        "bytes": cost.bytes,
        "gb_per_s": cost.bytes / time / 1e9,
        "tflops": cost.flops / time / 1e12,
    }


def launched(build: Callable[[], list[Launch]], cost: Cost, device: torch.device) -> dict[str, Any]:
    """The launches of one layer, all layers in turn: time a layer, and what that means for the bytes it had to move."""
    layers = layers_for(cost.bytes, device)
    with on(device):
        launches = [launch for _ in range(layers) for launch in build()]

    def step() -> None:
        for launch in launches:
            launch.run()

    return {"layers": layers, **rate(cost, seconds(step) / layers)}
