"""Numbers that are none, or endless, on the command line: one line and exit 2, before anything is built."""

import pytest

from kvlab.cli import main

LOAD = "random:n=2,prompt=4,output=2"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["simulate", LOAD, "--step-overhead-ms", "nan"], "--step-overhead-ms nan: must be a number of at least 0"),
        (["simulate", LOAD, "--step-overhead-ms", "-5"], "--step-overhead-ms -5.0: must be a number of at least 0"),
        (["simulate", LOAD, "--slo-ttft", "nan"], "--slo-ttft nan: must be a positive number of seconds"),
        (["simulate", LOAD, "--speed", "1e-320"], "must be from 1e-9 to 1e9"),
        (["serve", "--port", "99999"], "port 99999: must be from 0 to 65535"),
        (["serve", "--port", "-1"], "port -1: must be from 0 to 65535"),
        (["serve", "--drain", "inf"], "drain_s inf: must be at least 0"),
        (["serve", "--drain", "nan"], "drain_s nan: must be at least 0"),
        (["replay", LOAD, "--url", "http://127.0.0.1:99999"], "must be an address such as http://127.0.0.1:8000"),
        (["plan", "llama-3.1-8b", "--draft", ""], "kvlab: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_one_line_and_exit_2(arguments, reason, capsys):
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert reason in told.err and len(told.err.splitlines()) == 1 and not told.out
