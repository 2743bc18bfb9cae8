"""paged_attention by Triton kernels: decodes in splits with a merge, prefill chunks from the same pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlab.ops.attention.rules import Rules
from kvlab.ops.attention.triton_decode import paged_decode
from kvlab.ops.attention.triton_merge import merge_launch
from kvlab.ops.attention.triton_prefill import paged_prefill
from kvlab.ops.batch import AttentionBatch
from kvlab.ops.triton_support import Launch, native_fp8, power_of_2
from kvlab.ops.views import PageViews

SPLIT = 512  # tokens of a split: its partial result is then under 2% of what it reads
FORMATS = ("fp32", "bf16", "fp16", "fp8_e4m3", "int8")


def supports(query: torch.Tensor, views: PageViews) -> bool:
    """Whether the kernels know the types; the rest is `torch_`'s."""
    return query.dtype in (torch.float32, torch.bfloat16, torch.float16) and views.format in FORMATS


def paged_attention(
    query: torch.Tensor, views: PageViews, batch: AttentionBatch, rules: Rules, out: torch.Tensor
) -> None:
    """See `kvlab.ops.attention.paged_attention`; writes to `out`. Reads nothing back to the host."""
    decodes = batch.num_decodes
    if decodes < batch.num_tokens:
        out[decodes:] = 0
    if decodes:
        for launch in decode_launches(query[:decodes], views, batch, rules, out[:decodes]):
            launch.run()
    if decodes < batch.num_seqs:
        prefill_launch(query, views, batch, rules, out).run()


@dataclass(frozen=True, eq=False)
class Tree:
    """Which of a sequence's last k tokens, the nodes of a tree of drafts, each of its new tokens sees.

    Attributes:
        seen: int64 [T], bit j set where the row sees the j-th of the last k tokens; itself included, as anywhere.
        sizes: int32 [B], k of each sequence, at most 64; 0 for a sequence without a tree. All before its last k
            tokens is seen as the rules say, with the row's position from the batch (trunk + depth).
    """

    seen: torch.Tensor
    sizes: torch.Tensor


