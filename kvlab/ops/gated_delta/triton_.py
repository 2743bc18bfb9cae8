"""One token of many sequences through the gated delta rule, as a Triton kernel on the states in their pages.

Traffic: each state is read once and written once, where it lies. A program takes all rows of a few columns: what a key
has stored is a sum over rows, and columns do not meet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvlab.ops.batch import AttentionBatch
from kvlab.ops.triton_support import Launch, power_of_2

BLOCK_V = 64  # columns of a state that a program updates


@triton.jit
def gated_delta_decode(
    p_query, p_key, p_value, p_log_decay, p_beta, p_state, p_table, p_len, p_out,
    s_query_row, s_query_head, s_key_row, s_key_head, s_value_row, s_value_head, s_decay_row, s_decay_head, s_beta_row,
    s_state, s_table, s_out_row, s_out_head,
    DK: tl.constexpr, BLOCK_K: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, PER_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, head, sequence): S = decay S; S += beta k (v - k S)^T; out = q S, q scaled."""
    i_head, i_seq = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_k = tl.arange(0, BLOCK_K)
    o_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k, m_v = o_k < DK, o_v < DV
    p_result = p_out + (i_seq * s_out_row + i_head * s_out_head + o_v)
    n = tl.load(p_len + i_seq)
    if n <= 0:  # a padded sequence: its page is the null page, which is left alone
        tl.store(p_result, tl.zeros([BLOCK_V], tl.float32).to(p_out.dtype.element_ty), mask=m_v)
    else:
        i_page = tl.load(p_table + i_seq * s_table).to(tl.int64)
        o_state = i_page * s_state + i_head * (DK * DV) + o_k[:, None] * DV + o_v[None, :]
        m_state = m_k[:, None] & m_v[None, :]
        # a sequence's first token starts from zeros, whatever its page held
        b_state = tl.load(p_state + o_state, mask=m_state & (n > 1), other=0.0).to(tl.float32)
        b_query = tl.load(p_query + i_seq * s_query_row + i_head * s_query_head + o_k, mask=m_k, other=0.0)
        b_key = tl.load(p_key + i_seq * s_key_row + i_head * s_key_head + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_value = tl.load(p_value + i_seq * s_value_row + i_head * s_value_head + o_v, mask=m_v, other=0.0)
        p_decay = p_log_decay + i_seq * s_decay_row + i_head * s_decay_head
        if PER_CHANNEL:
            b_state *= tl.exp(tl.load(p_decay + o_k, mask=m_k, other=0.0).to(tl.float32))[:, None]
        else:
            b_state *= tl.exp(tl.load(p_decay).to(tl.float32))
        b_beta = tl.load(p_beta + i_seq * s_beta_row + i_head).to(tl.float32)
        b_stored = tl.sum(b_key[:, None] * b_state, 0)
        b_state += b_key[:, None] * (b_beta * (b_value.to(tl.float32) - b_stored))[None, :]
        tl.store(p_state + o_state, b_state.to(p_state.dtype.element_ty), mask=m_state)
        b_out = tl.sum(b_query.to(tl.float32)[:, None] * b_state, 0)
        tl.store(p_result, b_out.to(p_out.dtype.element_ty), mask=m_v)


def decode_launch(
    rows: Sequence[torch.Tensor], states: torch.Tensor, batch: AttentionBatch, out: torch.Tensor
) -> Launch:
    """The launch that updates `states` [num_pages, H * Dk * Dv] by the batch's decodes and fills `out` [B, H, Dv].

    Args:
        rows: query (scaled) and key [B, H, Dk], value [B, H, Dv], log_decay [B, H, 1 or Dk], beta [B, H].
    """
    query, key, value, log_decay, beta = rows
    (count, heads, key_dim), value_dim = key.shape, value.shape[2]
    block = min(BLOCK_V, power_of_2(value_dim))
    args = {
        "p_query": query, "p_key": key, "p_value": value, "p_log_decay": log_decay, "p_beta": beta, "p_state": states,
        "p_table": batch.block_table, "p_len": batch.seq_lens, "p_out": out,
        "s_query_row": query.stride(0), "s_query_head": query.stride(1), "s_key_row": key.stride(0),
        "s_key_head": key.stride(1), "s_value_row": value.stride(0), "s_value_head": value.stride(1),
        "s_decay_row": log_decay.stride(0), "s_decay_head": log_decay.stride(1), "s_beta_row": beta.stride(0),
        "s_state": states.stride(0), "s_table": batch.block_table.stride(0),
        "s_out_row": out.stride(0), "s_out_head": out.stride(1),
    }  # fmt: skip
    meta = {
        "DK": key_dim, "BLOCK_K": power_of_2(key_dim), "DV": value_dim, "BLOCK_V": block,
        "PER_CHANNEL": log_decay.shape[2] > 1,
    }  # fmt: skip
    return Launch(gated_delta_decode, (-(-value_dim // block), heads, count), args, meta, num_stages=1)
