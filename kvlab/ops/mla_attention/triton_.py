"""Absorbed decode by a Triton kernel: queries enter the latent space, the kernel weighs latents, values leave it."""

from __future__ import annotations

import torch

from kvlab.ops.attention.coverage import LATENT
from kvlab.ops.attention.rules import Rules
from kvlab.ops.attention.triton_ import SPLIT, TYPES, compute_type, count_splits
from kvlab.ops.attention.triton_merge import merge_launch
from kvlab.ops.batch import AttentionBatch
from kvlab.ops.mla_attention.absorbed import enter, leave
from kvlab.ops.mla_attention.triton_kernel import mla_decode
from kvlab.ops.triton_support import Launch, amd, native_fp8, power_of_2
from kvlab.ops.views import SegmentViews


def supports(query: torch.Tensor, views: SegmentViews) -> bool:
    """Whether the kernel knows the types; the rest is `absorbed`'s."""
    return query.dtype in TYPES and all(views.layout[name].format in LATENT for name in ("latent", "rope"))


def decodes(
    query: torch.Tensor, up: torch.Tensor, views: SegmentViews, batch: AttentionBatch, scale: float, out: torch.Tensor
) -> None:
    """As `absorbed.decodes`; a padded sequence gives zeros."""
    count = batch.num_decodes
    inner, turned = enter(query[:count], up, views.width("rope"))
    seen = torch.empty_like(inner)
    for launch in decode_launches((inner, turned), views, batch, scale, seen):
        launch.run()
    out[:count] = leave(seen, up, query.shape[2] - turned.shape[2]).to(out.dtype)


def decode_launches(
    query: tuple[torch.Tensor, torch.Tensor],
    views: SegmentViews,
    batch: AttentionBatch,
    scale: float,
    out: torch.Tensor,
    split: int = SPLIT,
) -> list[Launch]:
    """The launches that weigh latents: `query` (in the latent space [B, H, C], rotated [B, H, R]), `out` [B, H, C]."""
    inner, turned = query
    count, heads, latent = inner.shape
    rotated, rope = turned.shape[2], views["rope"]
    soft = rope.dtype == torch.float8_e4m3fn and not native_fp8(rope.device)
    pages = [views[name].view(torch.uint8) if soft else views[name] for name in ("latent", "rope")]
    splits = count_splits(batch.max_seq_len, Rules(scale), split)
    lse = inner.new_empty((count, splits, heads), dtype=torch.float32)
    parts = out[:, None] if splits == 1 else lse.new_empty((count, splits, heads, latent))
    args = {
        "p_inner": inner, "p_turned": turned, "p_latent": pages[0], "p_rope": pages[1], "p_table": batch.block_table,
        "p_len": batch.seq_lens, "p_out": parts, "p_lse": lse, "scale": float(scale),
        "s_inner_row": inner.stride(0), "s_inner_head": inner.stride(1),
        "s_turned_row": turned.stride(0), "s_turned_head": turned.stride(1),
        "s_latent_page": pages[0].stride(0), "s_latent_token": pages[0].stride(2),
        "s_rope_page": pages[1].stride(0), "s_rope_token": pages[1].stride(2), "s_table": batch.block_table.stride(0),
        "s_out_row": parts.stride(0), "s_out_head": parts.stride(2), "s_out_split": parts.stride(1),
        "s_lse_row": lse.stride(0), "s_lse_split": lse.stride(1),
    }  # fmt: skip
    # one latent is 512 fp32 sums: AMD's registers hold those of half as many heads, beside half as many tokens
    most_heads, tokens = (16, 16) if amd(inner.device) else (32, 32)
    block_h = min(most_heads, power_of_2(heads, 16))
    meta = {
        "HEADS": heads, "BLOCK_H": block_h, "C": latent, "BLOCK_C": power_of_2(latent, 16), "R": rotated,
        "BLOCK_R": power_of_2(rotated, 16), "PAGE": views.block_size, "BLOCK_N": tokens, "SPLIT": split,
        "ALONE": splits == 1, "SOFT_FP8": soft, "COMPUTE": compute_type(inner.dtype, rope.dtype),
    }  # fmt: skip
    launches = [Launch(mla_decode, (-(-heads // block_h), splits, count), args, meta, num_warps=8, num_stages=2)]
    return [*launches, merge_launch(parts, lse, out)] if splits > 1 else launches
