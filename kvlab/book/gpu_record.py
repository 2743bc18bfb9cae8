"""What a recorded run of `make bench-gpu` says, for chapter 9 and the explorer; without one they say that there is none."""

from __future__ import annotations

from typing import Any

from kvlab.book.results import load_result, provenance

RESULT = "bench_gpu"
NOT_MEASURED = "Not measured on a GPU yet: times here are bounds, counted from bytes and operations."
HEADER = ["stage", "what", "us", "GB/s", "of a device copy", "aim (H200)"]


def gpu_record(*stages: str) -> dict[str, Any] | None:
    """The record, or None: none is there, or none that measured one of `stages` (default: decode or models)."""
    try:
        found = load_result(RESULT)
    except FileNotFoundError:
        return None
    return found if any(_rows(found, stage) for stage in stages or ("decode", "models")) else None


def origin(record: dict[str, Any], stage: str) -> str:
    """One line: where and when a stage was measured, which may be another run than the latest."""
    return provenance(record | record["measured"][stage])


def decode_table(record: dict[str, Any]) -> list[list[str]]:
    """Rows under HEADER: decode by format and batch, and the same attention by others where one run measured both."""
    found, measured = [], record["measured"]
    together = all(
        measured.get("against", {}).get(k) == measured["decode"].get(k) for k in ("device", "commit", "date")
    )
    for stage in ("decode", "against") if together else ("decode",):
        for name, row in _rows(record, stage).items():
            aim = f"{row['target_of_copy']:.0%}" if "target_of_copy" in row else "-"
            share = f"{row['of_copy']:.0%}" if "of_copy" in row else "-"
            found.append([stage, name, f"{row['us']:.1f}", f"{row['gb_per_s']:,.0f}", share, aim])
    return found


def not_measured(record: dict[str, Any]) -> list[str]:
    """What the recorded stages left out or could not run, each with its reason."""
    found = []
    for stage, rows in record["stages"].items():
        found += [f"{stage}: {name}: no time was left" for name in rows.get("left out", [])]
        found += [
            f"{stage}: {n}: {r['not measured']}" for n, r in rows.items() if isinstance(r, dict) and "not measured" in r
        ]
    return found


def explorer_words() -> dict[str, Any]:
    """What the explorer says of measurements: "text" for every model, and "models" of those measured, by name."""
    record = gpu_record()
    if record is None:
        return {"text": NOT_MEASURED, "models": {}}
    stage = "models" if _rows(record, "models") else "decode"
    device, models = record["measured"][stage]["device"], {}
    for name, row in _rows(record, "models").items():
        if "ms" in row:
            models[name.rpartition(" x ")[0]] = (
                f"Measured on {device}: reading this model's cache takes {row['ms']:.2f} ms a step of {row['batch']} "
                f"sequences of {row['context']:,} tokens in bf16, at {row['gb_per_s']:,.0f} GB/s."
            )
    others = ", ".join(models)
    text = f"Measured on {device}: {others}. For these settings times are bounds." if others else (
        f"Measured on {device}: decode kernels alone (chapter 9). For these settings times are bounds."
    )  # fmt: skip
    return {"text": text, "models": models}


def _rows(record: dict[str, Any], stage: str) -> dict[str, dict[str, Any]]:
    """The rows of a stage that have a figure."""
    rows = record["stages"].get(stage, {})
    return {name: row for name, row in rows.items() if isinstance(row, dict) and "gb_per_s" in row}
