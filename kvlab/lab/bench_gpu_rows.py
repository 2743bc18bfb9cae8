"""What the GPU bench measures: the production configurations, by stage, and the same attention by others."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor

from kvlab.lab import bench_gpu_time as clock
from kvlab.lab.kernels.configs import PAGE, configs, decode, ragged
from kvlab.lab.kernels.cost import attention_cost
from kvlab.lab.kernels.shapes import SHAPES, Shape

Row = Callable[[], dict[str, Any]]
FORMATS = ("bf16", "fp8_e4m3", "int8", "int4", "mxfp4")
BATCHES = (1, 8, 32)
MODEL = "llama-3-8b"
# share of a device copy's bandwidth that an H200 should reach at 8k tokens and batches of 8 and more
TARGETS = {"bf16": 0.80, "fp8_e4m3": 0.70, "int4": 0.55}
# stage -> configurations of `kvlab kernels`
STAGES = {
    "shapes": ("decode/*/bf16",),
    "prefill": ("prefill/*", "verify-tree/*"),
    "kernels": ("mla-decode/*", "closed-decode/*", "ssd-decode/*", "delta-decode/*", "page-scores/*",
                "selected-decode/*", "write/*", "copy-pages/*"),
}  # fmt: skip


def copy_rows(device: torch.device) -> dict[str, Row]:
    """The bandwidth of a device copy, read and written bytes: what kernels are compared with."""

    def run() -> dict[str, Any]:
        n = min(2**31, torch.cuda.mem_get_info(device)[0] // 4)
        source, target = (torch.zeros(n, dtype=torch.uint8, device=device) for _ in range(2))
        return {"bytes": 2 * n, "gb_per_s": 2 * n / clock.seconds(lambda: target.copy_(source)) / 1e9}

    return {"copy": run}


def decode_rows(device: torch.device) -> dict[str, Row]:
    """One model's decode by format and batch at 8k tokens, with the share of the copy's bandwidth that is aimed at."""
    rows: dict[str, Row] = {}
    for fmt in FORMATS:
        for batch in BATCHES:
            shape = replace(SHAPES[MODEL], fmt=fmt, batch=batch)
            aim = {"target_of_copy": TARGETS[fmt]} if fmt in TARGETS and batch >= 8 else {}
            rows[f"{fmt} x {batch}"] = lambda s=shape, aim=aim: _decode(s, device) | aim
    return rows


def _decode(shape: Shape, device: torch.device) -> dict[str, Any]:
    found = clock.launched(lambda: decode(shape), attention_cost(shape), device)
    return {"batch": shape.batch, "context": shape.context, **found}


def config_rows(stage: str, device: torch.device) -> dict[str, Row]:
    """The configurations of `kvlab kernels` that belong to `stage`, with the bytes counted there."""
    chosen = [c for c in configs() if any(fnmatch(c.name, pattern) for pattern in STAGES[stage])]
    rows: dict[str, Row] = {c.name: lambda c=c: clock.launched(c.build, c.cost, device) for c in chosen}
    if stage == "prefill":
        rows["prefill-ragged/" + MODEL] = lambda: clock.launched(*ragged(SHAPES[MODEL]), device)
    return rows


def against_rows(device: torch.device) -> dict[str, Row]:
    """The same decode over contiguous memory by torch, and by what else is installed; all in this process."""
    rows: dict[str, Row] = {}
    for batch in BATCHES:
        shape = replace(SHAPES[MODEL], batch=batch)
        rows[f"paged x {batch}"] = lambda s=shape: _decode(s, device)
        for name, other in OTHERS.items():
            rows[f"{name} x {batch}"] = lambda s=shape, o=other: _other(o, s, device)
    return rows


def _other(make: Callable[..., Callable[[], Any]], shape: Shape, device: torch.device) -> dict[str, Any]:
    cost = attention_cost(shape)
    layers = clock.layers_for(cost.bytes, device)
    steps = [make(shape, device) for _ in range(layers)]

    def step() -> None:
        for one in steps:
            one()

    cold = clock.is_cold(cost.bytes, layers, device)
    return {"layers": layers, "cold": cold, **clock.rate(cost, clock.seconds(step) / layers)}


def _contiguous(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Query [B, Hq, 1, D], key and value [B, Hkv, n, D]."""
    size = (shape.batch, shape.kv_heads, shape.context, shape.dim)
    key, value = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return torch.randn(shape.batch, shape.heads, 1, shape.dim, device=device, dtype=torch.bfloat16), key, value


def sdpa(shape: Shape, device: torch.device) -> Callable[[], Any]:
    """torch's attention over contiguous memory."""
    from torch.nn.functional import scaled_dot_product_attention

    query, key, value = _contiguous(shape, device)
    return lambda: scaled_dot_product_attention(query, key, value, enable_gqa=True)


def flex(shape: Shape, device: torch.device) -> Callable[[], Any]:
    """torch's compiled flex attention over contiguous memory."""
    from torch.nn.attention.flex_attention import flex_attention

    query, key, value = _contiguous(shape, device)
    compiled = torch.compile(flex_attention, dynamic=False)  # else the second batch size gets a kernel for any
    return lambda: compiled(query, key, value, enable_gqa=True)


def _pages(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query [B, Hq, D], keys and values [pages, PAGE, Hkv, D], table int32 [B, pages of a sequence]."""
    per = -(-shape.context // PAGE)
    size = (per * shape.batch, PAGE, shape.kv_heads, shape.dim)
    key, value = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(2))
    table = torch.randperm(per * shape.batch, device=device).to(torch.int32).view(shape.batch, per)
    return torch.randn(shape.batch, shape.heads, shape.dim, device=device, dtype=torch.bfloat16), key, value, table


def flashinfer(shape: Shape, device: torch.device) -> Callable[[], Any]:
    """FlashInfer's paged decode."""
    library = importlib.import_module("flashinfer")
    query, key, value, table = _pages(shape, device)
    per = table.shape[1]
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(128 * 2**20, dtype=torch.uint8, device=device), "NHD", use_tensor_cores=True
    )
    starts = torch.arange(shape.batch + 1, dtype=torch.int32, device=device) * per
    last = torch.full((shape.batch,), (shape.context - 1) % PAGE + 1, dtype=torch.int32, device=device)
    wrapper.plan(
        starts, table.flatten(), last, shape.heads, shape.kv_heads, shape.dim, PAGE,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    return lambda: wrapper.run(query, (key, value))


def vllm(shape: Shape, device: torch.device) -> Callable[[], Any]:
    """The FlashAttention that vLLM brings, over its pages, in the version that vLLM takes: 3 on Hopper, else 2."""
    library = importlib.import_module("vllm.vllm_flash_attn")
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    version = 3 if hopper and library.is_fa_version_supported(3) else 2
    query, key, value, table = _pages(shape, device)
    starts = torch.arange(shape.batch + 1, dtype=torch.int32, device=device)
    lens = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device)
    return lambda: library.flash_attn_varlen_func(
        query, key, value, max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=shape.context, seqused_k=lens,
        softmax_scale=shape.dim**-0.5, causal=True, block_table=table, fa_version=version,
    )  # fmt: skip


OTHERS = {"sdpa contiguous": sdpa, "flex contiguous": flex, "flashinfer": flashinfer, "vllm": vllm}
