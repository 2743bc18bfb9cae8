"""Which pages the Triton kernels read, and why the others are torch's on a GPU too: gathered and decoded in memory first.

Without triton, so that it can be said where triton does not exist.
"""

from __future__ import annotations

# numbers per row, or group of its values, of formats with a code per value: 0 none, 1 a factor, 2 a step and a smallest
# value
WHOLE = {"fp32": 0, "bf16": 0, "fp16": 0, "fp8_e4m3": 0, "fp8_e5m2": 0, "fp8_e4m3_row": 1, "fp8_e5m2_row": 1,
         "int8": 1, "int8_asym": 2, "int8_g32": 1, "int8_asym_g32": 2}  # fmt: skip
# 4-bit formats: (kind of the scales, values that share one; 0: the row)
PACKED = {"int4": ("int4", 0), "int4_sym": ("int4", 0), "int4_had": ("int4", 0), "int4_g32": ("step", 32),
          "int4_sym_g32": ("fp16", 32), "nvfp4": ("e4m3", 16), "mxfp4": ("e8m0", 32)}  # fmt: skip
LATENT = ("fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2")
"""Formats of latents and their rotary parts that the absorbed decode reads."""
CLOSED = ("kivi4", "kivi2")
"""Formats of closed groups that a decode reads; a prefill over them is torch's."""


def fallback(fmt: str, key_dim: int, value_dim: int = 0) -> str:
    """Why attention over keys and values in format `fmt` is torch's on a GPU; empty where a kernel reads the pages."""
    if fmt in WHOLE:
        return ""
    if fmt in PACKED:
        odd = key_dim % 2 or (value_dim or key_dim) % 2
        return "an odd row has no two halves of equal length" if odd else ""
    if fmt in CLOSED:
        return "" if key_dim % (4 if fmt == "kivi2" else 2) == 0 else "keys of an odd number of bytes"
    return _REASONS[fmt]


_REASONS = {
    "fp64": "kernels compute in fp32",
    "int3_had": "codes of 3 bits lie in two planes, which a tile would have to put together",
    "kvquant3": "keys before rotation, and outliers whose places registers cannot be indexed by",
}


def latent_fallback(fmt: str) -> str:
    """As `fallback`, of latents (576 values and the like) under absorbed attention."""
    return (
        ""
        if fmt in LATENT
        else "a tile of latents is key and value at once, and is read as it lies: codes of one value"
    )
