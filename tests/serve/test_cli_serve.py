"""`kvlab serve` as a process: it tells its address, answers, and ends on SIGTERM once its answers are out."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request

from calling import environment


def test_process_serves_and_ends_on_sigterm(directory):
    command = [sys.executable, "-m", "kvlab", "serve", "--model", str(directory), "--port", "0", "--json",
               "--num-blocks", "33", "--served-name", "small"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        facts = json.loads(process.stdout.readline())
        assert facts["url"].startswith("http://127.0.0.1:") and facts["model"] == "small"
        body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}).encode()
        ask = urllib.request.Request(f"{facts['url']}/v1/completions", body, {"Content-Type": "application/json"})
        answer = json.loads(urllib.request.urlopen(ask, timeout=60).read())
        assert len(answer["choices"][0]["token_ids"]) == 4 and answer["choices"][0]["text"] == ""
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_taken_port_is_one_line(directory, capsys):
    from kvlab.cli import main
    from kvlab.serve.server import bind

    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model", str(directory), "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"kvlab: port {port} on 127.0.0.1: ") and said.count("\n") == 1
