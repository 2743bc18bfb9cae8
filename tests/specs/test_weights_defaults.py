"""kvlab/specs/weights/class_defaults.py holds what transformers' config classes assume, for the fields the count reads.

`python tests/specs/test_weights_defaults.py` writes the file anew.
"""

import ast
import dataclasses
from pathlib import Path

import pytest

import kvlab.specs.weights
from kvlab.specs.weights.class_defaults import DEFAULTS
from kvlab.specs.weights.families import FAMILIES, PUBLISHED

FOLDER = Path(kvlab.specs.weights.__file__).parent
HEAD = '''"""What transformers' config classes assume where a published file is silent. Missing means False or None.

Generated from transformers 5.24 by tests/specs/test_weights_defaults.py; families it lacks are not here.
"""

# fmt: off
DEFAULTS: dict[str, dict[str, int | float | bool | str]] = {
'''


def field_names() -> set[str]:
    """Every string in the package's code: a superset of the config fields it reads."""
    names = set()
    for path in FOLDER.glob("*.py"):
        if path.name != "class_defaults.py":
            names |= {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
    return {name for name in names if isinstance(name, str)}


def class_defaults() -> dict[str, dict]:
    """The same table as DEFAULTS, read from transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    read, table = field_names(), {}
    for family in FAMILIES:
        if family in PUBLISHED:
            continue
        name = next(n for n in (f"{family}_text", f"{family}_text_model", family) if n in CONFIG_MAPPING)
        fields = {f.name: f.default for f in dataclasses.fields(CONFIG_MAPPING[name]) if f.name in read}
        table[family] = {k: v for k, v in fields.items() if isinstance(v, (int, float, str)) and v is not False}
    return table


def test_the_table_is_what_the_classes_assume():
    pytest.importorskip("transformers")
    assert class_defaults() == {family: row for family, row in DEFAULTS.items() if family not in PUBLISHED}


def module_text() -> str:
    lines = []
    for family, row in (class_defaults() | {"phi3small": {"tie_word_embeddings": True}}).items():
        line = f'    "{family}": {{'
        for key, value in row.items():
            item = f'"{key}": {value!r}, '.replace("'", '"')
            if len(line) + len(item) > 118:
                lines.append(line.rstrip())
                line = "        "
            line += item
        lines.append(line.rstrip(", ") + "},")
    return HEAD + "\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    (FOLDER / "class_defaults.py").write_text(module_text())
