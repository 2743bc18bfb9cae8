"""Rewrites the list of modules in ARCHITECTURE.md from the first line of each module's docstring."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- modules: written by tools/architecture.py -->", "<!-- end of modules -->"
ROOMS = {  # from the ground up, each with what it is for
    "specs": "what each part of a layer caches, storage formats' bytes, layout of pages",
    "plan": "bytes to capacity to time, for any model on any GPUs",
    "cache": "who holds which page",
    "schedule": "who computes which tokens in which step; takes the time as an argument",
    "simulate": "a trace of requests through scheduler and cache with a clock instead of a model",
    "quant": "one file per storage format: encode, decode",
    "ops": "a folder per operation: `reference` is the plain truth, `cpu` the Numba kernel, `torch_` a form without host reads",
    "models": "one config-driven decoder, its weights, its tokenizer",
    "engine": "runner, sampler, storage, the step loop",
    "speculate": "who drafts, and the one verifier that keeps the distribution",
    "serve": "an OpenAI-compatible server over the engine, and its numbers",
    "lab": "experiments: parity, benchmarks, quality, measuring a shape",
    "widgets": "one front end per widget, two places where its Python runs",
    "book": "what chapters share: predictions, tables, figures, recorded results, the claims ledger",
    "cli": "one entry point, one module per command",
}
PURE_UNTIL = "simulate"


def first_line(path: Path) -> str:
    """The first sentence of a module's docstring."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"\n\n|\n(?=[A-Z])", doc)[0].replace("\n", " ").strip()


def listing() -> str:
    """One heading per room, one line per module."""
    parts = []
    for room, about in ROOMS.items():
        parts.append(f"### `kvlab/{room}`: {about}\n")
        for path in sorted((ROOT / "kvlab" / room).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            parts.append(f"- [`{name.removeprefix('kvlab/')}`]({name}) {first_line(path)}")
        parts.append("")
        if room == PURE_UNTIL:
            parts.append("*Above this line: standard library only, runs unchanged in the reader's browser.*\n")
    return "\n".join(parts)


def main() -> None:
    """Rewrites the page in place."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{listing()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
