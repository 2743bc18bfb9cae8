"""How many pages each group's pool gets: from a number of pages, from a number of bytes, or from free memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from kvlab.schedule import Limits
from kvlab.specs.layout import Group
from kvlab.specs.pages import most_pages

CPU_SHARE = 0.25  # of the free memory, when nothing is said: a laptop has other things to do
GPU_SHARE = 0.85  # the rest is for activations


def blocks_for_bytes(groups: Sequence[Group], kv_bytes: int, limits: Limits) -> tuple[int, ...]:
    """Pages of each group's pool, null page included, within `kv_bytes`.

    The bytes are split as one sequence of the longest length needs them, and no pool gets more than
    `max_num_seqs` such sequences can fill.

    Raises:
        ValueError: not even two pages per group.
    """
    smallest = sum(2 * group.page_bytes for group in groups)
    if kv_bytes < smallest:
        raise ValueError(f"kv_bytes {kv_bytes}: two pages per group, one of them the null page, take {smallest} bytes")
    in_flight = min(limits.max_batched_tokens, limits.max_model_len)
    need = [most_pages(g.retention, g.block_size, limits.max_model_len, in_flight) for g in groups]
    left = kv_bytes - sum(group.page_bytes for group in groups)
    one = sum(n * group.page_bytes for n, group in zip(need, groups, strict=True))
    # the share of a small window may round down to nothing: it gets one page, taken from what the others leave
    shares = [max(1, min(n * limits.max_num_seqs, n * left // one)) for n in need]
    while sum(s * g.page_bytes for s, g in zip(shares, groups, strict=True)) > left:
        shares[shares.index(max(shares))] -= 1
    return tuple(1 + share for share in shares)


def free_memory(device: torch.device) -> int:
    """Bytes that `device` has free now: the driver's answer on a GPU; on the CPU what the kernel calls available,
    or what the container's limit leaves when that is less."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    candidates = [_available(), _container()]
    return min(c for c in candidates if c is not None)


def default_kv_bytes(device: torch.device) -> int:
    """Bytes for the pool when nothing is said: a share of the free memory."""
    share = GPU_SHARE if device.type == "cuda" else CPU_SHARE
    return int(free_memory(device) * share)


def _available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # macOS says only how much there is
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _container(cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        # files read once count as used, and are the first to go when memory is wanted
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None
