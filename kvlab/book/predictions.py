"""Predictions: what the reader expected, kept, and put beside what came out.

In a running notebook the guess is the number in the cell, kept on disk. On the published page it is typed into a box
that the browser remembers.
"""

from __future__ import annotations

import html
import json
import os
from pathlib import Path

from kvlab.book.session import _display

_asked: dict[str, dict] = {}
_CLOSE = ("%", "x")  # units that stand at their number without a space
_PLURALS = ("bits", "bytes", "cases", "drafts", "entries", "layers", "messages", "pages", "requests", "rows", "slots",
            "steps", "tokens", "works")  # fmt: skip

_BOX = """<div class="kv-predict"><p><strong>Predict.</strong> {question}</p>
<p><label>Your guess on this page <input type="text" inputmode="decimal" size="10" data-kv-predict="{key}"></label> {unit}
<span class="kv-note">(the cell's own guess: {guess})</span></p></div>
<script>(() => {{ for (const box of document.querySelectorAll('input[data-kv-predict="{key}"]')) {{
  try {{ box.value = localStorage.getItem('kv-predict-{key}') ?? ''; }} catch {{}}
  box.addEventListener('input', () => {{ try {{ localStorage.setItem('kv-predict-{key}', box.value); }} catch {{}}
    for (const out of document.querySelectorAll('[data-kv-guess="{key}"]'))
      out.textContent = box.value ? ' You wrote ' + box.value + ' {unit} on this page.' : ''; }}); }} }})();</script>"""

_RESULT = """<div class="kv-compare"><p><strong>Compare.</strong> {text}<span data-kv-guess="{key}"></span></p></div>
<script>(() => {{ let v; try {{ v = localStorage.getItem('kv-predict-{key}'); }} catch {{}}
  for (const out of document.querySelectorAll('[data-kv-guess="{key}"]'))
    if (v) out.textContent = ' You wrote ' + v + ' {unit} on this page.'; }})();</script>"""


def _store() -> Path:
    root = os.environ.get("KVLAB_CACHE") or Path.home() / ".cache" / "kvlab"
    return Path(root) / "predictions.json"


def _kept() -> dict:
    try:
        return json.loads(_store().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _keep(key: str, guess: float) -> None:
    if os.environ.get("KVLAB_BUILD"):
        return
    try:
        _store().parent.mkdir(parents=True, exist_ok=True)
        _store().write_text(json.dumps(_kept() | {key: guess}, indent=1), encoding="utf-8")
    except OSError:
        pass  # a read-only home loses the memory of a guess, nothing else


def predict(key: str, question: str, guess: float, unit: str = "") -> None:
    """Asks `question`, keeps `guess` under `key`; edit the number in the cell before the run.

    Raises:
        ValueError: guess is not a number.
    """
    if isinstance(guess, bool) or not isinstance(guess, int | float):
        raise ValueError(f"guess {guess!r}: must be a number")
    _asked[key] = {"guess": guess, "unit": unit}
    _keep(key, guess)
    shown = _with_unit(guess, unit, 6)
    fields = {"question": html.escape(question), "key": html.escape(key), "unit": html.escape(unit)}
    _display(
        {
            "text/html": _BOX.format(**fields, guess=html.escape(shown)),
            "text/plain": f"Predict: {question} guess: {shown}",
        }
    )


def compare(key: str, value: float, digits: int = 3) -> None:
    """Shows the prediction kept under `key` beside `value` and the factor between them.

    Raises:
        ValueError: nothing was predicted under this key.
    """
    if key not in _asked:
        raise ValueError(f"prediction {key!r}: none was made; run the cell with book.predict({key!r}, ...) first")
    guess, unit = _asked[key]["guess"], _asked[key]["unit"]
    said = f"Predicted {_with_unit(guess, unit, digits)}, found {_with_unit(value, unit, digits)}"
    if not unit and float(guess).is_integer() and float(value).is_integer():
        said += (
            ": right." if guess == value else "."
        )  # a place or a name: the fourth is not off by a factor from the fifth
    elif guess and value and (guess > 0) == (value > 0):
        factor = max(guess / value, value / guess)
        said += ": right." if factor < 1.05 else f": off by a factor of {factor:,.2g}."
    else:
        said += "."
    fields = {"key": html.escape(key), "unit": html.escape(unit)}
    _display({"text/html": _RESULT.format(text=html.escape(said), **fields), "text/plain": said})


def _with_unit(value: float, unit: str, digits: int) -> str:
    """The number as a sentence has it: "50%", "1 token" for the unit "tokens", a bare number without a unit."""
    shown = _short(value, digits)
    if shown == "1" and unit in _PLURALS:
        unit = unit.removesuffix("ies") + "y" if unit.endswith("ies") else unit[:-1]
    return f"{shown}{unit}" if unit in _CLOSE else f"{shown} {unit}".rstrip()


def _short(value: float, digits: int) -> str:
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"
