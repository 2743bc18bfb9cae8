"""Decodes over closed groups and a recent window by Triton kernels: one over the groups, one over the window, a merge."""

from __future__ import annotations

import torch

from kvlab.ops.attention import triton_ as whole
from kvlab.ops.attention.rules import Rules
from kvlab.ops.attention.triton_closed import closed_decode
from kvlab.ops.attention.triton_merge import merge_launch
from kvlab.ops.batch import AttentionBatch
from kvlab.ops.grouped_views import GroupedViews
from kvlab.ops.triton_support import Launch, power_of_2

TILE = 64  # tokens of a tile


def supports(query: torch.Tensor, views: GroupedViews) -> bool:
    """Whether the kernels know the format: KIVI's codes of 2 or 4 bits, keys as attention gets them.

    KVQuant's are torch's: its keys are stored before their rotation, which a tile would turn by a table of angles at
    every decode step, and its outliers name places all over a group, which registers cannot be indexed by.
    """
    part = views.part
    known = part.format.name.startswith("kivi") and views.turn is None and part.format.bits in (2, 4)
    return known and part.key_width % (8 // part.format.bits) == 0 and whole.supports(query, views.recent)


def decode(query: torch.Tensor, views: GroupedViews, batch: AttentionBatch, rules: Rules, out: torch.Tensor) -> None:
    """Attends the batch's decodes, `query` [B, Hq, D], into `out` [B, Hq, Dv]; reads nothing back to the host."""
    for launch in decode_launches(query, views, batch, rules, out):
        launch.run()


def decode_launches(
    query: torch.Tensor,
    views: GroupedViews,
    batch: AttentionBatch,
    rules: Rules,
    out: torch.Tensor,
    split: int = 0,
) -> list[Launch]:
    """The launches of `decode`; where no sequence is long enough for a closed group, those of the recent window alone.

    Args:
        split: tokens of a split, a multiple of a group's; 0 for `SPLIT`.
    """
    part, split = views.part, split or whole.SPLIT
    tokens, longest = part.format.group_tokens, batch.max_seq_len - part.format.recent
    if longest < tokens:
        return whole.decode_launches(query, views.recent, batch, rules, out, split)
    far = whole.count_splits(longest, rules, split)
    near = whole.count_splits(batch.max_seq_len, Rules(rules.scale, part.format.recent + tokens), split)
    lse = query.new_empty((len(query), far + near, query.shape[1]), dtype=torch.float32)
    results = lse.new_empty((*lse.shape, out.shape[2]))
    closed = closed_tokens(views, batch)
    window = whole.Parts(results[:, far:], lse[:, far:], split, first=closed)
    groups = whole.Parts(results[:, :far], lse[:, :far], split)
    return [
        closed_launch(query, views, batch, rules, (groups, closed)),
        whole.split_launch(query, views.recent, batch, rules, window),
        merge_launch(results, lse, out, rules.sinks),
    ]


def closed_tokens(views: GroupedViews, batch: AttentionBatch) -> torch.Tensor:
    """int32 [B]: tokens of each decode that its query reads from closed groups."""
    fmt = views.part.format
    before = (batch.seq_lens[: batch.num_decodes] - fmt.recent).clamp_min(0)
    return (torch.div(before, fmt.group_tokens, rounding_mode="floor") * fmt.group_tokens).to(torch.int32)


def closed_launch(
    query: torch.Tensor,
    views: GroupedViews,
    batch: AttentionBatch,
    rules: Rules,
    where: tuple[whole.Parts, torch.Tensor],
) -> Launch:
    """The launch over closed groups; `where`: its parts of the result, and `closed_tokens`."""
    part, segments = views.part, views.closed.segments
    names = {"k": "k_closed", "v": "v_closed", "k_scale": "k_closed_scale", "v_scale": "v_closed_scale"}
    stored = {short: segments[name] for short, name in names.items()}
    strides = {
        f"s_{short}_{axis}": stored[name].stride(i)
        for short, name in (("k", "k"), ("v", "v"), ("ks", "k_scale"), ("vs", "v_scale"))
        for i, axis in enumerate(("page", "head", "entry"))
    }
    args = strides | {f"p_{short}": tensor for short, tensor in stored.items()} | where[0].args() | {
        "p_q": query, "p_alibi": rules.alibi, "p_table": batch.closed, "p_len": batch.seq_lens, "p_closed": where[1],
        "scale": float(rules.scale), "softcap": float(rules.softcap),
        "s_q_row": query.stride(0), "s_q_head": query.stride(1), "s_table": batch.closed.stride(0),
    }  # fmt: skip
    tokens, shared = part.format.group_tokens, part.value_group
    group, wide = query.shape[1] // part.num_kv_heads, power_of_2(part.value_width, 16)
    single = shared == part.value_width
    meta = {
        "GROUP": group, "BLOCK_H": min(64, power_of_2(group, 16)), "D": part.key_width,
        "BLOCK_R": power_of_2(part.key_width * part.format.bits // 8, 16), "DV": part.value_width, "BLOCK_DV": wide,
        "BITS": part.format.bits, "TOKENS": tokens, "ENTRIES": views.closed.block_size,
        "GROUPS": max(1, TILE // tokens), "SHARED": shared, "COUNT": 1 if single else wide // shared,
        "SPLIT": where[0].tokens, "WINDOW": rules.window, "CHUNK": rules.chunk, "SOFTCAP": rules.softcap > 0,
        "COMPUTE": whole.compute_type(query.dtype, views.recent.k.dtype),
    }  # fmt: skip
    grid = (part.num_kv_heads * -(-group // meta["BLOCK_H"]), where[0].lse.shape[1], len(query))
    return Launch(closed_decode, grid, args, meta, num_stages=3)
