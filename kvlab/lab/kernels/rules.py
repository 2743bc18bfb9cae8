"""What must hold of every compiled configuration, and where it does not, why."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch

from kvlab.lab.kernels.reading import Reading


@dataclass(frozen=True)
class Allowed:
    """An exception.

    Attributes:
        rule: of `broken`. where: pattern of "arch/config".
        limit: how far: bytes of the narrowest load of codes, or of stack a thread at most. why: the reason.
    """

    rule: str
    where: str
    limit: int
    why: str


EXCEPTIONS: tuple[Allowed, ...] = (
    Allowed("16-byte loads", "sm_*/*/fp8_*", 8, "values of 8 bits are copied 8 bytes a lane: the shared-memory layout of a "
            "product's second operand is shuffled in units of 8 elements. 32 lanes still cover 256 bytes in a row; keys load 16"),
    Allowed("16-byte loads", "sm_*/*/int8*", 8, "as fp8: values of 8 bits, 8 bytes a lane"),
    Allowed("16-byte loads", "sm_*/decode/*/*4*", 8, "as fp8: packed values, 8 bytes a lane"),
    *(Allowed("16-byte loads", f"sm_80/{name}/*/*4*", 8, "tiles of 32 tokens, for with 64 the two halves of a tile as operands "
              "do not fit the registers: 64 bytes a token are 8 for each of 256 lanes, 256 bytes in a row for 32 of them")
      for name in ("prefill", "verify-tree")),
    *(Allowed("no spills", f"sm_80/prefill/{name}/bf16", most, "two to six registers' worth: ptxas stops at 128 registers, with "
              "which twice as many programs are resident as with 255. A tile of 32 tokens spills nothing, and has half the "
              "product's width: which of the two is faster was not measured")
      for name, most in (("deepseek-expanded", 8), ("llama-3-70b-tp8", 8), ("phi-2", 24), ("phi-3-mini", 24))),
    Allowed("no spills", "sm_100/prefill/gpt-oss/bf16", 8, "two registers' worth, as on sm_80"),
    Allowed("no spills", "gfx942/mla-decode/*/bf16", 60, "512 latents of 16 heads in fp32 sums, and no place for a sum but "
            "registers; tiles of 16 heads and 16 tokens leave the least (with 32 of each 1,052 bytes)"),
    Allowed("no spills", "gfx942/mla-decode/*/fp8_e4m3", 448, "as bf16, and its fp8 is decoded by moving bits"),
)  # fmt: skip


def broken(arch: str, name: str, reading: Reading) -> list[tuple[str, str]]:
    """(rule, what was found) for every rule that `reading` breaks and no exception covers; loads and matrix units for
    NVIDIA's targets."""
    found, where = [], f"{arch}/{name}"
    if reading.spill_bytes and not excused("no spills", where, reading.spill_bytes):
        found.append(("no spills", f"{reading.spill_bytes} bytes of stack per thread"))
    if arch.startswith("sm_"):
        narrow = {w: n for w, n in reading.code_loads.items() if w < 16 and not excused("16-byte loads", where, w)}
        if narrow:
            found.append(("16-byte loads", f"code loads of {', '.join(f'{w} bytes ({n})' for w, n in narrow.items())}"))
        if reading.scalar_dots:
            found.append(("tensor cores", f"{reading.scalar_dots} of {reading.dots} products without"))
    return found


def excused(rule: str, where: str, found: int) -> str:
    """The reason of the exception that covers `found` bytes at `where`, empty if none does."""
    for one in EXCEPTIONS:
        within = found >= one.limit if one.rule == "16-byte loads" else found <= one.limit
        if one.rule == rule and fnmatch(where, one.where) and within:
            return one.why
    return ""
