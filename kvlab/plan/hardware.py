"""The accelerators a plan can be made for: what they hold, how fast they read, and who says so.

`memory_bytes` is what the driver reports where that is known (an H200 sold as 141 GB reports 143,771 MiB);
`memory_basis` says which it is. Bandwidth and FLOPS are the vendor's, without sparsity: upper bounds, not promises.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

DEFAULT_GPU = "h100-sxm"


@dataclass(frozen=True)
class Gpu:
    """One kind of accelerator.

    Attributes:
        name: as in `--gpu`.
        vendor, marketing_memory: as it is sold.
        memory_bytes, memory_basis: exact bytes the planner uses, and where they come from.
        bandwidth_bytes_per_s: of its memory.
        bf16_flops, fp8_flops: dense operations per second; None where the vendor states none or it has no units.
        source: vendor document of bandwidth and FLOPS.
        aliases, note: other names, and what a reader must know.
    """

    name: str
    vendor: str
    marketing_memory: str
    memory_bytes: int
    memory_basis: str
    bandwidth_bytes_per_s: int
    bf16_flops: int | None
    fp8_flops: int | None
    source: str
    aliases: tuple[str, ...] = ()
    note: str = ""

    def flops(self, weight_bits: int) -> int | None:
        """Dense operations per second when weights have `weight_bits` bits: the fp8 units serve 8 bits and fewer."""
        return self.fp8_flops if weight_bits <= 8 and self.fp8_flops else self.bf16_flops


@cache
def gpus() -> dict[str, Gpu]:
    """Every known accelerator by name."""
    data = json.loads(files("kvlab.plan").joinpath("hardware.json").read_text(encoding="utf-8"))
    return {row["name"]: Gpu(**{**row, "aliases": tuple(row["aliases"])}) for row in data["gpus"]}


def get_gpu(name: str) -> Gpu:
    """The accelerator called `name` (aliases such as "h100" and "a100" are understood).

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    key = str(name).strip().lower().replace("_", "-").replace(" ", "-")
    for gpu in gpus().values():
        if key == gpu.name or key in gpu.aliases:
            return gpu
    raise ValueError(f"gpu {name!r}: must be one of {', '.join(gpus())}")


def __getattr__(name: str) -> dict[str, Gpu]:
    if name == "GPUS":
        return gpus()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
