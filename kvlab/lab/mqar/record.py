"""The recorded experiment: every kind, three seeds, accuracy per load beside the bytes that a sequence keeps.

The record is written after each trained model and a later call goes on from it, so a stop loses one model at most.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from kvlab.lab.mqar.data import NUM_KEYS, NUM_VALUES, tokens_of
from kvlab.lab.mqar.models import KERNEL, KINDS, LAYERS, WIDTH, Kind, RecallModel
from kvlab.lab.mqar.train import Settings, score, train
from kvlab.lab.record import commit, provenance

SEEDS = (0, 1, 2)
KEPT_SEED = 0  # its weights are kept, so that a chapter can score them again
SCORED_SEQUENCES = 256
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}  # Student's t, 97.5 %, by degrees of freedom


def mean_and_band(values: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """(mean, 95 % confidence interval of the mean, cut to 0 .. 1) of accuracies of up to five seeds; no band for one.

    Raises:
        ValueError: no values, or more than five.
    """
    if not 1 <= len(values) <= 1 + max(T95):
        raise ValueError(f"values {list(values)}: must be those of one to {1 + max(T95)} seeds")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return mean, None
    half = T95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return mean, (max(0.0, mean - half), min(1.0, mean + half))


def run_one(kind: Kind, seed: int, settings: Settings, models: Path) -> dict[str, Any]:
    """Trains and scores one model; keeps its weights, as fp16, in folder `models` when it is the seed to keep."""
    code = commit()  # of the code that is about to run
    begun = time.process_time()
    losses: list[float] = []

    def progress(step: int, loss: float) -> None:
        losses.append(loss)
        if step % 100 == 0:
            print(f"  step {step}: loss {loss:.3f}, {time.process_time() - begun:.0f} s of CPU", flush=True)

    model = train(kind, seed, settings, progress)
    trained = time.process_time() - begun
    accuracy = {str(n): score(model, n, seed=seed, sequences=SCORED_SEQUENCES) for n in settings.loads}
    if seed == KEPT_SEED:
        models.mkdir(parents=True, exist_ok=True)
        save_file({k: v.half() for k, v in model.state_dict().items()}, models / f"{kind.name}.safetensors")
    return {
        "model": kind.name,
        "seed": seed,
        "commit": code,
        "steps": len(losses),
        "cpu_seconds": round(trained, 1),
        "last_loss": round(statistics.fmean(losses[-len(settings.loads) :]), 4),
        "accuracy": accuracy,
    }


def summarize(kind: Kind, runs: Sequence[dict[str, Any]], settings: Settings) -> dict[str, Any]:
    """What is recorded of a kind: its bytes from its spec, its accuracies per seed with mean and band."""
    model = RecallModel(kind)
    spec = model.spec()
    loads = {}
    for pairs in settings.loads:
        values = [run["accuracy"][str(pairs)] for run in runs]
        mean, band = mean_and_band(values)
        loads[str(pairs)] = {
            "kv_bytes": spec.bytes_at(tokens_of(pairs)),
            "accuracy": values,
            "mean": mean,
            "band95": band and list(band),
        }
    return {
        "label": kind.label,
        "pattern": kind.pattern,
        "seeds": [run["seed"] for run in runs],
        "steps": [run["steps"] for run in runs],
        "parameters": sum(p.numel() for p in model.parameters()),
        "state_bytes": spec.state_bytes,
        "bytes_per_token": spec.bytes_per_token,
        "bytes_per_token_short": spec.bytes_per_token_short,
        "loads": loads,
    }


def record(out: Path, settings: Settings, only: Sequence[str] = (), seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    """The record at `out`, with the runs that it lacks of the kinds in `only` (default: all) added.

    Raises:
        ValueError: an unknown kind, or the record was made under other settings.
    """
    if unknown := set(only) - KINDS.keys():
        raise ValueError(f"kind {min(unknown)!r}: must be one of {', '.join(KINDS)}")
    found = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else None
    stated = json.loads(json.dumps(asdict(settings)))
    if found and found["settings"] != stated:
        raise ValueError(f"out {out}: was recorded under {found['settings']}, not {stated}; give another file")
    runs = found["runs"] if found else []
    origin = provenance(f"python -m kvlab.lab.mqar --out {out}", ("torch", "numpy"))
    for seed in seeds:
        for kind in (KINDS[name] for name in KINDS if not only or name in only):
            if any(run["model"] == kind.name and run["seed"] == seed for run in runs):
                continue
            print(f"{kind.label}, seed {seed}", flush=True)
            runs.append(run_one(kind, seed, settings, models_dir(out)))
            print(f"  {runs[-1]['accuracy']}", flush=True)
            found = compose(origin, stated, settings, runs)
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found or compose(origin, stated, settings, runs)


def models_dir(out: Path) -> Path:
    """The folder beside the record that holds the kept weights."""
    return out.with_name(f"{out.stem}_models")


def compose(origin: dict, stated: dict, settings: Settings, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of `runs`, in the order of KINDS and seeds."""
    runs = sorted(runs, key=lambda run: (run["seed"], list(KINDS).index(run["model"])))
    of = {name: [run for run in runs if run["model"] == name] for name in KINDS}
    return {
        "what": "Associative recall (MQAR) by tiny trained models: accuracy against the bytes a sequence keeps",
        **origin,
        "conditions": (
            f"{LAYERS} layers of width {WIDTH} behind a convolution of {KERNEL} tokens, no feed-forward part, "
            f"{NUM_KEYS} keys and {NUM_VALUES} values; at most {settings.steps:,} steps of "
            f"{settings.tokens_per_step} tokens, fewer once {settings.solved:.1%} of the training queries at the largest "
            f"load are right; one learning rate, {settings.learning_rate:g}, not tuned per model; one thread; scored on "
            f"{SCORED_SEQUENCES} fresh sequences per load; mean and 95 % band (Student's t) over a model's seeds."
        ),
        "settings": stated,
        "seeds": sorted({run["seed"] for run in runs}),
        "cpu_seconds": round(sum(run["cpu_seconds"] for run in runs), 1),
        "models": {name: summarize(KINDS[name], found, settings) for name, found in of.items() if found},
        "runs": runs,
    }
