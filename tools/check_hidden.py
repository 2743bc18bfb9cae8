"""What in a chapter could fail without anybody seeing it: settings, tags, and code whose failure ends no cell.

The run of a chapter sees an error in a cell, in a widget's output and on stderr. A shell command that fails, a task that
nobody awaits and a future that nobody asks leave no trace, so chapters do without them; IPython's own lines are no Python
and escape every check of the text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

TAGS = ("skip-execution", "raises-exception", "nbmake-skip")
NEVER_SEEN = {
    "create_task": "a task that nobody awaits",
    "ensure_future": "a task that nobody awaits",
    "run_coroutine_threadsafe": "a future that nobody asks",
    "run_in_executor": "a future that nobody asks",
    "submit": "a future that nobody asks",
    "get_ipython": "IPython's own calls",
    "system": "a shell command whose exit code nobody asks",
    "popen": "a shell command whose exit code nobody asks",
    "Popen": "a process whose exit code nobody asks",
    "getoutput": "a shell command whose exit code nobody asks",
}


def settings(notebook: dict) -> Iterator[str]:
    """Settings and tags that let a failing cell pass, or hide one."""
    if notebook["metadata"].get("execution", {}).get("allow_errors") or "allow_errors" in notebook["metadata"]:
        yield "metadata: allow_errors"
    for index, cell in enumerate(notebook["cells"]):
        for tag in cell["metadata"].get("tags", ()):
            if tag in TAGS:
                yield f"cell {index}: tag {tag}"


def calls(tree: ast.Module) -> Iterator[str]:
    """Calls in a cell that can fail without a trace."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        owner = getattr(getattr(node.func, "value", None), "id", "")
        checked = any(k.arg == "check" and getattr(k.value, "value", None) is True for k in node.keywords)
        if name in NEVER_SEEN:
            yield f"{name}() is {NEVER_SEEN[name]}"
        elif owner == "subprocess" and name in ("run", "call") and not checked:
            yield f"subprocess.{name}() without check=True is a command whose exit code nobody asks"


def code(text: str) -> Iterator[str]:
    """What in the text of a code cell could fail unseen."""
    try:
        yield from calls(ast.parse(text))
    except SyntaxError as error:  # with IPython's lines a cell is no Python, wherever they stand
        line = text.splitlines()[(error.lineno or 1) - 1].strip()
        yield f"{line[:60]!r} is no Python: a failure in it is not seen"


def hidden_failures(notebook: dict) -> Iterator[str]:
    """All of it in one notebook, a line each."""
    yield from settings(notebook)
    for index, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            source = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
            yield from (f"cell {index}: {line}" for line in code(source))
