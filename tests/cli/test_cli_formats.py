"""`kvlab formats`: every format of the menu with every figure, as JSON and as text."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from kvlab.cli import main
from kvlab.lab.small_model import small_model
from kvlab.specs.fixed_scales import FIXED, SHARES
from kvlab.specs.formats import FORMATS, get_format

MENU = [name for name in FORMATS if name != "fp64"]
CALIBRATED = [f"{name}/{share}" for name in FIXED for share in SHARES]


class Words:
    """A tokenizer of 40 ids for any text."""

    def encode(self, text: str) -> list[int]:
        return [3 + (7 * i) % 61 for i in range(40)]


@pytest.fixture
def asked(monkeypatch) -> list:
    """What models were loaded; all of them are the small one."""
    seen: list = []
    monkeypatch.setenv("KVLAB_OPS", "torch")
    monkeypatch.setattr(
        "kvlab.models.load.load_model", lambda name: seen.append(name) or replace(small_model(), tokenizer=Words())
    )
    return seen


def shown(capsys, *arguments: str) -> str:
    assert main(["formats", *arguments]) == 0
    return capsys.readouterr().out


def test_every_format_has_its_bits_its_errors_and_how_it_is_read(asked, capsys) -> None:
    found = json.loads(shown(capsys, "--json"))
    rows = {row["name"]: row for row in found["formats"]}
    assert asked == [None], "the default model, unless one is named"
    assert len(rows) == len(found["formats"]) and set(rows) == {*MENU, *CALIBRATED}
    for name, row in rows.items():
        assert row["bits"] == get_format(name.partition("/")[0]).bits
        assert row["bits"] <= row["row_bits"] <= row["page_bits"] and row["note"], name
        errors = [row[of] for of in ("key", "value", "outlier")]
        assert all(math.isfinite(x) for x in errors), name
        # fp32 pages of an fp32 model lose nothing, all others something
        assert all((x == 0) == (name == "fp32") for x in errors) and 0 <= max(errors[:2]) < 1, name
        assert row["cpu"] in ("in place", "gathered") and isinstance(row["gpu"], str)
    # nothing lies in a page for scales that lie beside the pool
    assert all(rows[name]["row_bits"] == 8 for name in (*FIXED, *CALIBRATED))
    assert all(rows[name]["row_bits"] > rows[name]["bits"] for name in MENU if FORMATS[name].scale_bytes)


def test_the_text_shows_what_the_json_has(asked, capsys) -> None:
    names = ("int4", "fp8", "kivi2")
    rows = json.loads(shown(capsys, *names, "--json"))["formats"]
    lines = shown(capsys, *names).splitlines()
    assert [row["name"] for row in rows] == ["int4", "fp8_e4m3", *CALIBRATED[:3], "kivi2"]
    for row in rows:
        [line] = [x for x in lines if x.startswith(row["name"] + " ")]
        figures = [str(row["bits"]), f"{row['row_bits']:.2f}", f"{row['page_bits']:.2f}"]
        figures += [f"{row[of]:.2%}" for of in ("key", "value", "outlier")]
        assert line.split()[1:7] == figures
        assert line.split(maxsplit=7)[7].split("  ")[0] == row["cpu"]
        assert any(x.split(maxsplit=1)[:1] == [row["name"]] and row["note"] in x for x in lines)
        assert line.endswith("in place, prefill gathered") == (row["name"] == "kivi2")
    assert sum(x.startswith("latents (MLA): a GPU kernel reads fp32, bf16") for x in lines) == 1


def test_a_format_that_is_not_there_is_one_line(asked, capsys) -> None:
    assert main(["formats", "int5"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("kvlab: dtype 'int5': must be one of fp64, fp32") and asked == []
