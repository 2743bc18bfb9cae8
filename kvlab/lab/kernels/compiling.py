"""A launch compiled for a GPU that is not there: the same types, constants and alignment facts as a real launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvlab.ops.triton_support import Launch, interpreted

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True, eq=False)
class Compiled:
    """What a compilation left behind.

    Attributes:
        launch, arch: what was compiled for what.
        texts: stage name ("ttgir", "ptx", "amdgcn", ...) -> text.
        binary: the cubin or hsaco.
        shared_bytes: shared memory of a program.
        num_warps, warp_size: threads of a program.
    """

    launch: Launch
    arch: str
    texts: dict[str, str]
    binary: bytes
    shared_bytes: int
    num_warps: int
    warp_size: int


def get_target(arch: str) -> Any:
    """The compiler's target of `arch`.

    Raises:
        ValueError: unknown, or a process whose kernels are interpreted.
    """
    if interpreted():
        raise ValueError("TRITON_INTERPRET is set: kernels are interpreted in this process and cannot be compiled")
    if arch not in TARGETS:
        raise ValueError(f"arch {arch!r}: must be one of {', '.join(TARGETS)}")
    return TARGETS[arch]


def compile_launch(launch: Launch, arch: str) -> Compiled:
    """`launch` compiled for `arch`, afresh: a result kept by Triton may name source lines that have since moved."""
    target = get_target(arch)
    types, constants, facts = launch.signature()
    source = ASTSource(launch.kernel, types, constants, facts)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        built = triton.compile(source, target=target, options=options)
    texts = {name: text for name, text in built.asm.items() if isinstance(text, str)}
    binary = built.asm["cubin" if target.backend == "cuda" else "hsaco"]
    return Compiled(launch, arch, texts, binary, built.metadata.shared, launch.num_warps, target.warp_size)
