"""What compiled code says about itself: registers, spills, loads by width and source line, tensor cores, occupancy."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import triton

from kvlab.lab.kernels.compiling import Compiled

MARK = "# codes"  # at the end of a source line whose load reads codes

# of a multiprocessor: registers, shared bytes, warps, programs
LIMITS = {"sm_80": (65536, 167936, 64, 32), "sm_90": (65536, 233472, 64, 32), "sm_100": (65536, 233472, 64, 32)}
RESERVED_SHARED = 1024  # bytes per program that the system keeps, from sm_80 on
AMD_VGPRS, AMD_LDS, AMD_SIMDS, AMD_WAVES = 512, 65536, 4, 8  # of a gfx942 compute unit; VGPRs and waves per SIMD


@dataclass(frozen=True)
class Reading:
    """One compiled kernel in numbers.

    Attributes:
        registers: per thread. spill_bytes: stack per thread; no kernel here has arrays of its own there.
        shared_bytes: per program.
        code_loads: bytes of one load of codes -> how many such instructions; loads: the same of all global loads.
        async_copies: copies to shared memory that no register waits for.
        tensor_ops: matrix instructions; dots: products in the source; scalar_dots: those of 8- or 16-bit operands
            that became multiplications of scalars.
        occupancy: resident warps as a fraction of those that a multiprocessor holds.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    code_loads: dict[int, int]
    loads: dict[int, int]
    async_copies: int
    tensor_ops: int
    dots: int
    scalar_dots: int
    occupancy: float


def read(compiled: Compiled) -> Reading:
    """The reading of `compiled`."""
    amd = compiled.arch.startswith("gfx")
    code = compiled.texts["amdgcn" if amd else "ptx"]
    registers, spill = _amd_resources(code) if amd else _resources(compiled.binary)
    loads = list((_amd_loads if amd else _loads)(code))
    matrix = r"^\s*v_mfma\S*" if amd else r"^\s*(?:@\S+ )?(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\S*"
    dots, scalar = _dots(compiled.texts["ttgir"])
    return Reading(
        registers,
        spill,
        compiled.shared_bytes,
        dict(Counter(width for width, codes, _ in loads if codes)),
        dict(Counter(width for width, _, _ in loads)),
        sum(asynchronous for _, _, asynchronous in loads),
        len(re.findall(matrix, code, re.MULTILINE)),
        dots,
        scalar,
        occupancy(compiled.arch, registers, compiled.shared_bytes, compiled.num_warps),
    )


def occupancy(arch: str, registers: int, shared_bytes: int, num_warps: int) -> float:
    """Resident warps of programs with these needs, as a fraction of the most that the multiprocessor holds."""
    if arch.startswith("gfx"):
        per_simd = min(AMD_WAVES, AMD_VGPRS // max(8, -(-registers // 8) * 8))
        programs = AMD_SIMDS * per_simd // num_warps
        if shared_bytes:
            programs = min(programs, AMD_LDS // shared_bytes)
        return min(1.0, programs * num_warps / (AMD_SIMDS * AMD_WAVES))
    file, shared, warps, most = LIMITS[arch]
    by_registers = file // (-(-registers * 32 // 256) * 256 * num_warps)
    programs = min(most, warps // num_warps, by_registers, shared // (shared_bytes + RESERVED_SHARED))
    return programs * num_warps / warps


def _resources(binary: bytes) -> tuple[int, int]:
    """(registers, stack and local bytes per thread) of a cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        call = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    found = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def _amd_resources(code: str) -> tuple[int, int]:
    """(vector registers, scratch bytes per lane); accumulation registers count as registers."""

    def number(name: str) -> int:
        return max(map(int, re.findall(rf"\.{name}:\s*(\d+)", code)), default=0)

    return number("vgpr_count"), number("private_segment_fixed_size")


_LOAD = re.compile(r"^\s*(?:@\S+ )?(?:(ld\.global\S*)|(cp\.async\.c[ag]\S*)\s.*?,.*?,\s*(0x[0-9a-f]+|\d+))")


def _loads(ptx: str):
    """(bytes, whether of codes, whether asynchronous) of every global load in PTX, by the source line it came from."""
    files = {n: path for n, path in re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', ptx)}
    codes = False
    for line in ptx.splitlines():
        if at := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            codes = _marked(files.get(at[1], ""), int(at[2]))
        elif found := _LOAD.match(line):
            yield (int(found[3], 0), codes, True) if found[2] else (_width(found[1]), codes, False)


def _width(instruction: str) -> int:
    lanes = re.search(r"\.v(\d)", instruction)
    bits = re.search(r"\.[busf](\d+)$", instruction)
    assert bits, f"a load of unknown width: {instruction}"
    return int(bits[1]) // 8 * (int(lanes[1]) if lanes else 1)


_AMD_BYTES = {
    "ubyte": 1,
    "sbyte": 1,
    "ushort": 2,
    "sshort": 2,
    "short": 2,
    "dword": 4,
    "dwordx2": 8,
    "dwordx3": 12,
    "dwordx4": 16,
}


def _amd_loads(code: str):
    """As `_loads`, of gfx942's assembly; nothing there is asynchronous in the sense of a copy to shared memory."""
    files = {n: path for n, path in re.findall(r'\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]+)"', code)}
    codes = False
    for line in code.splitlines():
        if at := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            codes = _marked(files.get(at[1], ""), int(at[2]))
        elif found := re.match(r"\s*(?:global|buffer)_load_(dwordx[234]|[a-z]+)", line):
            yield _AMD_BYTES.get(found[1], 4), codes, False


def _marked(path: str, line: int) -> bool:
    lines = _source(path)
    return 0 < line <= len(lines) and lines[line - 1].rstrip().endswith(MARK)


@cache
def _source(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines() if Path(path).is_file() else []


_DOT = re.compile(r"(?:tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma|amdg?\.\S*dot)\b.*")


def _dots(ttgir: str) -> tuple[int, int]:
    """(products, those of 8- or 16-bit operands that are computed without matrix units)."""
    total = scalar = 0
    for line in _DOT.findall(ttgir):
        if "tensor<" not in line and "memdesc<" not in line:
            continue
        total += 1
        types = re.findall(r"(?:tensor|memdesc)<[\dx]*x(bf16|f16|f8\w+|i8|f32)", line)
        narrow = bool(types) and types[0] != "f32"
        parent = re.search(r"parent = #(\w+)", line)
        scalar += narrow and bool(parent) and parent[1].startswith("blocked")
    return total, scalar
