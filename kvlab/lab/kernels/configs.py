"""The production configurations: shapes that served models have, each as the launches of a real call.

On meta tensors where they are compiled, on tensors of a device where they are run (`kvlab.lab.kernels.tensors`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from kvlab.lab.kernels.cost import Cost, attention_cost, merge_cost, write_cost
from kvlab.lab.kernels.shapes import SHAPES, Shape
from kvlab.lab.kernels.tensors import BF16, chosen, numbers, real, shuffled_table
from kvlab.ops.attention import triton_ as attention
from kvlab.ops.attention.rules import Rules
from kvlab.ops.batch import AttentionBatch, make_batch
from kvlab.ops.tree import TreeMask
from kvlab.ops.triton_support import Launch
from kvlab.ops.views import PageViews, page_views
from kvlab.ops.write_kv import triton_ as write
from kvlab.specs.formats import get_format
from kvlab.specs.layout import page_layout
from kvlab.specs.parts import Attention

PAGE = 16  # tokens of a page
NEW, CHUNKS, WRITTEN = 512, 4, 64  # new tokens of a prefill chunk, chunks of a step; tokens of a cache write
WRITE_CONTEXT = 128  # of a written token's sequence: a write touches its own slot, and a pool is built for each layer


@dataclass(frozen=True)
class Config:
    """A kernel in one production configuration.

    Attributes:
        name: "kernel/shape/format".
        build: its launches, made inside `kvlab.ops.triton_support.building_for`; the first is the kernel's own.
        cost: what a call must move and compute.
        archs: targets that CI compiles it for; () for `--all` alone.
    """

    name: str
    build: Callable[[], list[Launch]] = field(repr=False)
    cost: Cost
    archs: tuple[str, ...] = ()


FULL = ("sm_80", "sm_90", "sm_100", "gfx942")
NVIDIA = FULL[:3]


def pages_of(shape: Shape) -> PageViews:
    """A pool's views for `shape`: every sequence's pages, and the null page."""
    part = Attention(shape.kv_heads, shape.dim, shape.value_dim or shape.dim, get_format(shape.fmt))
    layout = page_layout(part, PAGE)
    pages = shape.batch * -(-shape.context // PAGE) + 1
    return page_views(numbers(pages, layout.page_bytes, dtype=torch.uint8), layout)


def batch_of(shape: Shape) -> AttentionBatch:
    """The step of `shape`."""
    b, tokens = shape.batch, shape.batch * shape.new
    table = shuffled_table(b, -(-shape.context // PAGE))
    if real():
        return make_batch([shape.new] * b, [shape.context] * b, table, PAGE)
    ints = [numbers(n, dtype=torch.int32) for n in (b + 1, b)]
    longs = [numbers(tokens, dtype=torch.int64) for _ in range(2)]
    decodes = b if shape.new == 1 else 0
    return AttentionBatch(*ints, table, *longs, b, tokens, shape.new, shape.context, decodes)


def rules_of(shape: Shape) -> Rules:
    """Its attention rules."""
    sinks = numbers(shape.heads) if shape.sinks else None
    return Rules(shape.dim**-0.5, shape.window, shape.softcap, shape.chunk, sinks)


def decode(shape: Shape) -> list[Launch]:
    """Decode in splits and the merge."""
    dtype = torch.float16 if shape.fmt == "fp16" else BF16
    query = numbers(shape.batch, shape.heads, shape.dim, dtype=dtype)
    out = numbers(shape.batch, shape.heads, shape.value_dim or shape.dim, dtype=dtype)
    return attention.decode_launches(query, pages_of(shape), batch_of(shape), rules_of(shape), out)


def prefill(shape: Shape, tree: bool = False) -> list[Launch]:
    """Chunks of `shape.new` tokens, which are a tree or not."""
    tokens, b = shape.batch * shape.new, shape.batch
    dtype = torch.float16 if shape.fmt == "fp16" else BF16
    widths = shape.dim, shape.value_dim or shape.dim
    query, out = (numbers(tokens, shape.heads, n, dtype=dtype) for n in widths)
    batch = batch_of(shape)
    if tree:
        below = torch.ones(shape.new, shape.new).tril()
        mask = chosen((b, shape.new, shape.new), torch.bool, lambda: below.expand(b, -1, -1))
        nodes = TreeMask(mask, chosen((b,), torch.int64, lambda: torch.full((b,), shape.new)))
        batch = replace(batch, tree=nodes)
    return [attention.prefill_launch(query, pages_of(shape), batch, rules_of(shape), out)]


RAGGED = (512, 384, 200, 64, 17, 5)  # new tokens of a step's chunks; each ends at a context of its own


def ragged(shape: Shape) -> tuple[Callable[[], list[Launch]], Cost]:
    """Prefill of chunks of different lengths over contexts of different lengths, and its cost."""
    each = [replace(shape, new=min(new, shape.context), context=shape.context // (i + 1), batch=1)
            for i, new in enumerate(RAGGED)]  # fmt: skip
    each = [replace(one, new=min(one.new, one.context)) for one in each]
    costs = [attention_cost(one) for one in each]
    total = Cost(sum(c.read_bytes for c in costs), sum(c.write_bytes for c in costs), sum(c.flops for c in costs))

    def build() -> list[Launch]:
        wide = replace(shape, batch=len(each))
        table = shuffled_table(wide.batch, -(-shape.context // PAGE))
        batch = make_batch([one.new for one in each], [one.context for one in each], table, PAGE)
        query, out = (numbers(batch.num_tokens, shape.heads, shape.dim) for _ in range(2))
        return [attention.prefill_launch(query, pages_of(wide), batch, rules_of(shape), out)]

    return build, total


def cache_write(shape: Shape, pairs: bool = False) -> list[Launch]:
    """The cache write with rotation, of interleaved `pairs` or of halves."""
    tokens = shape.batch * shape.new
    key, value = (numbers(tokens, shape.kv_heads, n) for n in (shape.dim, shape.value_dim or shape.dim))
    batch = batch_of(shape)
    angles = write.Angles(*(numbers(shape.context, shape.dim // 2) for _ in range(2)), batch.positions, pairs)
    return [write.write_launch(key, value, pages_of(shape), batch.slot_mapping, angles)]


# what CI compiles; `--all` compiles every configuration for every target
CI = {
    "decode/llama-3-8b/bf16": FULL, "decode/gemma-2-9b/bf16": NVIDIA, "decode/gpt-oss-window/bf16": ("sm_90",),
    "decode/phi-2/bf16": ("sm_90",), "decode/falcon-7b/bf16": ("sm_90",), "decode/head-112/bf16": ("sm_90",),
    "decode/llama-3-8b/fp8_e4m3": NVIDIA, "decode/llama-3-8b/int8": ("sm_90",), "decode/llama-3-8b/int4": NVIDIA,
    "decode/llama-3-8b/int4_g32": ("sm_90",), "decode/llama-3-8b/mxfp4": ("sm_90",),
    "decode/llama-3-8b/int8_asym_g32": ("sm_90",), "decode/llama-3-8b/int4_sym_g32": ("sm_90",),
    "prefill/llama-3-8b/int8_asym_g32": ("sm_90",), "write/llama-3-8b/int4_sym_g32": ("sm_90",),
    "prefill/llama-3-8b/bf16": FULL, "prefill/gemma-2-9b/bf16": NVIDIA, "prefill/deepseek-expanded/bf16": ("sm_90",),
    "prefill/llama-3-8b/fp8_e4m3": ("sm_90",), "prefill/llama-3-8b/int4": FULL,
    "prefill/llama-3-8b/int4_g32": ("sm_90",), "prefill/llama-3-8b/nvfp4": NVIDIA, "prefill/llama-3-8b/mxfp4": ("sm_90",),
    "verify-tree/llama-3-8b/bf16": ("sm_90",), "verify-tree/llama-3-8b/int4": ("sm_90",),
    "merge/llama-3-8b/bf16": ("sm_90",), "write/llama-3-8b/bf16": FULL, "write/llama-3-8b/fp8_e4m3": ("sm_80", "sm_90"),
    "write/llama-3-8b/fp8_e5m2_row": ("sm_90",), "write/llama-3-8b/int8_asym": ("sm_90",),
    "write/glm-4-9b/bf16": ("sm_90",),
    "write/llama-3-8b/int4": ("sm_90",), "write/llama-3-8b/int4_g32": ("sm_90",), "write/llama-3-8b/nvfp4": ("sm_90",),
    "write/llama-3-8b/mxfp4": ("sm_90",), "write/llama-3-8b/int4_had": FULL, "write/llama-3-8b/int3_had": ("sm_90",),
    "mla-decode/deepseek-v3/bf16": NVIDIA, "mla-decode/deepseek-v3/fp8_e4m3": ("sm_90",),
    "closed-decode/llama-3-8b/kivi4": NVIDIA, "closed-decode/llama-3-8b/kivi2": ("sm_90",),
    "ssd-decode/mamba-2-2.7b/fp32": ("sm_90",),
    "delta-decode/qwen3-next/fp32": ("sm_90",), "page-scores/llama-3-8b/fp32": ("sm_90",),
    "selected-decode/llama-3-8b/bf16": ("sm_90",), "copy-pages/llama-3-8b/bf16": ("sm_90",),
}  # fmt: skip


def config_of(name: str, build: Callable[[], list[Launch]], cost: Cost) -> Config:
    return Config(name, build, cost, CI.get(name, ()))


def kernel_formats() -> list[str]:
    """The formats that the attention kernels read, one for each compiled kernel; without fp32, which is for tests."""
    kernels = list(attention.PACKED.values())
    packed = [fmt for i, fmt in enumerate(attention.PACKED) if kernels[i] not in kernels[:i]]
    return [fmt for fmt in attention.WHOLE if fmt != "fp32"] + packed


def _attention_configs() -> list[Config]:
    found = []
    for name, shape in SHAPES.items():
        if name != "deepseek-expanded":
            found.append(config_of(f"decode/{name}/bf16", lambda s=shape: decode(s), attention_cost(shape)))
        new = replace(shape, new=NEW, batch=CHUNKS)
        found.append(config_of(f"prefill/{name}/bf16", lambda s=new: prefill(s), attention_cost(new)))
    llama = SHAPES["llama-3-8b"]
    for fmt in kernel_formats():
        if fmt != "bf16":
            shape = replace(llama, fmt=fmt)
            found.append(config_of(f"decode/llama-3-8b/{fmt}", lambda s=shape: decode(s), attention_cost(shape)))
            new = replace(shape, new=NEW, batch=CHUNKS)
            found.append(config_of(f"prefill/llama-3-8b/{fmt}", lambda s=new: prefill(s), attention_cost(new)))
    for fmt in ("bf16", "int8", "int4"):
        nodes = replace(llama, fmt=fmt, new=min(32, NEW))
        build = partial(prefill, nodes, True)
        found.append(config_of(f"verify-tree/llama-3-8b/{fmt}", build, attention_cost(nodes)))
    found.append(config_of("merge/llama-3-8b/bf16", lambda: decode(llama)[1:], merge_cost(llama, attention.SPLIT)))
    return found


def _write_configs() -> list[Config]:
    found = []
    for fmt in write.KINDS:
        shape = replace(SHAPES["llama-3-8b"], fmt=fmt, batch=WRITTEN, context=WRITE_CONTEXT)
        if fmt != "fp32":
            found.append(config_of(f"write/llama-3-8b/{fmt}", lambda s=shape: cache_write(s), write_cost(shape)))
    glm = Shape(32, 2, 128, batch=WRITTEN, context=WRITE_CONTEXT)
    found.append(config_of("write/glm-4-9b/bf16", lambda: cache_write(glm, True), write_cost(glm)))
    return found


def configs() -> list[Config]:
    """Every configuration."""
    from kvlab.lab.kernels.more_configs import more_configs

    return [*_attention_configs(), *_write_configs(), *more_configs()]
