"""Kernels with planted faults, compiled in a process of its own: what the checker of `kvlab kernels` must see.

Run as `python planted.py`; prints the broken rules of each as JSON.
"""

from __future__ import annotations

import json

import torch
import triton
import triton.language as tl

from kvlab.lab.kernels import reading
from kvlab.lab.kernels.compiling import compile_launch
from kvlab.lab.kernels.rules import broken
from kvlab.ops.triton_support import Launch


@triton.jit
def copy_rows(p_in, p_out, step, N: tl.constexpr):
    o = tl.arange(0, N)
    b = tl.load(p_in + o * step)  # codes
    tl.store(p_out + o, b)


@triton.jit
def many_values(p_in, p_out, rounds, N: tl.constexpr):
    o = tl.arange(0, N)
    b = tl.load(p_in + o)  # codes
    for _ in range(rounds):
        b = b * 1.5 + tl.flip(b, 0) + tl.sum(b, 0)
    tl.store(p_out + o, b)


@triton.jit
def product(p_a, p_b, p_out, N: tl.constexpr):
    o = tl.arange(0, N)
    at = o[:, None] * N + o[None, :]
    b_a = tl.load(p_a + at)  # codes
    b_b = tl.load(p_b + at)  # codes
    tl.store(p_out + at, tl.dot(b_a, b_b))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


CASES = {
    "wide load": lambda: Launch(copy_rows, (1,), {"p_in": meta(4096), "p_out": meta(4096), "step": 1}, {"N": 1024}),
    "scalar load": lambda: Launch(copy_rows, (1,), {"p_in": meta(4096), "p_out": meta(4096), "step": 3}, {"N": 1024}),
    "spill": lambda: Launch(
        many_values, (1,), {"p_in": meta(2**14, dtype=torch.float32), "p_out": meta(2**14, dtype=torch.float32),
                            "rounds": 7}, {"N": 2**14}),
    "product": lambda: Launch(
        product, (1,), {"p_a": meta(64, 64), "p_b": meta(64, 64), "p_out": meta(64, 64, dtype=torch.float32)},
        {"N": 64}),
}  # fmt: skip

if __name__ == "__main__":
    out = {}
    for name, launch in CASES.items():
        found = reading.read(compile_launch(launch(), "sm_90"))
        out[name] = {"broken": broken("sm_90", f"planted/{name}", found), "tensor_ops": found.tensor_ops}
    print(json.dumps(out))
