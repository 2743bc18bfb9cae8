"""Every kernel checked and measured on one GPU: `make bench-gpu`, or `python -m kvlab.lab.bench_gpu`.

Needs torch, triton and numpy, no downloads: weights and keys are random, shapes are those of named models. Stages run in
order, each within its own seconds (STAGES; under eight minutes in all), and the result is written after each, so that a
run that was cut off goes on where it stopped; `--stage` runs one again. Each stage keeps the commit, device, driver and
versions of the run that measured it, and kernels are checked again where commit or device are others. Rows that a stage
had no time for are named. On a machine without a GPU only `check` runs, in Triton's interpreter (TRITON_INTERPRET=1):
no figure is invented.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvlab.lab.bench_gpu_check import check
from kvlab.lab.bench_gpu_rows import Row, against_rows, config_rows, copy_rows, decode_rows

RESULT = Path("book/results/bench_gpu.json")


@dataclass(frozen=True)
class Stage:
    """A part of the run.

    Attributes:
        rows: what it measures on a device, by name.
        budget_s: seconds after which no further row is begun.
    """

    rows: Callable[[torch.device], dict[str, Row]]
    budget_s: float


def _engine_rows(device: torch.device) -> dict[str, Row]:
    from kvlab.lab.bench_gpu_engine import engine_rows

    return engine_rows(device)


def _model_rows(device: torch.device) -> dict[str, Row]:
    from kvlab.lab.bench_gpu_models import model_rows

    return model_rows(device)


STAGES = {
    "copy": Stage(copy_rows, 5),
    "decode": Stage(decode_rows, 45),
    "engine": Stage(_engine_rows, 90),
    "against": Stage(against_rows, 60),
    "prefill": Stage(partial(config_rows, "prefill"), 40),
    "kernels": Stage(partial(config_rows, "kernels"), 40),
    "shapes": Stage(partial(config_rows, "shapes"), 30),
    "models": Stage(_model_rows, 30),
}  # with `check`, which has no budget: a kernel that was not checked must not be timed
NAMES = ("check", *STAGES)
OF_A_STAGE = ("date", "commit", "device", "cuda", "driver", "versions")
"""What each stage keeps of the run that measured it."""


def measure(stage: Stage, device: torch.device, clock: Callable[[], float] = time.monotonic) -> dict[str, Any]:
    """The stage's rows; one that fails says why, and those that there was no time for are listed under "left out"."""
    start, found, late = clock(), {}, []
    for name, run in stage.rows(device).items():
        if clock() - start > stage.budget_s:
            late.append(name)
            continue
        try:
            found[name] = run()
        except Exception as error:  # what is not installed, does not compile or does not fit must not end the run
            found[name] = {"not measured": f"{type(error).__name__}: {error}"[:200]}
        # a failed capture leaves its traceback's tensors behind
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found | ({"left out": late} if late else {})


def provenance(device: torch.device) -> dict[str, Any]:
    """Where the figures come from: `kvlab.lab.record` with the driver."""
    from kvlab.lab import record

    found = record.provenance(
        "python -m kvlab.lab.bench_gpu", ("torch", "triton", "numpy", "flashinfer-python", "vllm")
    )
    found["what"] = "every kernel checked against its reference on the device, then measured"
    found["cuda"] = torch.version.cuda or torch.version.hip or "none: Triton's interpreter on the CPU"
    if device.type == "cuda":
        found["memory_bytes"] = torch.cuda.get_device_properties(device).total_memory
        found["driver"] = driver()
    return found


def driver() -> str:
    """The driver's version as NVIDIA's tool tells it; "unknown" without the tool."""
    import subprocess

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def missing(result: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The stages that `result` lacks, given what `now` would be its provenance.

    A stage that another device measured is to be run again; a check also where it was made of another commit, or of a
    tree that no commit names, and where it found a wrong kernel: before anything else.
    """
    stages, measured = result.get("stages", {}), result.get("measured", {})
    found = [name for name in NAMES if name not in stages or measured.get(name, {}).get("device") != now["device"]]
    named = "+" not in now["commit"] and now["commit"] != "unknown"
    checked = named and measured.get("check", {}).get("commit") == now["commit"] and not stages["check"].get("wrong")
    return found if "check" in found or checked else ["check", *found]


def compared(result: dict[str, Any]) -> None:
    """Writes to every row with a bandwidth its share of the device copy's, `of_copy`, where that device's is known."""
    stages, measured = result["stages"], result["measured"]
    copied = stages.get("copy", {}).get("copy", {}).get("gb_per_s")
    for name in stages:
        if not copied or name == "copy" or measured[name]["device"] != measured["copy"]["device"]:
            continue
        for row in stages[name].values():
            if isinstance(row, dict) and "gb_per_s" in row:
                row["of_copy"] = round(row["gb_per_s"] / copied, 4)


def started(path: Path, now: dict[str, Any]) -> dict[str, Any]:
    """The result to go on with: the file's stages, each with the provenance it was measured under, and `now` on top.

    Stages of a file that does not say where each is from are dropped: nobody knows what they belong to.
    """
    old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    measured = old.get("measured", {})
    kept = {key: {n: x for n, x in old.get(key, {}).items() if n in measured} for key in ("stages", "seconds")}
    return now | kept | {"measured": measured}


def main(arguments: list[str] | None = None) -> int:
    """Runs what is missing in the result; 1 where a kernel is wrong on the device, 2 for a stage that cannot run here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", choices=NAMES, help="only this stage, again (behind a check, if that is not of now)")
    parser.add_argument("--out", type=Path, default=RESULT, help=f"the JSON file (default: {RESULT})")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    now = provenance(device)
    result = started(options.out, now)
    names = missing(result, now)
    if options.stage:
        first = ["check"] if "check" in names and options.stage != "check" and device.type == "cuda" else []
        names = [*first, options.stage]
    for name in names:
        if device.type == "cpu" and name != "check":
            print(
                f"bench-gpu: stage {name}: needs a GPU; this machine has none, and nothing is recorded", file=sys.stderr
            )
            return 2
        print(f"stage {name}", flush=True)
        wrong = run_stage(name, device, result, now)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if wrong:
            print("bench-gpu: wrong on this device: " + ", ".join(wrong), file=sys.stderr)
            return 1
    return 0


def run_stage(name: str, device: torch.device, result: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Puts the stage into `result` with its provenance and seconds; the kernels that a check found wrong."""
    start = time.monotonic()
    found = check(device) if name == "check" else measure(STAGES[name], device)
    result["stages"][name] = found
    result["seconds"][name] = round(time.monotonic() - start, 1)
    result["measured"][name] = {key: now[key] for key in OF_A_STAGE if key in now}
    compared(result)
    return found["wrong"] if name == "check" else []


if __name__ == "__main__":
    sys.exit(main())
