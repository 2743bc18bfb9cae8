"""page_scores as a Triton kernel.

Traffic: two rows per page and KV head, one 8th of the keys of a page of 16 tokens, read once for all query heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.triton_support import Launch, power_of_2

BLOCK_PAGES = 16


@triton.jit
def score_pages(
    p_query, p_low, p_high, p_table, p_len, p_out, width,
    s_query_row, s_query_head, s_page, s_head, s_table, s_out_row, s_out_head,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (block of pages, KV head, sequence)."""
    i_kv, i_seq = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_page, o_d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    pages = (tl.load(p_len + i_seq) + PAGE - 1) // PAGE
    b_id = tl.load(p_table + i_seq * s_table + o_page, mask=o_page < pages, other=0).to(tl.int64)
    m_page = b_id != 0
    m_row = m_page[:, None] & (o_d < D)[None, :]
    o_row = (b_id * s_page + i_kv * s_head)[:, None] + o_d[None, :]
    b_low = tl.load(p_low + o_row, mask=m_row, other=0.0).to(tl.float32)  # codes
    b_high = tl.load(p_high + o_row, mask=m_row, other=0.0).to(tl.float32)  # codes
    b_score = tl.full([BLOCK], float("-inf"), tl.float32)
    for head in range(GROUP):
        p_row = p_query + i_seq * s_query_row + (i_kv * GROUP + head) * s_query_head
        b_query = tl.load(p_row + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
        b_score = tl.maximum(b_score, tl.sum(tl.maximum(b_query * b_low, b_query * b_high), 1))
    b_score = tl.where(m_page, b_score, float("-inf"))
    tl.store(p_out + i_seq * s_out_row + i_kv * s_out_head + o_page, b_score, mask=o_page < width)


def score_launch(
    query: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor],
    batch: AttentionBatch,
    block_size: int,
    out: torch.Tensor,
) -> Launch:
    """The launch that fills `out`, fp32 [B, Hkv, width]."""
    low, high = (b.contiguous() for b in bounds)
    kv_heads, head_dim, width = low.shape[1], low.shape[2], out.shape[2]
    args = {
        "p_query": query, "p_low": low, "p_high": high, "p_table": batch.block_table, "p_len": batch.seq_lens,
        "p_out": out, "width": width, "s_query_row": query.stride(0), "s_query_head": query.stride(1),
        "s_page": low.stride(0), "s_head": low.stride(1), "s_table": batch.block_table.stride(0),
        "s_out_row": out.stride(0), "s_out_head": out.stride(1),
    }  # fmt: skip
    meta = {
        "GROUP": query.shape[1] // kv_heads, "D": head_dim, "BLOCK_D": power_of_2(head_dim), "PAGE": block_size,
        "BLOCK": BLOCK_PAGES,
    }  # fmt: skip
    return Launch(score_pages, (-(-width // BLOCK_PAGES), kv_heads, query.shape[0]), args, meta)
