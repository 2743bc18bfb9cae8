"""Production configurations of the kernels besides attention over keys and values."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvlab.lab.kernels.configs import PAGE, Config, batch_of, config_of, pages_of
from kvlab.lab.kernels.cost import Cost, row_bytes
from kvlab.lab.kernels.shapes import SHAPES
from kvlab.lab.kernels.tensors import chosen, numbers, shuffled_table
from kvlab.ops.attention import triton_grouped as closed
from kvlab.ops.attention.rules import Rules
from kvlab.ops.batch import AttentionBatch
from kvlab.ops.copy_pages.triton_ import copy_launch
from kvlab.ops.gated_delta import triton_ as delta
from kvlab.ops.grouped_views import GroupedViews
from kvlab.ops.mla_attention import triton_ as mla
from kvlab.ops.page_scores import triton_ as scores
from kvlab.ops.selected_pages import triton_ as selected
from kvlab.ops.ssd import triton_ as ssd
from kvlab.ops.triton_support import Launch
from kvlab.ops.views import SegmentViews, part_views
from kvlab.specs.formats import get_format
from kvlab.specs.grouped import grouped
from kvlab.specs.layout import page_layout
from kvlab.specs.parts import Attention, MLALatent

B, CONTEXT, CHOSEN, COPIED = 8, 8192, 64, 64  # sequences, tokens of each, pages that a query chooses, pages copied
MLA = HEADS, LATENT, ROPE = 128, 512, 64  # DeepSeek-V3
SSD = (80, 64, 1, 128)  # Mamba-2 2.7B: heads, values of a head, groups, values of state
DELTA = (32, 16, 128, 128)  # Qwen3-Next: value heads, key heads, values of a key and of a value
LLAMA = SHAPES["llama-3-8b"]
FP32 = torch.float32


def closed_pages(fmt: str) -> tuple[GroupedViews, AttentionBatch]:
    """Pools of closed groups and of the recent window, a group a page, and a step of decodes over them."""
    part, window = grouped(Attention(LLAMA.kv_heads, LLAMA.dim, LLAMA.dim, get_format("bf16")), 0, get_format(fmt))
    tokens = part.format.group_tokens
    layouts, pages = (page_layout(part, 1), page_layout(window, tokens)), B * CONTEXT // tokens + 1
    pools = [part_views(numbers(pages, one.page_bytes, dtype=torch.uint8), one) for one in layouts]
    tables = [shuffled_table(B, CONTEXT // tokens) for _ in layouts]
    batch = replace(batch_of(LLAMA), block_table=tables[1], closed=tables[0])
    return GroupedViews(part, pools[0], pools[1]), batch


def closed_decode(fmt: str) -> list[Launch]:
    """Decode over closed groups, over the recent window, and the merge."""
    views, batch = closed_pages(fmt)
    query = numbers(B, LLAMA.heads, LLAMA.dim)
    return closed.decode_launches(query, views, batch, Rules(LLAMA.dim**-0.5), torch.empty_like(query))


def closed_cost(fmt: str) -> Cost:
    """Codes and scales of the closed groups, the rest in bf16, tables, queries, results."""
    part, _ = grouped(Attention(LLAMA.kv_heads, LLAMA.dim, LLAMA.dim, get_format("bf16")), 0, get_format(fmt))
    groups = max(0, CONTEXT - part.format.recent) // part.format.group_tokens
    recent = CONTEXT - groups * part.format.group_tokens
    row = row_bytes(LLAMA.kv_heads, LLAMA.dim, LLAMA.dim, "bf16")
    read = groups * (part.entry_bytes + 4) + recent * row + 2 * LLAMA.heads * LLAMA.dim
    return Cost(B * read, B * 2 * LLAMA.heads * LLAMA.dim, 4 * B * LLAMA.heads * CONTEXT * LLAMA.dim)


def latents(fmt: str) -> SegmentViews:
    """A pool of latents."""
    layout = page_layout(MLALatent(LATENT, ROPE, get_format(fmt)), PAGE)
    return part_views(numbers(B * CONTEXT // PAGE + 1, layout.page_bytes, dtype=torch.uint8), layout)


def mla_decode(fmt: str) -> list[Launch]:
    """Absorbed decode."""
    query = numbers(B, HEADS, LATENT), numbers(B, HEADS, ROPE)
    return mla.decode_launches(query, latents(fmt), batch_of(LLAMA), 0.07, numbers(B, HEADS, LATENT))


def mla_cost(fmt: str) -> Cost:
    """Latents once, queries, weighted latents."""
    row = page_layout(MLALatent(LATENT, ROPE, get_format(fmt)), PAGE).used_bytes // PAGE
    read = B * (CONTEXT * row + 4 * CONTEXT // PAGE + 2 * HEADS * (LATENT + ROPE))
    return Cost(read, B * HEADS * LATENT * 2, 2 * B * HEADS * CONTEXT * (2 * LATENT + ROPE))


def one_page_each() -> AttentionBatch:
    """A step of decodes whose sequences have one page, a state's."""
    return replace(batch_of(LLAMA), block_table=shuffled_table(B, 1))


