"""What all Triton kernels share: how one is launched, and what a launch says about itself when nothing runs.

Import this module (and with it triton) only where a kernel is used. `TRITON_INTERPRET=1` has to be set before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

LOG2E = 1.4426950408889634  # kernels sum powers of two: exp(x) = exp2(x * LOG2E)

TYPE_NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8", torch.uint8: "u8",
    torch.int32: "i32", torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch of a kernel, not yet made.

    Attributes:
        kernel: the function under `@triton.jit`.
        grid: programs along each axis.
        args: run-time arguments by parameter name: tensors, integers, floats; None where the kernel has no use for one.
        meta: compile-time arguments by parameter name.
        num_warps, num_stages: threads of a program in warps; loads in flight in its loop.
        strided: tensors whose last axis the kernel walks by a stride that it is given.

    Raises:
        ValueError: another tensor whose last axis is not contiguous: the kernel would read its neighbours in memory.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    meta: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    strided: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in self.args.items():
            if isinstance(value, torch.Tensor) and name not in self.strided and _last_stride(value) != 1:
                raise ValueError(
                    f"{name} {tuple(value.shape)} of {self.kernel.__name__}: the stride of its last axis is "
                    f"{value.stride(-1)}, must be 1"
                )

    def run(self) -> None:
        """Runs it; a grid without programs is no launch."""
        if all(self.grid):
            self.kernel[self.grid](**self.args, **self.meta, num_warps=self.num_warps, num_stages=self.num_stages)

    def signature(self) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list]]:
        """(types, constants, attributes) with which a real launch of these arguments compiles the kernel.

        Memory begins at a multiple of 16 bytes, as allocators give it, and `kvlab.specs.layout` places segments so: a
        tensor does that begins a multiple of 16 bytes into its memory. An integer that is a multiple of 16 is known as
        one, and 1 is a constant.
        """
        types, constants, facts = {}, {}, {}
        for i, name in enumerate(self.kernel.arg_names):
            value = self.args.get(name, self.meta.get(name))
            if name in self.meta or value is None or (type(value) is int and value == 1):
                types[name], constants[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                types[name] = f"*{TYPE_NAMES[value.dtype]}"
                if value.storage_offset() * value.element_size() % 16 == 0:
                    facts[(i,)] = [["tt.divisibility", 16]]
            elif isinstance(value, float):
                types[name] = "fp32"
            else:
                types[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0:
                    facts[(i,)] = [["tt.divisibility", 16]]
        return types, constants, facts


def _last_stride(x: torch.Tensor) -> int:
    """Elements between neighbours of the last axis; 1 where there are none."""
    return x.stride(-1) if x.dim() and x.shape[-1] > 1 and x.numel() else 1


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


_targets: list[Any] = []


@contextmanager
def building_for(target: Any) -> Iterator[None]:
    """Launches made inside are those of a device of `target` (a triton GPUTarget), whatever this machine has."""
    _targets.append(target)
    try:
        yield
    finally:
        _targets.pop()


def native_fp8(device: torch.device) -> bool:
    """Whether kernels may convert fp8 e4m3 by an instruction: from compute capability 8.9 on.

    The interpreter may; elsewhere (sm_80, AMD's gfx942 with its other e4m3) the bits are moved into place.
    """
    if _targets:
        return _targets[-1].backend == "cuda" and _targets[-1].arch >= 89
    if device.type != "cuda" or torch.version.hip is not None:
        return device.type == "cpu"
    return torch.cuda.get_device_capability(device) >= (8, 9)


def warp_group_products(device: torch.device) -> bool:
    """Whether products of 64 rows and more are done by groups of four warps, their sums beside the registers' other
    needs: compute capabilities 9 to 11. Elsewhere (12.x too, which has neither wgmma nor tcgen05) a tile has to be
    smaller."""
    if _targets:
        return _targets[-1].backend == "cuda" and 90 <= _targets[-1].arch < 120
    is_cuda = device.type == "cuda" and torch.version.hip is None
    return is_cuda and (9, 0) <= torch.cuda.get_device_capability(device) < (12, 0)


def amd(device: torch.device) -> bool:
    """Whether kernels are for AMD's matrix units, whose sums and operands all lie in a wave's registers."""
    if _targets:
        return _targets[-1].backend == "hip"
    return device.type == "cuda" and torch.version.hip is not None


def power_of_2(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least `n` and `least`: what a block of a kernel spans."""
    return max(least, triton.next_power_of_2(n))