def prefill_launch(
    query: torch.Tensor,
    views: PageViews,
    batch: AttentionBatch,
    rules: Rules,
    out: torch.Tensor,
    tree: Tree | None = None,
) -> Launch:
    """The launch that attends the batch's chunks, all sequences after its decodes, into rows of `out` [T, Hq, Dv]."""
    kv_heads, first = views.k.shape[1], batch.num_decodes
    meta = decode_meta(query, views, rules)
    group = meta["GROUP"]
    wide = max(query.shape[2], out.shape[2]) > 128
    block_m = power_of_2(group, 64 if wide else 128)
    meta |= {"BLOCK_M": block_m, "BLOCK_Q": block_m // group}
    del meta["BLOCK_H"]
    args = page_args(query, views, batch, rules) | {
        "p_start": batch.query_start_loc, "p_position": batch.positions, "p_tree": tree.seen if tree else None,
        "p_tree_len": tree.sizes if tree else None, "p_out": out, "first_seq": first, "num_seqs": batch.num_seqs,
        "s_out_row": out.stride(0), "s_out_head": out.stride(1),
    }  # fmt: skip
    # each sequence may end in a block that is not full
    blocks = (query.shape[0] - first) // meta["BLOCK_Q"] + batch.num_seqs - first
    return Launch(paged_prefill, (blocks, kv_heads), args, meta, num_warps=4 if wide else 8)


def decode_launches(
    query: torch.Tensor,
    views: PageViews,
    batch: AttentionBatch,
    rules: Rules,
    out: torch.Tensor,
    split: int = SPLIT,
) -> list[Launch]:
    """The launches that attend the batch's decodes, `query` [B, Hq, D], into `out` [B, Hq, Dv]."""
    count, num_heads, _ = query.shape
    kv_heads, width = views.k.shape[1], out.shape[2]
    splits = count_splits(batch.max_seq_len, rules, split)
    group = num_heads // kv_heads
    meta = decode_meta(query, views, rules) | {"SPLIT": split, "SPLITS": splits}
    lse = query.new_empty((count, splits, num_heads), dtype=torch.float32)
    parts = out[:, None] if splits == 1 else lse.new_empty((count, splits, num_heads, width))
    args = page_args(query, views, batch, rules) | {
        "p_out": parts, "p_lse": lse, "s_out_row": parts.stride(0), "s_out_split": parts.stride(1),
        "s_out_head": parts.stride(2), "s_lse_row": num_heads,
    }  # fmt: skip
    blocks = -(-group // meta["BLOCK_H"])
    launches = [Launch(paged_decode, (kv_heads * blocks, splits, count), args, meta)]
    if splits > 1:
        launches.append(merge_launch(parts, lse, out, rules.sinks))
    return launches


def count_splits(longest: int, rules: Rules, split: int) -> int:
    """Splits that a sequence of at most `longest` tokens can touch: a window may straddle one more cut."""
    spans = [n for n in (rules.window, rules.chunk) if n]
    return max(1, -(-longest // split) if not spans else min(-(-longest // split), -(-min(spans) // split) + 1))


def decode_meta(query: torch.Tensor, views: PageViews, rules: Rules) -> dict:
    """Compile-time arguments that follow from shapes, formats and rules."""
    group, head_dim, width = query.shape[1] // views.k.shape[1], query.shape[2], views.v.shape[3]
    return {
        "GROUP": group, "BLOCK_H": min(64, power_of_2(group, 16)), "D": head_dim, "BLOCK_D": power_of_2(head_dim, 16),
        "DV": width, "BLOCK_DV": power_of_2(width, 16), "PAGE": views.block_size,
        "BLOCK_N": 64 if max(head_dim, width) <= 128 else 32, "WINDOW": rules.window, "CHUNK": rules.chunk,
        "SOFTCAP": rules.softcap > 0, "SOFT_FP8": soft_fp8(views), "SCALED": views.k_scale is not None,
        "COMPUTE": compute_type(query.dtype, views.k.dtype),
    }  # fmt: skip


def page_args(query: torch.Tensor, views: PageViews, batch: AttentionBatch, rules: Rules) -> dict:
    """Run-time arguments that all attention kernels over pages of keys and values take."""
    soft = soft_fp8(views)
    k, v = (x.view(torch.uint8) if soft else x for x in (views.k, views.v))
    scale = views.k_scale
    return {
        "p_q": query, "p_k": k, "p_v": v, "p_k_scale": scale, "p_v_scale": views.v_scale, "p_sink": rules.sinks,
        "p_alibi": rules.alibi, "p_table": batch.block_table, "p_len": batch.seq_lens,
        "scale": float(rules.scale), "softcap": float(rules.softcap),
        "s_q_row": query.stride(0), "s_q_head": query.stride(1), "s_page": k.stride(0), "s_k_head": k.stride(1),
        "s_k_token": k.stride(2), "s_v_page": v.stride(0), "s_v_head": v.stride(1), "s_v_token": v.stride(2),
        "s_scale_page": 0 if scale is None else scale.stride(0),
        "s_scale_head": 0 if scale is None else scale.stride(1), "s_table": batch.block_table.stride(0),
    }  # fmt: skip


def soft_fp8(views: PageViews) -> bool:
    """Whether fp8 codes are decoded by moving bits."""
    return views.format == "fp8_e4m3" and not native_fp8(views.k.device)


def compute_type(query: torch.dtype, codes: torch.dtype):
    """The type of the products' operands, as Triton's: the query's, or what holds it and 16- or 32-bit codes."""
    import triton.language as tl

    plain = codes in (torch.float32, torch.bfloat16, torch.float16)
    both = torch.promote_types(query, codes) if plain else query
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[both]
