"""Every kernel checked and measured on one GPU: `make bench-gpu`, or `python -m kvlab.lab.bench_gpu`.

Needs torch, triton and numpy, no downloads: weights and keys are random, shapes are those of named models. Stages run in
order and the result is written after each, so that a run that was cut off goes on where it stopped; `--stage` runs one
again. On a machine without a GPU only `check` runs, in Triton's interpreter (TRITON_INTERPRET=1): no figure is invented.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvlab.lab.bench_gpu_check import check
from kvlab.lab.kernels.cost import Cost, attention_cost
from kvlab.lab.kernels.shapes import SHAPES, Shape
from kvlab.ops.attention import triton_ as attention
from kvlab.ops.attention.rules import Rules
from kvlab.ops.batch import AttentionBatch, make_batch
from kvlab.ops.views import PageViews, page_views
from kvlab.ops.write_kv import torch_ as write
from kvlab.specs.formats import get_format
from kvlab.specs.layout import page_layout
from kvlab.specs.parts import Attention

RESULT = Path("book/results/bench_gpu.json")
PAGE = 16
FORMATS = ("bf16", "fp8_e4m3", "int8", "int4", "mxfp4")
BATCHES = (1, 8, 32)
WARM, REPEATS = 3, 11


def captured(run: Callable[[], None]) -> Callable[[], None]:
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


def seconds(run: Callable[[], None]) -> float:
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
    """How many layers take their turn so that their bytes are at least four times the L2 cache."""
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 * 2**20)
    return max(2, -(-4 * cache // n_bytes))


def pool(shape: Shape, device: torch.device) -> tuple[PageViews, AttentionBatch]:
    """Pages of random rows in random order, and the batch that decodes over them."""
    per = -(-shape.context // PAGE)
    part = Attention(shape.kv_heads, shape.dim, shape.value_dim or shape.dim, get_format(shape.fmt))
    layout = page_layout(part, PAGE)
    buffer = torch.zeros((per * shape.batch + 1, layout.page_bytes), dtype=torch.uint8, device=device)
    views = page_views(buffer, layout)
    table = (torch.randperm(per * shape.batch) + 1).to(torch.int32).view(shape.batch, per).to(device)
    slots = (table.long()[:, :, None] * PAGE + torch.arange(PAGE, device=device)).flatten(1)[:, : shape.context]
    for row in slots:
        size = (shape.context, shape.kv_heads)
        rows = [torch.randn(*size, n, device=device, dtype=torch.bfloat16) for n in (views.key_dim, views.value_dim)]
        write.write_kv(*rows, views, row)
    return views, make_batch([1] * shape.batch, [shape.context] * shape.batch, table, PAGE)


def rate(cost: Cost, time: float) -> dict[str, float]:
    """A time with the bandwidth that it means for the bytes that had to move."""
    return {"us": time * 1e6, "gb_per_s": cost.bytes / time / 1e9}


def stage_copy(device: torch.device) -> dict[str, Any]:
    """The bandwidth of a device copy, read and written bytes: what kernels are compared with."""
    n = min(2**31, torch.cuda.mem_get_info(device)[0] // 4)
    source, target = (torch.zeros(n, dtype=torch.uint8, device=device) for _ in range(2))
    time = seconds(lambda: target.copy_(source))
    return {"bytes": 2 * n, "gb_per_s": 2 * n / time / 1e9}


def decode_row(shape: Shape, device: torch.device) -> dict[str, Any]:
    """One decode, all layers in turn: time a layer, bandwidth of the bytes it had to move."""
    cost = attention_cost(shape)
    layers = layers_for(cost.read_bytes, device)
    views, batch = pool(shape, device)
    copies = [page_views(views.buffer.clone(), views.layout) for _ in range(layers - 1)]
    query = torch.randn(shape.batch, shape.heads, shape.dim, device=device, dtype=torch.bfloat16)
    out = query.new_empty((shape.batch, shape.heads, views.value_dim))
    sinks = torch.zeros(shape.heads, device=device) if shape.sinks else None
    rules = Rules(shape.dim**-0.5, shape.window, shape.softcap, shape.chunk, sinks)

    def step() -> None:
        for layer in (views, *copies):
            attention.paged_attention(query, layer, batch, rules, out)

    return {"layers": layers, "batch": shape.batch, "context": shape.context, **rate(cost, seconds(step) / layers)}


def stage_decode(device: torch.device) -> dict[str, Any]:
    """Llama-3 8B's decode by format and batch at 8k tokens."""
    llama = SHAPES["llama-3-8b"]
    shapes = {f"{fmt} x {b}": replace(llama, fmt=fmt, batch=b) for fmt in FORMATS for b in BATCHES}
    return {name: decode_row(shape, device) for name, shape in shapes.items()}


