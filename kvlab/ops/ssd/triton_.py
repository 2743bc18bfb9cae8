"""One token of many sequences through Mamba-2's recurrence, as a Triton kernel on the states in their pages.

Traffic: each state is read once and written once, where it lies; everything else is a thousandth of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.triton_support import Launch, power_of_2

BLOCK_P = 32  # values of a head that a program updates


@triton.jit
def ssd_decode(
    p_x, p_dt, p_b, p_c, p_decay, p_state, p_table, p_len, p_out,
    s_x_row, s_x_head, s_dt_row, s_bc_row, s_bc_group, s_state, s_table, s_out_row, s_out_head,
    PER_GROUP: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (block of a head's values, head, sequence): S = exp(dt A) S + dt x b^T and out = S c."""
    i_head, i_seq = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    o_n = tl.arange(0, BLOCK_N)
    m_p, m_n = o_p < P, o_n < N
    p_result = p_out + (i_seq * s_out_row + i_head * s_out_head + o_p)
    n = tl.load(p_len + i_seq)
    if n <= 0:  # a padded sequence: its page is the null page, which is left alone
        tl.store(p_result, tl.zeros([BLOCK_P], tl.float32).to(p_out.dtype.element_ty), mask=m_p)
    else:
        i_page = tl.load(p_table + i_seq * s_table).to(tl.int64)
        o_state = i_page * s_state + i_head * (P * N) + o_p[:, None] * N + o_n[None, :]
        # a sequence's first token starts from zeros, whatever its page held
        m_state = m_p[:, None] & m_n[None, :]
        b_state = tl.load(p_state + o_state, mask=m_state & (n > 1), other=0.0).to(tl.float32)
        b_x = tl.load(p_x + i_seq * s_x_row + i_head * s_x_head + o_p, mask=m_p, other=0.0).to(tl.float32)
        b_dt = tl.load(p_dt + i_seq * s_dt_row + i_head).to(tl.float32)
        o_bc = i_seq * s_bc_row + (i_head // PER_GROUP) * s_bc_group + o_n
        b_b = tl.load(p_b + o_bc, mask=m_n, other=0.0).to(tl.float32)
        b_c = tl.load(p_c + o_bc, mask=m_n, other=0.0).to(tl.float32)
        b_kept = tl.exp(b_dt * tl.load(p_decay + i_head).to(tl.float32))
        b_state = b_kept * b_state + (b_dt * b_x)[:, None] * b_b[None, :]
        tl.store(p_state + o_state, b_state.to(p_state.dtype.element_ty), mask=m_state)
        tl.store(p_result, tl.sum(b_state * b_c[None, :], 1).to(p_out.dtype.element_ty), mask=m_p)


def decode_launch(
    rows: Sequence[torch.Tensor], decay: torch.Tensor, states: torch.Tensor, batch: AttentionBatch, out: torch.Tensor
) -> Launch:
    """The launch that updates `states` [num_pages, H * P * N] by the batch's decodes and fills `out` [B, H, P].

    Args:
        rows: x [B, H, P], dt [B, H], b and c [B, G, N].
    """
    x, dt, b, c = rows
    (count, heads, width), (groups, size) = x.shape, b.shape[1:]
    block = min(BLOCK_P, power_of_2(width))
    if b.stride() != c.stride():
        b, c = b.contiguous(), c.contiguous()
    args = {
        "p_x": x, "p_dt": dt, "p_b": b, "p_c": c, "p_decay": decay, "p_state": states, "p_table": batch.block_table,
        "p_len": batch.seq_lens, "p_out": out, "s_x_row": x.stride(0), "s_x_head": x.stride(1),
        "s_dt_row": dt.stride(0), "s_bc_row": b.stride(0), "s_bc_group": b.stride(1), "s_state": states.stride(0),
        "s_table": batch.block_table.stride(0), "s_out_row": out.stride(0), "s_out_head": out.stride(1),
    }  # fmt: skip
    meta = {
        "PER_GROUP": heads // groups, "P": width, "BLOCK_P": block, "N": size,
        "BLOCK_N": power_of_2(size),
    }  # fmt: skip
    return Launch(ssd_decode, (-(-width // block), heads, count), args, meta, num_stages=1)
