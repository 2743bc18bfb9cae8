"""The merge kernel: results over parts of a context, made one by the logarithms of their sums, in base 2."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvlab.ops.attention.triton_tiles import add_sink, close
from kvlab.ops.triton_support import Launch, power_of_2


@triton.jit
def merge_splits(
    p_part, p_part_lse, p_sink, p_out, p_lse, splits,
    s_part_row, s_part_split, s_part_head, s_lse_row, s_lse_split, s_out_row, s_out_head, s_out_lse_row,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Program (head, row): p_out[row, head] of p_part [rows, splits, heads, DV] and p_part_lse [rows, splits, heads]."""
    i_head, i_row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_dv = tl.arange(0, BLOCK_DV)
    b_max = tl.full([1], float("-inf"), tl.float32)
    b_sum = tl.zeros([1], tl.float32)
    b_acc = tl.zeros([1, BLOCK_DV], tl.float32)
    for tile in range(0, splits, BLOCK_S):
        o_split = (tile + tl.arange(0, BLOCK_S)).to(tl.int64)
        o_lse = i_row * s_lse_row + o_split * s_lse_split + i_head
        b_lse = tl.load(p_part_lse + o_lse, mask=o_split < splits, other=float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_lse, 0))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_weight, b_factor = tl.exp2(b_lse - b_safe), tl.exp2(b_max - b_safe)
        # an empty part may hold anything: it is not read
        m_part = (b_lse > float("-inf"))[:, None] & (o_dv < DV)[None, :]
        o_part = i_row * s_part_row + o_split * s_part_split + i_head * s_part_head
        b_part = tl.load(p_part + o_part[:, None] + o_dv[None, :], mask=m_part, other=0.0)
        b_acc = b_acc * b_factor[:, None] + tl.sum(b_part * b_weight[:, None], 0)[None, :]
        b_sum, b_max = b_sum * b_factor + tl.sum(b_weight, 0), b_new
    o_head = i_head + tl.arange(0, 1)
    b_acc, b_max, b_sum = add_sink(b_acc, b_max, b_sum, p_sink, o_head, o_head >= 0, p_sink is not None)
    b_result, b_lse = close(b_acc, b_max, b_sum)
    o_out = i_row * s_out_row + o_head * s_out_head
    tl.store(p_out + o_out[:, None] + o_dv[None, :], b_result.to(p_out.dtype.element_ty), mask=(o_dv < DV)[None, :])
    if p_lse is not None:
        tl.store(p_lse + i_row * s_out_lse_row + o_head, b_lse)


def merge_launch(
    parts: torch.Tensor, lse2: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None, out_lse2=None
) -> Launch:
    """The merge of `parts` into `out`; of an all-empty row 0 and -inf.

    Args:
        parts: fp32 [rows, splits, heads, DV]; of an empty part anything, NaN too.
        lse2: fp32 [rows, splits, heads], log2 (not the natural logarithm) of each part's sum of powers; -inf: empty.
        out: [rows, heads, DV].
        sinks: [heads], natural scores without a value, counted once however many parts there are.
        out_lse2: fp32 [rows, heads], or None.

    Raises:
        ValueError: shapes that do not fit.
    """
    rows, splits, heads, width = parts.shape
    if lse2.shape != (rows, splits, heads) or out.shape != (rows, heads, width):
        raise ValueError(f"lse2 {tuple(lse2.shape)}, out {tuple(out.shape)}: must fit parts {tuple(parts.shape)}")
    args = {
        "p_part": parts, "p_part_lse": lse2, "p_sink": sinks, "p_out": out, "p_lse": out_lse2, "splits": splits,
        "s_part_row": parts.stride(0), "s_part_split": parts.stride(1), "s_part_head": parts.stride(2),
        "s_lse_row": lse2.stride(0), "s_lse_split": lse2.stride(1),
        "s_out_row": out.stride(0), "s_out_head": out.stride(1),
        "s_out_lse_row": 0 if out_lse2 is None else out_lse2.stride(0),
    }  # fmt: skip
    meta = {"DV": width, "BLOCK_DV": power_of_2(width, 16), "BLOCK_S": min(16, power_of_2(splits))}
    return Launch(merge_splits, (heads, rows), args, meta, num_warps=1, num_stages=1)
