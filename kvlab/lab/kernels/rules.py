"""What must hold of every compiled configuration, and where it does not, why."""

from __future__ import annotations

from fnmatch import fnmatch

from kvlab.lab.kernels.reading import Reading

# (rule, pattern of "arch/config", reason)
EXCEPTIONS: tuple[tuple[str, str, str], ...] = (
    ("16-byte loads", "sm_*/*/fp8_*", "values of 8 bits are copied 8 bytes a lane: the shared-memory layout of a product's "
     "second operand is shuffled in units of 8 elements. 32 lanes still cover 256 bytes in a row; keys load 16"),
    ("no spills", "sm_80/prefill/deepseek-expanded/bf16", "8 bytes a thread, two registers' worth: ptxas "
     "stops at 128 registers, with which twice as many programs are resident as with 255"),
    ("16-byte loads", "sm_*/*/int8*", "as fp8: values of 8 bits, 8 bytes a lane"),
    ("16-byte loads", "sm_*/decode/*/*4*", "as fp8: packed values, 8 bytes a lane"),
    ("16-byte loads", "sm_80/prefill/*/*4*", "tiles of 32 tokens, for with 64 the two halves of a tile as operands do not fit "
     "the registers: 64 bytes a token are 8 for each of 256 lanes, 256 bytes in a row for 32 of them"),
)  # fmt: skip


def broken(arch: str, name: str, reading: Reading) -> list[tuple[str, str]]:
    """(rule, what was found) for every rule that `reading` breaks and no exception covers; for NVIDIA's targets."""
    found = []
    if arch.startswith("sm_"):
        if reading.spill_bytes:
            found.append(("no spills", f"{reading.spill_bytes} bytes of stack per thread"))
        narrow = {width: n for width, n in reading.code_loads.items() if width < 16}
        if narrow:
            found.append(("16-byte loads", f"code loads of {', '.join(f'{w} bytes ({n})' for w, n in narrow.items())}"))
        if reading.scalar_dots:
            found.append(("tensor cores", f"{reading.scalar_dots} of {reading.dots} products without"))
    return [(rule, what) for rule, what in found if not excused(rule, f"{arch}/{name}")]


def excused(rule: str, where: str) -> str:
    """The reason of the exception that covers `where`, empty if none does."""
    return next((why for r, pattern, why in EXCEPTIONS if r == rule and fnmatch(where, pattern)), "")
