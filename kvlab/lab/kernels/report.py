"""Every configuration compiled and read: rows for `kvlab kernels`, its JSON and chapter 9."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from kvlab.lab.kernels.compiling import compile_launch, get_target
from kvlab.lab.kernels.configs import Config
from kvlab.lab.kernels.cost import GPUS
from kvlab.lab.kernels.reading import Reading, read
from kvlab.lab.kernels.rules import broken
from kvlab.ops.triton_support import Launch, building_for


def rows(configs: Iterable[Config], archs: Iterable[str], everything: bool) -> Iterator[dict[str, Any]]:
    """A row for each configuration and target: `everything`, or those that CI compiles."""
    for arch in archs:
        target = get_target(arch)
        for config in configs:
            if not everything and arch not in config.archs:
                continue
            with building_for(target):
                launches = config.build()
            start = time.monotonic()
            reading = read(compile_launch(launches[0], arch))
            yield row(config, arch, launches[0], reading) | {"compile_s": round(time.monotonic() - start, 2)}


def row(config: Config, arch: str, launch: Launch, reading: Reading) -> dict[str, Any]:
    """One row as JSON: what was compiled, what came out, what it costs."""
    cost = config.cost
    times = {gpu: dict(zip(("us", "bound"), cost.roofline(gpu), strict=True)) for gpu in GPUS}
    return {
        "config": config.name,
        "arch": arch,
        "kernel": launch.kernel.__name__,
        "num_warps": launch.num_warps,
        "registers": reading.registers,
        "spill_bytes": reading.spill_bytes,
        "shared_bytes": reading.shared_bytes,
        "code_load_bytes": reading.code_loads,
        "load_bytes": reading.loads,
        "async_copies": reading.async_copies,
        "tensor_ops": reading.tensor_ops,
        "dots": reading.dots,
        "scalar_dots": reading.scalar_dots,
        "occupancy": round(reading.occupancy, 4),
        "bytes": cost.bytes,
        "flops": cost.flops,
        "roofline": times,
        "broken": [f"{rule}: {what}" for rule, what in broken(arch, config.name, reading)],
    }


def table(found: list[dict[str, Any]]) -> str:
    """The rows as text."""
    head = f"{'configuration':38} {'arch':7} {'regs':>4} {'spill':>5} {'shared':>7} {'codes':>9} {'async':>5} {'matrix':>6} {'occ':>5} {'MB':>8} {'H200 us':>8}"  # noqa: E501
    lines = [head]
    for r in found:
        codes = "/".join(str(w) for w in sorted(r["code_load_bytes"], reverse=True)) or "-"
        lines.append(
            f"{r['config']:38} {r['arch']:7} {r['registers']:4} {r['spill_bytes']:5} {r['shared_bytes']:7} {codes:>9} "
            f"{r['async_copies']:5} {r['tensor_ops']:6} {r['occupancy']:5.0%} {r['bytes'] / 1e6:8.2f} "
            f"{r['roofline']['h200']['us']:8.1f}"
        )
        lines += [f"  breaks: {what}" for what in r["broken"]]
    return "\n".join(lines)
