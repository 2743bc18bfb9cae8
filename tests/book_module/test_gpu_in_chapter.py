"""Chapter 9's cell on a GPU's record, run as it stands: the record's rows where there is one, that there is none elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvlab.book import gpu_record

CHAPTER = Path(__file__).resolve().parents[2] / "chapters" / "09_paging.ipynb"


class Page:
    """Keeps the tables that a chapter shows."""

    def __init__(self) -> None:
        self.tables: list[tuple] = []

    def table(self, rows, header, caption) -> None:
        self.tables.append((rows, header, caption))


def shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Page:
    monkeypatch.setattr("kvlab.book.results.results_dir", lambda: folder)
    cells = json.loads(CHAPTER.read_text(encoding="utf-8"))["cells"]
    [source] = [
        "".join(c["source"]) for c in cells if c["cell_type"] == "code" and "gpu_record(" in "".join(c["source"])
    ]
    page = Page()
    exec(source, {"book": page})
    return page


def test_without_a_record_the_chapter_says_so(tmp_path, monkeypatch, capsys) -> None:
    assert shown(tmp_path, monkeypatch).tables == []
    assert capsys.readouterr().out.startswith(gpu_record.NOT_MEASURED)


def test_a_record_becomes_a_table_with_its_own_provenance(tmp_path, monkeypatch, capsys) -> None:
    one = {"device": "NVIDIA H200", "commit": "d" * 40, "date": "2026-01-01"}
    record = {
        "what": "planted", "date": "2026-01-02", "commit": "c" * 40, "device": "another", "versions": {}, "command": "none",
        "stages": {"decode": {"bf16 x 8": {"us": 80.0, "gb_per_s": 3400.0, "of_copy": 0.81, "target_of_copy": 0.8}},
                   "against": {"sdpa contiguous x 8": {"us": 79.0, "gb_per_s": 3450.0, "of_copy": 0.82},
                               "vllm x 8": {"not measured": "ModuleNotFoundError: vllm"}}},
        "measured": {"decode": one, "against": one},
    }  # fmt: skip
    (tmp_path / "bench_gpu.json").write_text(json.dumps(record))
    [(rows, header, caption)] = shown(tmp_path, monkeypatch).tables
    assert rows == [["decode", "bf16 x 8", "80.0", "3,400", "81%", "80%"],
                    ["against", "sdpa contiguous x 8", "79.0", "3,450", "82%", "-"]]  # fmt: skip
    assert len(header) == 6 and "NVIDIA H200" in caption and "dddddddddd, 2026-01-01" in caption
    assert capsys.readouterr().out == "not measured, against: vllm x 8: ModuleNotFoundError: vllm\n"


def test_rows_of_others_from_another_run_are_left_out_and_models_alone_are_no_table(
    tmp_path, monkeypatch, capsys
) -> None:
    one, two = ({"device": "NVIDIA H200", "commit": c * 40, "date": "2026-01-01"} for c in "de")
    row = {"us": 80.0, "gb_per_s": 3400.0}
    record = {"what": "planted", **one, "versions": {}, "command": "none", "stages": {"decode": {"a": row}, "against": {"b": row}},
              "measured": {"decode": one, "against": two}}  # fmt: skip
    (tmp_path / "bench_gpu.json").write_text(json.dumps(record))
    assert [r[:2] for r in shown(tmp_path, monkeypatch).tables[0][0]] == [["decode", "a"]]
    record["stages"], record["measured"] = {"models": {"m": row}}, {"models": one}
    (tmp_path / "bench_gpu.json").write_text(json.dumps(record))
    assert shown(tmp_path, monkeypatch).tables == []
