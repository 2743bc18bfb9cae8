"""The protocol of live widgets, and the mount that a built page holds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.plan import explore
from kvlab.widgets import live

ROOT = Path(__file__).resolve().parents[2]


def test_a_compute_message_is_answered_with_the_state_and_its_id() -> None:
    message = {"kind": "compute", "id": 7, "params": {"model": "llama-3.1-70b", "context": 1024}}
    reply = live.answer("explorer", message)
    assert (reply["kind"], reply["id"], reply["ok"]) == ("reply", 7, True)
    assert reply["state"] == explore.explorer_state(message["params"])
    assert reply["state"]["kv_bytes"] == 327_680 * 1024


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"kind": "compute", "id": 1, "params": {"context": 0}}, "context 0"),
        ({"kind": "compute", "id": 1, "params": {"model": "no-such-model"}}, "no-such-model"),
        ({"kind": "compute", "id": 1, "params": {"colour": "red"}}, "control 'colour'"),
        ({"kind": "compute", "id": 1, "params": [1]}, "params [1]: must be an object"),
        ({"kind": "compute", "id": 1}, "params None"),
        ({"kind": "run", "id": 1, "params": {}}, "message kind 'run': must be 'compute'"),
        ({}, "message kind None"),
    ],
)
def test_bad_messages_get_an_error_that_names_what_is_wrong(message: dict, error: str) -> None:
    reply = live.answer("explorer", message)
    assert reply["ok"] is False and error in reply["error"] and reply["id"] == message.get("id")


def test_a_fault_of_ours_is_told_and_called_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explore, "explorer_state", lambda params: 1 / 0)
    reply = live.answer("explorer", {"kind": "compute", "id": 2, "params": {}})
    assert reply == {
        "kind": "reply",
        "id": 2,
        "ok": False,
        "error": "internal error, ZeroDivisionError: division by zero",
    }


def test_the_workers_form_is_json_text_on_both_sides() -> None:
    reply = json.loads(live.answer_json("explorer", json.dumps({"kind": "compute", "id": 3, "params": {}})))
    assert reply["ok"] and reply["state"] == json.loads(json.dumps(explore.explorer_state({})))


def test_an_unknown_widget_is_refused_when_the_page_is_made() -> None:
    with pytest.raises(ValueError, match="widget 'nothing': must be one of explorer, step_through, simulator"):
        live.live_html("nothing", {}, {}, "")


def test_the_mount_carries_the_state_and_cannot_be_broken_out_of() -> None:
    hostile = {"name": "</script><script>alert(1)</script><!--"}
    page = live.live_html("explorer", hostile, {"batch": 1}, "<table></table>", {"models": ["a"]})
    assert page.count("</script>") == 2, "its own two and no other"
    text = re.search(r'<script type="application/json">(.*?)</script>', page).group(1)
    assert json.loads(text) == {
        "widget": "explorer",
        "params": {"batch": 1},
        "state": hostile,
        "data": {"models": ["a"]},
    }
    assert "http://" not in page and "https://" not in page


def test_table_text_is_escaped_and_headed() -> None:
    table = live.table_html("a < b", ["model", "bytes"], [["<x>", "1"]])
    assert "<caption>a &lt; b</caption>" in table and '<th scope="row">&lt;x&gt;</th><td>1</td>' in table


def test_the_page_side_imports_only_the_standard_library() -> None:
    code = (
        "import sys; import kvlab.widgets.live as live; live.compute_function('explorer')({});"
        "third = {m.split('.')[0] for m in sys.modules} - sys.stdlib_module_names - {'kvlab', '__main__'};"
        "print(sorted(m for m in third if not m.startswith(('_', 'sitecustomize', 'distutils-precedence'))))"
    )
    run = subprocess.run([sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"],
                         capture_output=True, text=True, check=True)  # fmt: skip
    assert run.stdout.strip() == "[]"
