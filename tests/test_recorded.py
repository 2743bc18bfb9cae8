"""What a recorded run keeps of its tests: counts, and for what reason some were skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from recorded import summary  # noqa: E402

TESTS = """
import pytest

def test_passes(): pass
def test_fails(): assert False
def test_skips(): pytest.skip("no GPU")
@pytest.mark.parametrize("i", [1, 2])
def test_skips_by_mark(i): pytest.importorskip("no_such_module_at_all")
@pytest.mark.skipif(True, reason="another system")
def test_never(): pass
@pytest.mark.xfail(reason="a known fault")
def test_known(): assert False
@pytest.fixture
def broken(): raise OSError("gone")
def test_error(broken): pass
"""


def test_every_skip_keeps_its_reason(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junit-xml=out.xml", "test_some.py"]
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, env=env)
    found = summary((tmp_path / "out.xml").read_text())
    reasons = found.pop("skip_reasons")
    assert found == {"errors": 1, "failures": 1, "skipped": 5, "tests": 8}
    assert sorted(reasons.values()) == [1, 1, 1, 2]
    for said, times in (("no GPU", 1), ("another system", 1), ("a known fault", 1), ("no_such_module_at_all", 2)):
        assert [count for reason, count in reasons.items() if said in reason] == [times]


def test_a_run_without_skips_has_no_list_of_reasons():
    report = '<testsuites><testsuite errors="0" failures="0" skipped="0" tests="3"><testcase/></testsuite></testsuites>'
    assert summary(report) == {"errors": 0, "failures": 0, "skipped": 0, "tests": 3}
