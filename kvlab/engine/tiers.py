"""The tiers below an engine's pool: options, and how they are put together."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvlab.cache.tiers import HostSlots, Tiers
from kvlab.engine.sizing import total_memory
from kvlab.engine.tiers_compress import compressing_tiers
from kvlab.engine.tiers_disk import DiskStore
from kvlab.engine.tiers_disk_worker import DiskWorker, settled
from kvlab.engine.tiers_memory import HostMemory
from kvlab.plan.timing import attention_operations
from kvlab.schedule.policy import SwapCosts
from kvlab.specs.units import human_bytes, parse_bytes

if TYPE_CHECKING:
    from kvlab.engine.engine import Engine


@dataclass(frozen=True)
class TierOptions:
    """Memory below the pool.

    Attributes:
        host_bytes: of host memory (a text such as "2GiB" will do), pinned on CUDA, for preempted requests and saved prefixes.
        disk_dir: a directory for saved prefixes, which survive there; None: no disk tier. Where every layer keeps
            everything a later request finds as many pages as it shares; with windows, chunks or states it finds the
            longest length that was saved: ends of requests, and where the prefix cache's options keep states (the last
            page end of prompts, junctions, every `checkpoint_tokens`), whether or not there is a prefix cache. Written,
            flushed and read in a thread of its own; `Engine.close` waits for it.
        disk_bytes: of all its page files, those of other models included, which are the first to go.
        save_prefixes: whether requests leave their pages for later ones. With windows, chunks or states that takes a step
            more for each prompt longer than a page: it is computed up to its checkpoint, then to its end.
        park_dtype: preempted requests wait in this storage format, in a pool of host_bytes on the model's own device
            instead of in host memory: keys and values, latents, entries and index keys row by row, states as they are.
            A rule as of `kv_dtype`, of formats of rows. Lossy: their tokens may change. Nothing is saved then.

    Raises:
        ValueError: a size that is not positive, a path that is no directory, a size without a directory.
    """

    host_bytes: int | str
    disk_dir: str | Path | None = None
    disk_bytes: int | str | None = None
    save_prefixes: bool = True
    park_dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("host_bytes", "disk_bytes"):
            value = getattr(self, name)
            if isinstance(value, str):
                value = parse_bytes(value, name)
                object.__setattr__(self, name, value)
            if value is not None and value < 1:
                raise ValueError(f"{name} {value}: must be positive")
        if (self.disk_dir is None) != (self.disk_bytes is None):
            raise ValueError("disk_dir and disk_bytes: give both, or none")
        if self.park_dtype is not None and self.disk_dir is not None:
            raise ValueError(f"park_dtype {self.park_dtype!r}: lossy pages are not saved, so no disk_dir can be given")
        if self.disk_dir is not None:
            path = Path(self.disk_dir)
            if path.exists() and not path.is_dir():
                raise ValueError(f"disk_dir {path}: is not a directory")


def build_tiers(engine: Engine, options: TierOptions | None) -> Tiers | None:
    """The tiers of an engine whose cache and storage are there; None without options."""
    if options is None:
        return None
    device = engine.model.device if options.park_dtype is not None else torch.device("cpu")
    if options.host_bytes > (there := total_memory(device)):
        raise ValueError(f"host_bytes {options.host_bytes}: {device} has {human_bytes(there)} of memory")
    if options.park_dtype is not None:
        return compressing_tiers(engine, options.park_dtype, options.host_bytes)
    slots = HostSlots(engine.layout, options.host_bytes)
    memory = HostMemory(engine.storage, slots)
    mark, disk = b"", None
    if options.disk_dir is not None:
        mark = fingerprint(engine)
        # what another engine of this process wrote there is found
        settled(options.disk_dir)
        disk = DiskWorker(DiskStore(options.disk_dir, mark, options.disk_bytes or 0))
    return Tiers(engine.cache, slots, memory, disk, mark, options.save_prefixes)


def fingerprint(engine: Engine) -> bytes:
    """sha256 over all that the bytes of a page depend on beside the tokens: config, every weight, tokenizer, types,
    layout. Takes about a second per gigabyte of weights; only a disk tier asks for it."""
    digest = hashlib.sha256(b"kvlab fingerprint 2")
    decoder, tokenizer = engine.model.decoder, engine.model.tokenizer
    groups = [
        (g.name, g.block_size, repr(g.retention), g.members, repr(g.layouts), engine.layout.page_bytes(i))
        for i, g in enumerate(engine.groups)
    ]
    # longrope picks its factors by the longest length; steps back decide what windows still hold
    facts = [
        repr(engine.model.config), engine.kv_dtype, str(decoder.dtype), engine.layout.policy, groups,
        engine.limits.max_model_len, repr(engine.options.rollback),
    ]  # fmt: skip
    digest.update(json.dumps(facts).encode())
    for layer, scales in sorted((engine.options.kv_scales or {}).items()):
        for tensor in (scales.k, scales.v):
            digest.update(f"scales {layer}".encode() + tensor.double().cpu().contiguous().numpy().tobytes())
    for name, tensor in sorted(decoder.weights.named.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    if tokenizer is not None:
        digest.update(tokenizer.fingerprint())
    return digest.digest()


def swap_costs(model, link_bytes_per_s: float, flops: float, latency_s: float = 0.0) -> SwapCosts:
    """What moving and recomputing sequences of this loaded model costs at these rates: two operations for each weight
    and token, and attention's own."""
    weights = sum(t.numel() for name, t in model.decoder.weights.named.items() if "embed_tokens" not in name)

    def operations(tokens: int) -> float:
        return 2 * weights * tokens + attention_operations(model.spec, tokens, prompt=True)

    return SwapCosts(link_bytes_per_s, flops, operations, latency_s)
