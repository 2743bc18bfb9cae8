"""How many units each pool gets: from a number of pages, from a number of bytes, or from free memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvlab.plan.reserve import in_flight_reserve
from kvlab.schedule import Limits
from kvlab.specs.pools import PoolLayout
from kvlab.specs.rollback import NOTHING_KEPT, RollbackPolicy
from kvlab.specs.units import human_bytes

if TYPE_CHECKING:
    from kvlab.engine.engine import Engine
    from kvlab.engine.options import EngineOptions

log = logging.getLogger("kvlab.engine")

CPU_SHARE = 0.25  # of the free memory, when nothing is said: a laptop has other things to do
GPU_SHARE = 0.85  # the rest is for activations


@dataclass(frozen=True)
class Sequences:
    """The sequences that pools are sized for.

    Attributes:
        limits: of steps and sequences.
        rollback: what is kept for stepping back.
        split_tokens: pools of their own share the bytes as one sequence of this length needs them; None is the
            longest. Shorter sequences fill less of a pool that keeps everything, and as much of a window's.
    """

    limits: Limits
    rollback: RollbackPolicy = NOTHING_KEPT
    split_tokens: int | None = None

    def pages(self, layout: PoolLayout, tokens: int) -> list[int]:
        """The most pages of each group that one sequence of `tokens` tokens holds."""
        in_flight = min(self.limits.max_batched_tokens, self.limits.max_model_len)
        return layout.sequence_pages(tokens, in_flight, self.rollback)


def pool_sizes(layout: PoolLayout, options: EngineOptions, limits: Limits, device: torch.device) -> tuple[int, ...]:
    """Units of each pool, as the options say: a number of pages, a number of bytes, or a share of the free memory.

    Raises:
        ValueError: both numbers, pages not one number for each pool, too few bytes, or more than the machine has.
    """
    blocks = _asked_for(layout, options, limits, device)
    taken, there = layout.pool_bytes(blocks), total_memory(device)
    if taken > there:
        asked = f"kv_bytes {options.kv_bytes}" if options.num_blocks is None else f"num_blocks {options.num_blocks}"
        raise ValueError(f"{asked}: takes {human_bytes(taken)}, and {device} has {human_bytes(there)}")
    return blocks


def _asked_for(layout: PoolLayout, options: EngineOptions, limits: Limits, device: torch.device) -> tuple[int, ...]:
    for reserve in in_flight_reserve(layout.groups, limits.max_model_len, limits.max_batched_tokens):
        if reserve.warning:
            log.info("%s", reserve.warning)
    if options.num_blocks is not None:
        if options.kv_bytes is not None:
            raise ValueError("kv_bytes and num_blocks: give one of them")
        blocks = options.num_blocks
        pools = len(layout.buffers)
        blocks = (blocks,) * pools if isinstance(blocks, int) else tuple(blocks)
        if len(blocks) != pools:
            raise ValueError(f"num_blocks {blocks}: must be one number for each of {pools} pools")
        return blocks
    kv_bytes = default_kv_bytes(device) if options.kv_bytes is None else options.kv_bytes
    return blocks_for_bytes(layout, kv_bytes, Sequences(limits, options.rollback, options.split_tokens))


def describe(engine: Engine) -> str:
    """One line for people: the pool, its pages and the limits."""
    sizes, names = engine.num_blocks, [g.name for g in engine.groups]
    if engine.options.pools == "per_kind":
        pages = ", ".join(f"{n - 1:,} pages of {name}" for n, name in zip(sizes, names, strict=True))
        pages += f", {engine.options.block_size} tokens each"
    else:
        unit = "sectors" if engine.options.pools == "sectors" else "pages"
        sizes_of = {g.name: "" if g.retention.rule == "state" else f" ({g.block_size} tokens)" for g in engine.groups}
        kinds = ", ".join(name + size for name, size in sizes_of.items())
        pages = f"{sizes[0] - 1:,} {unit} for {kinds}"
    limits = engine.limits
    return (
        f"KV pool {human_bytes(engine.kv.allocated_bytes)} on {engine.model.decoder.device}: {pages}; "
        f"at most {limits.max_num_seqs} sequences of {longest_sequence(engine):,} tokens, "
        f"{limits.max_batched_tokens:,} tokens a step"
    )


def longest_sequence(engine: Engine) -> int:
    """Tokens of the longest request that the engine takes: the model's limit, or what an empty pool holds."""
    low, high = 1, engine.limits.max_model_len
    if not engine.cache.too_long(high - 1):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if engine.cache.too_long(middle - 1) else (middle, high)
    return low


def blocks_for_bytes(layout: PoolLayout, kv_bytes: int, sequences: Sequences) -> tuple[int, ...]:
    """Units of each pool, null unit included, within `kv_bytes`.

    No pool gets more than `max_num_seqs` sequences of the longest length can fill.

    Raises:
        ValueError: not even two units per pool.
    """
    sizes = layout.unit_bytes
    if kv_bytes < 2 * sum(sizes):
        raise ValueError(
            f"kv_bytes {kv_bytes}: two pages per group, one of them the null page, take {2 * sum(sizes)} bytes"
        )
    limits = sequences.limits
    longest = [n * limits.max_num_seqs for n in sequences.pages(layout, limits.max_model_len)]
    most = layout.units(longest)
    need = layout.units(sequences.pages(layout, sequences.split_tokens or limits.max_model_len))
    shares = _shares(kv_bytes - sum(sizes), need, most, sizes)
    return tuple(1 + share for share in shares)


def _shares(left: int, need: Sequence[int], most: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Units of each pool, in proportion to `need` and at most `most`, that take at most `left` bytes; at least one."""
    shares: dict[int, int] = {}
    while len(shares) < len(need):
        rest = [p for p in range(len(need)) if p not in shares]
        room = left - sum(n * sizes[p] for p, n in shares.items())
        one = sum(need[p] * sizes[p] for p in rest)
        found = {p: max(1, need[p] * room // one) for p in rest}
        full = {p: most[p] for p in rest if found[p] >= most[p]}
        # what a full pool leaves goes to the others
        shares |= full or found
    # the share of a small window may round down to nothing: it gets one page, taken from what the others leave
    while sum(n * sizes[p] for p, n in shares.items()) > left:
        shares[max(shares, key=lambda p: shares[p])] -= 1
    return [shares[p] for p in range(len(need))]


def free_memory(device: torch.device) -> int:
    """Bytes that `device` has free now: the driver's answer on a GPU; on the CPU what the kernel calls available,
    or what the container's limit leaves when that is less."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    candidates = [_available(), _container()]
    return min(c for c in candidates if c is not None)


def total_memory(device: torch.device) -> int:
    """Bytes of memory that `device` has, used or not."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
