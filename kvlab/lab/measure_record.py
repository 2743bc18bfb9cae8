"""Records that Measure returns in time and within its memory: seconds, cut and peak memory of several shapes.

    python -m kvlab.lab.measure_record [--out book/results/measure.json]

Each shape is measured in a process of its own, as after a fresh start of a notebook's kernel: importing torch and loading
compiled kernels count. Kernels compiled for the first time on a machine do not: a first round sees to that.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"model": "llama-3.1-70b", "context": 2**17, "batch": 8},
    {"model": "gemma-3-27b", "context": 2**15, "kv_dtype": "fp8_e4m3"},
    {"model": "deepseek-v3", "context": 2**15, "batch": 4},
    {"model": "own", "attention": "recurrent", "context": 2**15},
    {"model": "own", "attention": "gqa", "layers": 16, "kv_dtype": "int4", "context": 2**14},
)
LIMIT_S = 20
WHAT = "Measure, as the explorer calls it: seconds until it returns, what was cut, the most memory it held"


def one(params: dict[str, Any]) -> dict[str, Any]:
    """Measures one shape here; its time starts before torch is imported."""
    start = time.perf_counter()
    from kvlab.lab.measure import measure

    found = measure(params)
    seconds = time.perf_counter() - start
    return {"params": params, "seconds": round(seconds, 2), **memory(), **found}


def memory() -> dict[str, int]:
    """The most memory that this process held, and half of what is free now, which Measure keeps within."""
    import resource

    import torch

    from kvlab.engine.sizing import free_memory

    unit = 1 if sys.platform == "darwin" else 1024  # what ru_maxrss counts in
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"peak_bytes": held, "half_of_free_bytes": free_memory(torch.device("cpu")) // 2}


def in_its_own_process(params: dict[str, Any]) -> dict[str, Any]:
    """`one(params)` in a fresh interpreter."""
    command = [sys.executable, "-m", "kvlab.lab.measure_record", "--one", json.dumps(params)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{params}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def line(found: dict[str, Any]) -> str:
    """One shape for people."""
    late = "" if found["seconds"] <= LIMIT_S else f"  over {LIMIT_S} s"
    shape = ", ".join(f"{k} {v}" for k, v in found["params"].items()) or "the explorer's defaults"
    held = f"{found['peak_bytes'] / 2**30:.2f} GiB of {found['half_of_free_bytes'] / 2**30:.2f}"
    return f"{found['seconds']:6.1f} s  {held}  {shape}{late}\n          {found['conditions'][0]}\n          {found['sentence']}"


def main(arguments: list[str] | None = None) -> int:
    """Command line: 1 when a shape took longer than LIMIT_S."""
    parser = argparse.ArgumentParser(prog="python -m kvlab.lab.measure_record", description=WHAT)
    parser.add_argument("--out", type=Path, help="write the record there")
    parser.add_argument("--one", metavar="JSON", help="measure this shape and print what was found")
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(one(json.loads(options.one))))
        return 0
    found = []
    for params in SHAPES:
        in_its_own_process(params)  # compiles what this machine has not compiled yet
        found.append(in_its_own_process(params))
        print(line(found[-1]), flush=True)
    slow = sum(f["seconds"] > LIMIT_S for f in found)
    print(f"{len(found)} shapes, {slow} of them over {LIMIT_S} s")
    if options.out:
        from kvlab.lab.record import provenance

        command = f"python -m kvlab.lab.measure_record --out {options.out}"
        options.out.write_text(json.dumps({"what": WHAT, **provenance(command), "shapes": found}, indent=1) + "\n")
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())
