"""paged_attention by Triton kernels: decodes in splits with a merge, prefill chunks from the same pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from kvlab.ops.attention.coverage import PACKED, WHOLE, fallback
from kvlab.ops.attention.rules import Rules
from kvlab.ops.attention.triton_decode import paged_decode
from kvlab.ops.attention.triton_merge import merge_launch
from kvlab.ops.attention.triton_packed import paged_decode_packed
from kvlab.ops.attention.triton_prefill import paged_prefill
from kvlab.ops.attention.triton_prefill_packed import paged_prefill_packed
from kvlab.ops.batch import AttentionBatch
from kvlab.ops.triton_support import Launch, amd, interpreted, native_fp8, power_of_2, warp_group_products
from kvlab.ops.views import PageViews
from kvlab.specs.formats import get_format

SPLIT = 512  # tokens of a split: its partial result is then under 2% of what it reads

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def supports(query: torch.Tensor, views: PageViews) -> bool:
    """Whether the kernels know the types and widths; the rest is `torch_`'s."""
    if query.dtype not in TYPES:
        return False
    known = views.format in WHOLE or views.format in PACKED
    return known and not fallback(views.format, views.key_dim, views.value_dim)


def paged_attention(
    query: torch.Tensor, views: PageViews, batch: AttentionBatch, rules: Rules, out: torch.Tensor
) -> None:
    """See `kvlab.ops.attention.paged_attention`; writes to `out`. Reads nothing back to the host."""
    decodes = batch.num_decodes
    if decodes < batch.num_tokens:
        out[decodes:] = 0
    if decodes < batch.num_seqs:
        prefill_launch(entered(query, views), views, batch, rules, out).run()
        out[decodes:] = left(out[decodes:], views)
    if decodes:
        for launch in decode_launches(entered(query[:decodes], views), views, batch, rules, out[:decodes]):
            launch.run()
        out[:decodes] = left(out[:decodes], views)


def entered(query: torch.Tensor, views: PageViews) -> torch.Tensor:
    """Queries [T, Hq, D] as the stored keys want them: scales found from data go into the query, one number per
    channel, and a turned key needs a turned query."""
    if views.fixed is not None:
        query = (query * _per_query_head(views.fixed.k, query)).to(query.dtype)
    if views.format == "int4_had":
        from kvlab.quant.hadamard import turn

        query = turn(query).to(query.dtype)
    return query


def left(out: torch.Tensor, views: PageViews) -> torch.Tensor:
    """Results [T, Hq, Dv] from sums of stored values: the other side of `entered`."""
    if views.format == "int4_had":
        from kvlab.quant.hadamard import turn

        out = turn(out).to(out.dtype)
    if views.fixed is not None:
        out = (out * _per_query_head(views.fixed.v, out)).to(out.dtype)
    return out


