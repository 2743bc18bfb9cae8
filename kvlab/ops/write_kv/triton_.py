"""write_kv as one Triton kernel, with the rotation of the keys in it where a caller has not turned them yet."""

from __future__ import annotations

import torch

from kvlab.ops.rope import Angles
from kvlab.ops.triton_support import Launch, power_of_2
from kvlab.ops.views import PageViews
from kvlab.ops.write_kv.triton_kernel import write_rows

# every format of rows: what the kernel does, bits of a code (of fp8's mantissa), values that share a scale, 0: a row.
# Groups of tokens (KIVI, KVQuant) are closed in torch (`attention.grouped`): once in 32 tokens and layer, and what a
# step writes of them is the recent window, in a format of rows.
KINDS = {"fp32": ("plain", 0, 0), "bf16": ("plain", 0, 0), "fp16": ("plain", 0, 0),
         "fp8_e4m3": ("fp8", 3, 0), "fp8_e5m2": ("fp8", 2, 0),
         "fp8_e4m3_row": ("fp8 row", 3, 0), "fp8_e5m2_row": ("fp8 row", 2, 0),
         "int8": ("int8", 8, 0), "int8_asym": ("int8 asym", 8, 0),
         "int8_g32": ("signed", 8, 32), "int8_asym_g32": ("step", 8, 32),
         "int4": ("int4", 4, 0), "int4_sym": ("int4 sym", 4, 0), "int4_g32": ("step", 4, 32),
         "int4_sym_g32": ("signed", 4, 32),
         "nvfp4": ("nvfp4", 4, 16), "mxfp4": ("mxfp4", 4, 32),
         "int4_had": ("int4", 4, 0), "int3_had": ("step", 3, 0)}  # fmt: skip


def supports(key: torch.Tensor, views: PageViews) -> bool:
    """Whether the kernel knows the types; fp64 is `torch_`'s."""
    return key.dtype in (torch.float32, torch.bfloat16, torch.float16) and views.format in KINDS


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
    kind, bits, shared = KINDS[views.format]
    k, v, k_scale, v_scale = (_stored(x) for x in (views.k, views.v, views.k_scale, views.v_scale))
    heads, head_dim, width = key.shape[1], key.shape[2], value.shape[2]
    cos, sin, positions = (angles.cos, angles.sin, angles.positions) if angles else (None, None, None)
    fixed = (None, None)
    if views.fixed is not None:
        fixed = views.fixed.k.expand(heads, head_dim), views.fixed.v.expand(heads, width)
    args = {
        "p_key": key, "p_value": value, "p_cos": cos, "p_sin": sin, "p_position": positions, "p_slot": slot_mapping,
        "p_k": k, "p_v": v, "p_k_scale": k_scale, "p_v_scale": v_scale, "p_k_fixed": fixed[0], "p_v_fixed": fixed[1],
        "s_key_row": key.stride(0), "s_key_head": key.stride(1),
        "s_value_row": value.stride(0), "s_value_head": value.stride(1), "s_angle": cos.stride(0) if angles else 0,
        "s_k_page": k.stride(0), "s_k_head": k.stride(1), "s_k_token": k.stride(2),
        "s_v_page": v.stride(0), "s_v_head": v.stride(1), "s_v_token": v.stride(2),
        **_strides("s_ks_", ("page", "head", "token"), k_scale), **_strides("s_vs_", ("page", "head", "token"), v_scale),
        **_strides("s_kf_", ("head", "value"), fixed[0]), **_strides("s_vf_", ("head", "value"), fixed[1]),
    }  # fmt: skip
    block_h, least = min(16, power_of_2(heads)), max(shared, 16)
    half, pairs = (angles.cos.shape[1], angles.interleaved) if angles else (0, False)
    meta = {
        "HEADS": heads, "BLOCK_H": block_h, "D": head_dim, "BLOCK_D": power_of_2(head_dim, least), "DV": width,
        "BLOCK_DV": power_of_2(width, least), "HALF": half, "PAIRS": pairs, "PAGE": views.block_size,
        "KIND": kind, "BITS": bits, "SHARED": shared, "TURN": views.format.endswith("_had"),
    }  # fmt: skip
    grid, strided = (key.shape[0], -(-heads // block_h)), ("p_k_fixed", "p_v_fixed")
    return Launch(write_rows, grid, args, meta, num_warps=4, num_stages=1, strided=strided)


def _stored(x: torch.Tensor | None) -> torch.Tensor | None:
    """Pages as the kernel writes them: fp8 as its bits."""
    return x.view(torch.uint8) if x is not None and x.dtype.itemsize == 1 and x.dtype.is_floating_point else x


def _strides(prefix: str, axes: tuple[str, ...], x: torch.Tensor | None) -> dict[str, int]:
    """The strides of the first axes by name, 0 without a tensor."""
    return {prefix + axis: 0 if x is None else x.stride(i) for i, axis in enumerate(axes)}
