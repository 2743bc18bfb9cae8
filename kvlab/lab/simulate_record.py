"""How long `kvlab simulate` takes: two thousand requests like those of a public trace, on hardware that is not here.

    python -m kvlab.lab.simulate_record        records book/results/simulate_2000.json

The trace is made up: arrivals, lengths and shared prefixes about as in Mooncake's conversations (three a second, about
14k tokens in and 400 out on average, a third of the blocks seen before), from one seed. The time is that of the whole process.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvlab.lab.record import provenance

RESULT = Path(__file__).resolve().parents[2] / "book" / "results" / "simulate_2000.json"
RECIPE = "random:n=2000,rate=3,prompt=6000,output=256,spread=1,longest=100000,prefixes=30,prefix=4096,burstiness=0.5"
HARDWARE = ("--model", "llama-3.1-70b", "--gpu", "h200", "--tp", "4")
KEPT = ("requests", "finished", "prompt_tokens", "output_tokens", "seconds", "steps", "prefix_hit_rate", "preemptions")


def timed(recipe: str) -> tuple[float, dict[str, Any]]:
    """(seconds of the process, what it printed) of one simulation."""
    command = [sys.executable, "-m", "kvlab", "simulate", recipe, *HARDWARE, "--json"]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return time.perf_counter() - began, json.loads(done.stdout)


def record(recipe: str = RECIPE, repeats: int = 3) -> dict[str, Any]:
    """The result: the median of the processes' seconds, each of them, and what the simulation came to."""
    runs = [timed(recipe) for _ in range(repeats)]
    found = runs[0][1]
    return {
        "what": "seconds that kvlab simulate takes for a trace, the whole process, median",
        **provenance("python -m kvlab.lab.simulate_record", packages=()),
        "simulated_with": f"kvlab simulate {recipe} {' '.join(HARDWARE)} --json",
        "process_seconds": round(statistics.median(seconds for seconds, _ in runs), 2),
        "runs": [{"process_seconds": round(s, 2), "wall_seconds": result["wall_seconds"]} for s, result in runs],
        "result": {name: found[name] for name in KEPT},
    }


def main() -> None:
    """Records and prints."""
    found = record()
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
