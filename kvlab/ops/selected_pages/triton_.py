"""selected_pages as a Triton kernel: the decode kernel with one more step between a token and its page.

Traffic: the chosen pages' keys and values once for all query heads of a KV head, and one number per chosen page more
than a decode over all pages reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvlab.ops.attention import triton_ as attention
from kvlab.ops.attention.rules import Rules
from kvlab.ops.attention.triton_merge import merge_launch
from kvlab.ops.attention.triton_tiles import LOG2E, close, floats, product, soften
from kvlab.ops.batch import AttentionBatch
from kvlab.ops.triton_support import Launch, power_of_2
from kvlab.ops.views import PageViews

PER_SPLIT = 32  # pages of a split


@triton.jit
def selected_decode(
    p_q, p_k, p_v, p_chosen, p_table, p_len, p_out, p_lse,
    scale, count,
    s_q_row, s_q_head, s_page, s_k_head, s_k_token, s_v_page, s_v_head, s_v_token, s_chosen_row, s_chosen_head, s_table,
    s_out_row, s_out_head, s_out_split, s_lse_row,
    GROUP: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, PER_SPLIT: tl.constexpr, SPLITS: tl.constexpr,
    SOFT_FP8: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Program (head block, split of the chosen pages, sequence); a KV head has a block for every BLOCK_H of its heads."""
    BLOCKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    i_kv, i_split = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_seq = tl.program_id(2).to(tl.int64)
    n = tl.load(p_len + i_seq)
    o_group = tl.program_id(0) % BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    o_d, o_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    m_head, o_head = o_group < GROUP, i_kv * GROUP + o_group
    o_q = i_seq * s_q_row + o_head[:, None] * s_q_head + o_d[None, :]
    b_q = tl.load(p_q + o_q, mask=m_head[:, None] & (o_d < D)[None, :], other=0.0).to(COMPUTE)
    b_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_H], tl.float32)
    b_acc = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
    p_mine = p_chosen + i_seq * s_chosen_row + i_kv * s_chosen_head
    first = tl.program_id(1) * PER_SPLIT * PAGE
    stop = tl.minimum(count, tl.program_id(1) * PER_SPLIT + PER_SPLIT) * PAGE
    for tile in range(first, stop, BLOCK_N):
        o_place = tile + tl.arange(0, BLOCK_N)
        b_page = tl.load(p_mine + o_place // PAGE, mask=o_place < stop, other=-1)
        m_token = (b_page >= 0) & (b_page * PAGE + o_place % PAGE < n)
        i_page = tl.load(p_table + i_seq * s_table + b_page, mask=m_token, other=0).to(tl.int64)
        o_slot = (o_place % PAGE).to(tl.int64)
        o_k = i_page * s_page + o_slot * s_k_token + i_kv * s_k_head
        m_k = m_token[:, None] & (o_d < D)[None, :]
        b_k = tl.load(p_k + o_k[:, None] + o_d[None, :], mask=m_k, other=0.0)  # codes
        b_score = product(b_q, tl.trans(floats(b_k, COMPUTE, SOFT_FP8))) * (scale * LOG2E)
        b_score = tl.where(m_token[None, :], b_score, float("-inf"))
        b_weight, b_factor, b_max, b_sum = soften(b_score, b_max, b_sum)
        o_v = i_page * s_v_page + o_slot * s_v_token + i_kv * s_v_head
        m_v = m_token[:, None] & (o_dv < DV)[None, :]
        b_v = tl.load(p_v + o_v[:, None] + o_dv[None, :], mask=m_v, other=0.0)  # codes
        b_acc = b_acc * b_factor[:, None] + product(b_weight.to(COMPUTE), floats(b_v, COMPUTE, SOFT_FP8))
    b_result, b_lse = close(b_acc, b_max, b_sum)
    o_out = i_seq * s_out_row + i_split * s_out_split + o_head * s_out_head
    m_out = m_head[:, None] & (o_dv < DV)[None, :]
    tl.store(p_out + o_out[:, None] + o_dv[None, :], b_result.to(p_out.dtype.element_ty), mask=m_out)
    tl.store(p_lse + (i_seq * SPLITS + i_split) * s_lse_row + o_head, b_lse, mask=m_head)


def supports(query: torch.Tensor, views: PageViews) -> bool:
    """Whether the kernel knows the types: codes of one value each without scales per token."""
    return attention.supports(query, views) and attention.WHOLE.get(views.format) == 0 and views.fixed is None


def decode_launches(
    query: torch.Tensor,
    views: PageViews,
    which: tuple[AttentionBatch, torch.Tensor],
    rules: Rules,
    out: torch.Tensor,
) -> list[Launch]:
    """The launches of `kvlab.ops.selected_pages.selected_pages`; `which` is (batch, chosen)."""
    batch, chosen = which
    rows, num_heads, _ = query.shape
    kv_heads, count = chosen.shape[1:]
    splits = max(1, -(-count // PER_SPLIT))
    meta = attention.whole_meta(query, views, rules)
    group = meta["GROUP"]
    kept = ("GROUP", "D", "BLOCK_D", "DV", "BLOCK_DV", "PAGE", "BLOCK_N", "SOFT_FP8", "COMPUTE")
    block_h = min(64, power_of_2(group, 16))
    meta = {k: meta[k] for k in kept} | {"BLOCK_H": block_h, "PER_SPLIT": PER_SPLIT, "SPLITS": splits}
    lse = query.new_empty((rows, splits, num_heads), dtype=torch.float32)
    parts = out[:, None] if splits == 1 else lse.new_empty((rows, splits, num_heads, out.shape[2]))
    args = attention.page_args(query, views, batch, rules)
    args = {k: v for k, v in args.items() if k in selected_decode.arg_names} | {
        "p_chosen": chosen, "p_out": parts, "p_lse": lse, "count": count, "s_chosen_row": chosen.stride(0),
        "s_chosen_head": chosen.stride(1), "s_out_row": parts.stride(0), "s_out_split": parts.stride(1),
        "s_out_head": parts.stride(2), "s_lse_row": num_heads,
    }  # fmt: skip
    launches = [Launch(selected_decode, (kv_heads * -(-group // block_h), splits, rows), args, meta, num_stages=3)]
    return [*launches, merge_launch(parts, lse, out)] if splits > 1 else launches
