"""Pieces of the prefill kernels: which new tokens a program attends, and what each of them sees."""

from __future__ import annotations

import triton
import triton.language as tl

from kvlab.ops.attention.triton_tiles import first_seen


@triton.jit
def block_of(
    p_start, p_len, first_seq, num_seqs, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """What program (block of query tokens, KV head) of a prefill works on; row r of a block is token r // GROUP, head
    r % GROUP of the KV head.

    Returns:
        (KV head, sequence, rows of the query [BLOCK_M], their heads, which of them exist, their positions, the
        sequence's length, the first token they see and the one behind the last); the first four are int64. Of a
        program without work the last is 0.
    """
    i_seq, i_block = sequence_of(p_start, tl.program_id(0), first_seq, num_seqs, BLOCK_Q)
    begin, end, n = tl.load(p_start + i_seq), tl.load(p_start + i_seq + 1), tl.load(p_len + i_seq)
    i_kv, o_row = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK_M)
    before, token = n - (end - begin), i_block * BLOCK_Q  # tokens cached before this step, the block's first new one
    o_new = token + o_row // GROUP
    m_row = (o_row < BLOCK_Q * GROUP) & (o_new < end - begin) & (n > 0)
    stop = tl.where((token < end - begin) & (n > 0), tl.minimum(n, before + token + BLOCK_Q), 0)
    low = first_seen(before + token, WINDOW, CHUNK)
    o_head = i_kv * GROUP + o_row % GROUP
    return i_kv, i_seq, (begin + o_new).to(tl.int64), o_head, m_row, before + o_new, n, low, stop


@triton.jit
def sequence_of(p_start, program, first_seq, num_seqs, BLOCK_Q: tl.constexpr):
    """(sequence, int64; its block) of a program. Sequence b's blocks begin at (start[b] - base) // BLOCK_Q + b - first:
    room for a last block that is not full, so the launch needs no lengths on the host."""
    base = tl.load(p_start + first_seq)
    low, high = first_seq, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        at = (tl.load(p_start + middle) - base) // BLOCK_Q + middle - first_seq
        low, high = tl.where(at <= program, middle, low), tl.where(at <= program, high, middle)
    at = (tl.load(p_start + low) - base) // BLOCK_Q + low - first_seq
    return low.to(tl.int64), program - at


@triton.jit
def seen(
    o_query, o_token, m_token, trunk, p_tree, i_seq, s_tree_seq, s_tree_node, WINDOW: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Which tokens [N] the queries at positions [M] see, bool [M, N]; slots from `trunk` on are nodes of a tree."""
    m_seen = (o_token[None, :] <= o_query[:, None]) & m_token[None, :]
    if WINDOW:
        m_seen &= o_token[None, :] > o_query[:, None] - WINDOW
    if CHUNK:
        m_seen &= o_token[None, :] >= (o_query // CHUNK * CHUNK)[:, None]
    if p_tree is not None:
        # what stands before the tree is seen by all, a node by itself and its descendants
        m_node = (o_query >= trunk)[:, None] & (o_token >= trunk)[None, :] & m_seen
        o_node = i_seq * s_tree_seq + (o_query - trunk).to(tl.int64)[:, None] * s_tree_node
        m_seen &= tl.load(p_tree + o_node + (o_token - trunk)[None, :], mask=m_node, other=1) != 0
    return m_seen


@triton.jit
def trunk_of(p_tree_len, i_seq, n):
    """Tokens of a sequence of `n` before its tree of drafts; all of them where there is no tree."""
    trunk = n
    if p_tree_len is not None:
        trunk = n - tl.load(p_tree_len + i_seq).to(tl.int32)
    return trunk