def stage_shapes(device: torch.device) -> dict[str, Any]:
    """Decode of every named shape in bf16."""
    return {name: decode_row(shape, device) for name, shape in SHAPES.items()}


def stage_against(device: torch.device) -> dict[str, Any]:
    """The same attention over contiguous memory by torch, in the same process; what is not installed is named."""
    from torch.nn.functional import scaled_dot_product_attention

    found: dict[str, Any] = {}
    for b in BATCHES:
        shape = replace(SHAPES["llama-3-8b"], batch=b)
        cost = attention_cost(shape)
        layers = layers_for(cost.read_bytes, device)
        size = (b, shape.kv_heads, shape.context, shape.dim)
        sides = [[torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(2)] for _ in range(layers)]
        query = torch.randn(b, shape.heads, 1, shape.dim, device=device, dtype=torch.bfloat16)

        def step(sides=sides, query=query) -> None:
            for key, value in sides:
                scaled_dot_product_attention(query, key, value, enable_gqa=True)

        found[f"sdpa contiguous x {b}"] = rate(cost, seconds(step) / layers)
        found[f"paged x {b}"] = decode_row(shape, device)
        found[f"flex x {b}"] = _flex(query, sides, cost)
    return found


def _flex(query: torch.Tensor, sides: list, cost: Cost) -> dict[str, Any]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention)

    def step() -> None:
        for key, value in sides:
            compiled(query, key, value, enable_gqa=True)

    try:
        return rate(cost, seconds(step) / len(sides))
    except Exception as error:  # a compiler that is not there must not end the run
        return {"not measured": f"{type(error).__name__}: {error}"[:200]}


STAGES: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    "check": check, "copy": stage_copy, "decode": stage_decode, "shapes": stage_shapes, "against": stage_against,
}  # fmt: skip


def provenance(device: torch.device) -> dict[str, Any]:
    """Where the figures come from: `kvlab.lab.record` with the driver."""
    from kvlab.lab import record

    found = record.provenance("python -m kvlab.lab.bench_gpu", ("torch", "triton", "numpy"))
    found["what"] = "every kernel checked against its reference on the device, then measured"
    found["cuda"] = torch.version.cuda or torch.version.hip or "none: Triton's interpreter on the CPU"
    if device.type == "cuda":
        found["memory_bytes"] = torch.cuda.get_device_properties(device).total_memory
    return found


def main(arguments: list[str] | None = None) -> int:
    """Runs what is missing in the result; 1 where a kernel is wrong on the device, 2 for a stage that cannot run here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", choices=list(STAGES), help="only this stage, again")
    parser.add_argument("--out", type=Path, default=RESULT, help=f"the JSON file (default: {RESULT})")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = json.loads(options.out.read_text(encoding="utf-8")) if options.out.is_file() else {"stages": {}}
    result |= provenance(device)
    for name in [options.stage] if options.stage else [s for s in STAGES if s not in result["stages"]]:
        if device.type == "cpu" and name != "check":
            print(
                f"bench-gpu: stage {name}: needs a GPU; this machine has none, and nothing is recorded", file=sys.stderr
            )
            return 2
        print(f"stage {name}", flush=True)
        result["stages"][name] = STAGES[name](device)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if name == "check" and result["stages"][name]["wrong"]:
            print("bench-gpu: wrong on this device: " + ", ".join(result["stages"][name]["wrong"]), file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
