"""write_kv as one Triton kernel, with the rotation of the keys in it where a caller has not turned them yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlab.ops.triton_support import Launch, power_of_2
from kvlab.ops.views import PageViews
from kvlab.ops.write_kv.triton_kernel import write_rows

KINDS = {"fp32": "plain", "bf16": "plain", "fp16": "plain", "fp8_e4m3": "fp8", "int8": "int8"}


def supports(key: torch.Tensor, views: PageViews) -> bool:
    """Whether the kernel knows the types; the rest is `torch_`'s."""
    return key.dtype in (torch.float32, torch.bfloat16, torch.float16) and views.format in KINDS


@dataclass(frozen=True, eq=False)
class Angles:
    """By what keys are turned: `cos`, `sin` [max_position, R / 2] and `positions` int64 [T], as in `kvlab.ops.rope`."""

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    views: PageViews,
    slot_mapping: torch.Tensor,
    angles: Angles | None = None,
) -> None:
    """See `kvlab.ops.write_kv.write_kv`. With `angles` the keys are turned first, in fp32, and rounded once."""
    write_launch(key, value, views, slot_mapping, angles).run()


def write_launch(
    key: torch.Tensor, value: torch.Tensor, views: PageViews, slot_mapping: torch.Tensor, angles: Angles | None
) -> Launch:
    """The launch that writes a step's rows.

    Raises:
        ValueError: a storage format without a kernel.
    """
    if views.format not in KINDS:
        raise ValueError(f"kv dtype {views.format!r}: the write kernel stores {', '.join(KINDS)}")
    kind = KINDS[views.format]
    k, v = (x.view(torch.uint8) if kind == "fp8" else x for x in (views.k, views.v))
    heads, head_dim, width = key.shape[1], key.shape[2], value.shape[2]
    cos, sin, positions = (angles.cos, angles.sin, angles.positions) if angles else (None, None, None)
    scale = views.k_scale
    args = {
        "p_key": key, "p_value": value, "p_cos": cos, "p_sin": sin, "p_position": positions, "p_slot": slot_mapping,
        "p_k": k, "p_v": v, "p_k_scale": scale, "p_v_scale": views.v_scale,
        "s_key_row": key.stride(0), "s_key_head": key.stride(1),
        "s_value_row": value.stride(0), "s_value_head": value.stride(1), "s_angle": cos.stride(0) if angles else 0,
        "s_k_page": k.stride(0), "s_k_head": k.stride(1), "s_k_token": k.stride(2),
        "s_v_page": v.stride(0), "s_v_head": v.stride(1), "s_v_token": v.stride(2),
        "s_scale_page": 0 if scale is None else scale.stride(0),
        "s_scale_head": 0 if scale is None else scale.stride(1),
    }  # fmt: skip
    block_h = min(16, power_of_2(heads))
    meta = {
        "HEADS": heads, "BLOCK_H": block_h, "D": head_dim, "BLOCK_D": power_of_2(head_dim), "DV": width,
        "BLOCK_DV": power_of_2(width), "HALF": angles.cos.shape[1] if angles else 0, "PAGE": views.block_size,
        "KIND": kind,
    }  # fmt: skip
    return Launch(write_rows, (key.shape[0], -(-heads // block_h)), args, meta, num_warps=4, num_stages=1)