def ssd_decode() -> list[Launch]:
    """One token of each sequence; states in fp32."""
    heads, width, groups, size = SSD
    rows = (numbers(B, heads, width), numbers(B, heads), numbers(B, groups, size), numbers(B, groups, size))
    states = numbers(B + 1, heads * width * size, dtype=FP32)
    return [ssd.decode_launch(rows, numbers(heads, dtype=FP32), states, one_page_each(), numbers(B, heads, width))]


def delta_decode() -> list[Launch]:
    """One token of each sequence; states in fp32."""
    heads, _, key_dim, value_dim = DELTA
    keys, values = [numbers(B, heads, key_dim) for _ in range(2)], numbers(B, heads, value_dim)
    rows = (*keys, values, numbers(B, heads, 1, dtype=FP32), numbers(B, heads))
    states = numbers(B + 1, heads * key_dim * value_dim, dtype=FP32)
    return [delta.decode_launch(rows, states, one_page_each(), numbers(B, heads, value_dim))]


def state_cost(elements: int, inputs: int, outputs: int) -> Cost:
    """A state of fp32 read and written, a few numbers beside it; two products per element."""
    return Cost(B * (4 * elements + 2 * inputs), B * (4 * elements + 2 * outputs), B * elements * 6)


def page_scores() -> list[Launch]:
    """Scores of all pages; bounds in fp32."""
    bounds = tuple(numbers(B * CONTEXT // PAGE + 1, LLAMA.kv_heads, LLAMA.dim, dtype=FP32) for _ in range(2))
    out = numbers(B, LLAMA.kv_heads, CONTEXT // PAGE, dtype=FP32)
    return [scores.score_launch(numbers(B, LLAMA.heads, LLAMA.dim), bounds, batch_of(LLAMA), PAGE, out)]


def selected_decode() -> list[Launch]:
    """Decode over chosen pages."""
    query, shape = numbers(B, LLAMA.heads, LLAMA.dim), (B, LLAMA.kv_heads, CHOSEN)
    places = chosen(shape, torch.int32, lambda: torch.rand(*shape[:2], CONTEXT // PAGE).argsort(-1)[..., :CHOSEN])
    which = (batch_of(LLAMA), places)
    return selected.decode_launches(query, pages_of(LLAMA), which, Rules(LLAMA.dim**-0.5), torch.empty_like(query))


def copies() -> list[Launch]:
    """Pages copied within a pool."""
    buffer = pages_of(LLAMA).buffer
    assert len(buffer) > 2 * COPIED, "pages are copied within the pool"
    pairs = chosen((COPIED, 2), torch.int64, lambda: torch.arange(1, 2 * COPIED + 1).view(2, COPIED).T)
    return [copy_launch(buffer, buffer, pairs)]


def more_configs() -> list[Config]:
    """Every configuration of this file."""
    pages, row = CONTEXT // PAGE, row_bytes(LLAMA.kv_heads, LLAMA.dim, LLAMA.dim, "bf16")
    heads, kv, dim = LLAMA.heads, LLAMA.kv_heads, LLAMA.dim
    bounds = Cost(
        B * (pages * (2 * kv * dim * 4 + 4) + 2 * heads * dim), B * kv * pages * 4, B * heads * pages * dim * 3
    )
    chosen_pages = Cost(B * (CHOSEN * (PAGE * row + 8 * kv) + 2 * heads * dim), B * 2 * heads * dim,
                  4 * B * heads * CHOSEN * PAGE * dim)  # fmt: skip
    copied = COPIED * PAGE * row
    ssd_state, delta_state = SSD[0] * SSD[1] * SSD[3], DELTA[0] * DELTA[2] * DELTA[3]
    small = SSD[0] * (SSD[1] + 1) + 2 * SSD[3], DELTA[0] * (2 * DELTA[2] + DELTA[3] + 2)
    return [
        config_of("mla-decode/deepseek-v3/bf16", lambda: mla_decode("bf16"), mla_cost("bf16")),
        config_of("mla-decode/deepseek-v3/fp8_e4m3", lambda: mla_decode("fp8_e4m3"), mla_cost("fp8_e4m3")),
        *(
            config_of(f"closed-decode/llama-3-8b/{fmt}", lambda fmt=fmt: closed_decode(fmt), closed_cost(fmt))
            for fmt in ("kivi4", "kivi2")
        ),
        config_of("ssd-decode/mamba-2-2.7b/fp32", ssd_decode, state_cost(ssd_state, small[0], SSD[0] * SSD[1])),
        config_of("delta-decode/qwen3-next/fp32", delta_decode, state_cost(delta_state, small[1], DELTA[0] * DELTA[3])),
        config_of("page-scores/llama-3-8b/fp32", page_scores, bounds),
        config_of("selected-decode/llama-3-8b/bf16", selected_decode, chosen_pages),
        config_of("copy-pages/llama-3-8b/bf16", copies, Cost(copied + COPIED * 16, copied, 0)),
    ]
