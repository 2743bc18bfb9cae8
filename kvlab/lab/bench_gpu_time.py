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
LAYERS = 256  # at most: launches of one graph
MEMORY = 0.8  # share of the free memory that a row's layers may fill


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


def l2_cache(device: torch.device) -> int:
    """Bytes of the device's L2 cache; 64 MiB where torch does not know."""
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 * 2**20)


def layers_for(n_bytes: int, device: torch.device, built: int = 0) -> int:
    """How many layers of `n_bytes` take their turn: as many as move four times the L2 cache, `LAYERS` at most, and no more
    than fit the free memory with the `built` bytes of each, of which there is one already; `is_cold` says what came of it.
    """
    wanted = min(LAYERS, max(2, -(-4 * l2_cache(device) // n_bytes)))
    if not built:
        return wanted
    return max(1, min(wanted, 1 + int(MEMORY * torch.cuda.mem_get_info(device)[0]) // built))


def is_cold(n_bytes: int, layers: int, device: torch.device) -> bool:
    """Whether a layer finds nothing of its last turn in the L2 cache: all layers move at least twice what it holds."""
    return layers * n_bytes >= 2 * l2_cache(device)


def built_bytes(launches: list[Launch]) -> int:
    """Bytes of all memory behind the launches' tensors, each once: whole pools, of which a call may touch little."""
    tensors = [x for launch in launches for x in launch.args.values() if isinstance(x, torch.Tensor)]
    memory = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    return sum(memory.values())


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
    with on(device):
        launches = build()
        layers = layers_for(cost.bytes, device, built_bytes(launches))
        launches += [launch for _ in range(layers - 1) for launch in build()]

    def step() -> None:
        for launch in launches:
            launch.run()

    cold = is_cold(cost.bytes, layers, device)
    return {"layers": layers, "cold": cold, **rate(cost, seconds(step) / layers)}