def _per_query_head(scale: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return scale.repeat_interleave(rows.shape[1] // scale.shape[0], dim=0)


def decode_launches(
    query: torch.Tensor,
    views: PageViews,
    batch: AttentionBatch,
    rules: Rules,
    out: torch.Tensor,
    split: int = 0,
) -> list[Launch]:
    """The launches that attend the batch's decodes, `query` [B, Hq, D], into `out` [B, Hq, Dv].

    Args:
        split: tokens of a split, 0 for `SPLIT`.
    """
    split = split or SPLIT
    count, num_heads, _ = query.shape
    splits = count_splits(batch.max_seq_len, rules, split)
    lse = query.new_empty((count, splits, num_heads), dtype=torch.float32)
    parts = out[:, None] if splits == 1 else lse.new_empty((count, splits, num_heads, out.shape[2]))
    launches = [split_launch(query, views, batch, rules, Parts(parts, lse, split, splits == 1))]
    if splits > 1:
        launches.append(merge_launch(parts, lse, out, rules.sinks))
    return launches


@dataclass(frozen=True, eq=False)
class Parts:
    """Where the splits of a decode write: results [B, splits, Hq, Dv], log2 of their sums fp32 [B, splits, Hq].

    Attributes:
        tokens: of a split. alone: there is one split, and its result is the decode's.
        first: int32 [B], tokens before it are left out; None: none are.
    """

    results: torch.Tensor
    lse: torch.Tensor
    tokens: int
    alone: bool = False
    first: torch.Tensor | None = None

    def args(self) -> dict:
        """Run-time arguments by name."""
        results, lse = self.results, self.lse
        return {
            "p_out": results, "p_lse": lse, "s_out_row": results.stride(0), "s_out_split": results.stride(1),
            "s_out_head": results.stride(2), "s_lse_row": lse.stride(0), "s_lse_split": lse.stride(1),
        }  # fmt: skip


def split_launch(
    query: torch.Tensor, views: PageViews, batch: AttentionBatch, rules: Rules, parts: Parts
) -> Launch:  # fmt: skip
    """The launch of a decode's splits."""
    packed = views.format in PACKED
    meta = (packed_meta if packed else whole_meta)(query, views, rules)
    meta |= {"BLOCK_H": min(64, power_of_2(meta["GROUP"], 16)), "SPLIT": parts.tokens, "ALONE": parts.alone}
    args = page_args(query, views, batch, rules) | {"p_first": parts.first} | parts.args()
    grid = (views.k.shape[1] * -(-meta["GROUP"] // meta["BLOCK_H"]), parts.lse.shape[1], query.shape[0])
    return Launch(paged_decode_packed if packed else paged_decode, grid, args, meta, num_stages=3)


def prefill_launch(
    query: torch.Tensor,
    views: PageViews,
    batch: AttentionBatch,
    rules: Rules,
    out: torch.Tensor,
) -> Launch:
    """The launch that attends the batch's chunks, all sequences after its decodes, into rows of `out` [T, Hq, Dv]."""
    kv_heads, first, tree, packed = views.k.shape[1], batch.num_decodes, batch.tree, views.format in PACKED
    meta = (packed_meta if packed else whole_meta)(query, views, rules)
    wide = max(query.shape[2], out.shape[2]) > 128
    warp_groups = warp_group_products(query.device)
    block_m = power_of_2(meta["GROUP"], 128 if warp_groups and not wide and not tree else 64)
    decoded_on_amd = amd(query.device) and (packed or meta["SCALES"])
    # a tree's mask is a second tile of the scores' size, two halves are two products' operands in registers; of codes of
    # 4 bits a tile of 32 tokens is 8 bytes a lane, so that where operands need not be in registers it has 64
    small = wide or (not warp_groups if packed else tree) or decoded_on_amd
    block_n = 32 if small else meta["BLOCK_N"]
    meta |= {"BLOCK_M": block_m, "BLOCK_Q": block_m // meta["GROUP"], "BLOCK_N": block_n}
    args = page_args(query, views, batch, rules) | {
        "p_start": batch.query_start_loc, "p_tree": tree.ancestors.view(torch.uint8) if tree else None,
        "p_tree_len": tree.sizes if tree else None, "p_out": out, "first_seq": first, "num_seqs": batch.num_seqs,
        "s_out_row": out.stride(0), "s_out_head": out.stride(1),
        "s_tree_seq": tree.ancestors.stride(0) if tree else 0, "s_tree_node": tree.ancestors.stride(1) if tree else 0,
    }  # fmt: skip
    # each sequence may end in a block that is not full
    blocks = (query.shape[0] - first) // meta["BLOCK_Q"] + batch.num_seqs - first
    # two waves of a SIMD share its registers, which does not leave each what a decoded tile and its sums take
    warps = 4 if decoded_on_amd else 8
    return Launch(paged_prefill_packed if packed else paged_prefill, (blocks, kv_heads), args, meta, num_warps=warps)


def count_splits(longest: int, rules: Rules, split: int) -> int:
    """Splits that a sequence of at most `longest` tokens can touch: a window may straddle one more cut."""
    spans = [n for n in (rules.window, rules.chunk) if n]
    return max(1, -(-longest // split) if not spans else min(-(-longest // split), -(-min(spans) // split) + 1))


def whole_meta(query: torch.Tensor, views: PageViews, rules: Rules) -> dict:
    """Compile-time arguments over codes of one value each."""
    head_dim, width, shared = query.shape[2], views.value_dim, get_format(views.format).group_values
    least = max(16, shared)
    return _rules_meta(query, views, rules) | {
        "D": head_dim, "BLOCK_D": power_of_2(head_dim, least), "DV": width, "BLOCK_DV": power_of_2(width, least),
        # a tile that is decoded before its product takes twice the registers
        "BLOCK_N": 64 if max(head_dim, width) <= 128 and not shared else 32, "SOFT_FP8": soft_fp8(views),
        "SCALES": WHOLE[views.format], "SHARED": shared,
    }  # fmt: skip


def packed_meta(query: torch.Tensor, views: PageViews, rules: Rules) -> dict:
    """Compile-time arguments over 4-bit codes."""
    kind, shared = PACKED[views.format]
    rows = [views.layout[name].row_bytes for name in ("k", "v")]
    meta = {
        "D": query.shape[2] // 2, "BLOCK_D": power_of_2(rows[0], 16), "ROW": rows[0],
        "DV": views.value_dim // 2, "BLOCK_DV": power_of_2(rows[1], 16), "ROW_V": rows[1],
        "KIND": kind, "SHARED": shared, "BLOCK_N": 64,
    }  # fmt: skip
    return _rules_meta(query, views, rules) | meta


def _rules_meta(query: torch.Tensor, views: PageViews, rules: Rules) -> dict:
    return {
        "GROUP": query.shape[1] // views.k.shape[1], "PAGE": views.block_size, "WINDOW": rules.window,
        "CHUNK": rules.chunk, "SOFTCAP": rules.softcap > 0, "COMPUTE": compute_type(query.dtype, views.k.dtype),
    }  # fmt: skip


def page_args(query: torch.Tensor, views: PageViews, batch: AttentionBatch, rules: Rules) -> dict:
    """Run-time arguments that all attention kernels over pages of keys and values take."""
    as_bytes = soft_fp8(views)
    k, v = (x.view(torch.uint8) if as_bytes else x for x in (views.k, views.v))
    scales = [
        x.view(torch.uint8) if x is not None and x.dtype.itemsize == 1 else x for x in (views.k_scale, views.v_scale)
    ]
    steps, value_steps = ((0, 0, 0) if x is None else x.stride()[:3] for x in scales)
    return {
        "p_q": query, "p_k": k, "p_v": v, "p_k_scale": scales[0], "p_v_scale": scales[1], "p_sink": rules.sinks,
        "p_alibi": rules.alibi, "p_table": batch.block_table, "p_len": batch.seq_lens,
        "scale": float(rules.scale), "softcap": float(rules.softcap),
        "s_q_row": query.stride(0), "s_q_head": query.stride(1), "s_page": k.stride(0), "s_k_head": k.stride(1),
        "s_k_token": k.stride(2), "s_v_page": v.stride(0), "s_v_head": v.stride(1), "s_v_token": v.stride(2),
        "s_scale_page": steps[0], "s_scale_head": steps[1], "s_scale_token": steps[2],
        "s_vs_head": value_steps[1], "s_vs_token": value_steps[2],  # a value's scales are as many as its groups
        "s_table": batch.block_table.stride(0),
    }  # fmt: skip


def soft_fp8(views: PageViews) -> bool:
    """Whether fp8 codes are decoded by moving bits."""
    return views.format.startswith("fp8_e4m3") and not native_fp8(views.k.device)


def compute_type(query: torch.dtype, codes: torch.dtype) -> tl.dtype:
    """The type of the products' operands: the query's, or what holds it and 16- or 32-bit codes.

    Triton's interpreter keeps bf16 as integers and multiplies those, so there it is fp32.
    """
    found = torch.promote_types(query, codes) if codes in TYPES else query
    return tl.float32 if found == torch.bfloat16 and interpreted() else TYPES[found]
