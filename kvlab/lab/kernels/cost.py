"""What a call must move and compute, counted from its shape, and the time that takes at best on a named GPU."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.lab.kernels.shapes import Shape
from kvlab.plan.hardware import get_gpu
from kvlab.specs.formats import get_format
from kvlab.specs.layout import page_layout
from kvlab.specs.parts import Attention

GPUS = ("a100-80gb", "h100-sxm", "h200", "b200", "mi300x")
PAGE = 16


@dataclass(frozen=True)
class Cost:
    """Exact counts of one call.

    Attributes:
        read_bytes, write_bytes: each byte once: pages with their scales, queries, tables, results.
        flops: two per multiplication and addition of the products.
    """

    read_bytes: int
    write_bytes: int
    flops: int

    @property
    def bytes(self) -> int:
        """Read and written."""
        return self.read_bytes + self.write_bytes

    def roofline(self, gpu: str) -> tuple[float, str]:
        """(microseconds at best, what bounds them: "memory" or "compute") in bf16 on `gpu`."""
        facts = get_gpu(gpu)
        memory = self.bytes / facts.bandwidth_bytes_per_s * 1e6
        compute = self.flops / facts.bf16_flops * 1e6 if facts.bf16_flops else 0.0
        return (memory, "memory") if memory >= compute else (compute, "compute")


def row_bytes(kv_heads: int, dim: int, value_dim: int, fmt: str) -> int:
    """Bytes of one token's keys and values in a page, scales included, padding not."""
    return page_layout(Attention(kv_heads, dim, value_dim, get_format(fmt)), PAGE).used_bytes // PAGE


def attention_cost(shape: Shape) -> Cost:
    """Of decode, or of a prefill of `shape.new` tokens per sequence, queries and results in bf16.

    A query at the end of a chunk sees up to its window; pages are read once per sequence, which a kernel reaches only
    where a sequence's new tokens fit one block.
    """
    width = shape.value_dim or shape.dim
    last = shape.context
    pairs = sum(_seen(shape, t) for t in range(last - shape.new, last))
    tokens = min(last, _seen(shape, last - shape.new) + shape.new - 1)
    kv = tokens * row_bytes(shape.kv_heads, shape.dim, width, shape.fmt)
    table = 4 * -(-tokens // PAGE)
    queries, results = (2 * shape.new * shape.heads * n for n in (shape.dim, width))
    flops = 2 * pairs * shape.heads * (shape.dim + width)
    return Cost(shape.batch * (kv + table + queries), shape.batch * results, shape.batch * flops)


def _seen(shape: Shape, position: int) -> int:
    low = max(0, position - shape.window + 1) if shape.window else 0
    low = max(low, position // shape.chunk * shape.chunk) if shape.chunk else low
    return position - low + 1


def merge_cost(shape: Shape, split: int) -> Cost:
    """Of the merge of a decode's partial results: fp32 results and sums of every split, bf16 results."""
    width, rows = shape.value_dim or shape.dim, shape.batch * shape.heads
    splits = -(-shape.context // split)
    return Cost(4 * rows * splits * (width + 1), 2 * rows * width, 2 * rows * splits * width)


def write_cost(shape: Shape) -> Cost:
    """Of the cache write: bf16 keys and values, one row of angles each, and the codes that are stored."""
    width = shape.value_dim or shape.dim
    tokens = shape.batch * shape.new
    read = tokens * (2 * shape.kv_heads * (shape.dim + width) + 2 * shape.dim + 16)
    written = tokens * row_bytes(shape.kv_heads, shape.dim, width, shape.fmt)
    return Cost(read, written, tokens * shape.kv_heads * shape.dim * 3)
