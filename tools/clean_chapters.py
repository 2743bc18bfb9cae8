"""Takes outputs, execution counts and widget state out of the chapters: `make clean-chapters`, before a commit."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def cleaned(notebook: dict) -> dict:
    """The notebook as it is kept in git."""
    for cell in notebook["cells"]:
        cell["metadata"].pop("execution", None)
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    notebook["metadata"] = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


if __name__ == "__main__":
    for path in sorted((ROOT / "chapters").rglob("*.ipynb")):
        before = path.read_text(encoding="utf-8")
        after = json.dumps(cleaned(json.loads(before)), indent=1, ensure_ascii=False) + "\n"
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"cleaned {path.name}")
