"""Whatever a client does wrong, the answer is a status, JSON, and an error in OpenAI's shape that says what."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from urllib.parse import urlsplit

import pytest
import speaking
from calling import environment

from kvlab.engine.sizing import longest_sequence
from kvlab.lab.scrape import scrape
from kvlab.serve.limits import ServerLimits
from kvlab.serve.server import ServerThread

JSON = "application/json"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = '{"prompt": "w5", "max_tokens": 1'
CALLS = [
    # method, path, content type, body, status, what the message says
    ("GET", "/nowhere", None, None, 404, "/nowhere: no such address"),
    ("POST", "/v1/embeddings", JSON, "{}", 404, "/v1/embeddings: no such address"),
    ("GET", COMPLETIONS, None, None, 405, "does not take GET"),
    ("DELETE", "/v1/models", None, None, 405, "does not take DELETE"),
    ("POST", COMPLETIONS, JSON, "{bad", 400, "body: is no JSON"),
    ("POST", COMPLETIONS, JSON, "", 400, "body"),
    ("POST", COMPLETIONS, JSON, "[1]", 400, "body"),
    ("POST", COMPLETIONS, JSON, b'{"prompt": "\xff"}', 400, "body"),
    ("POST", COMPLETIONS, JSON, "[" * 15_000, 400, "body"),
    ("POST", COMPLETIONS, "text/plain", GOOD + "}", 415, "content-type 'text/plain': must be application/json"),
    ("POST", CHAT, "application/x-www-form-urlencoded", "a=b", 415, "must be application/json"),
    ("POST", COMPLETIONS, JSON, "{}", 400, "prompt: "),
    ("POST", COMPLETIONS, JSON, '{"prompt": null}', 400, "prompt"),
    ("POST", COMPLETIONS, JSON, GOOD + ', "temperature": NaN}', 400, "temperature nan"),
    ("POST", COMPLETIONS, JSON, GOOD + ', "temperature": 1e999}', 400, "temperature inf"),
    ("POST", COMPLETIONS, JSON, GOOD + ', "seed": 1e30}', 400, "seed"),
    ("POST", COMPLETIONS, JSON, GOOD + ', "n": 1000000000}', 413, "completions in one call"),
    ("POST", COMPLETIONS, JSON, GOOD + ', "stop": 5}', 400, "stop"),
    ("POST", COMPLETIONS, JSON, GOOD + ', "logprobs": 1}', 400, "logprobs: is not supported"),
    ("POST", COMPLETIONS, JSON, GOOD + ', "logprobs": 0}', 400, "logprobs: is not supported"),
    ("POST", COMPLETIONS, JSON, GOOD + ', "min_tokens": 1}', 400, "min_tokens: is not supported"),
    ("POST", COMPLETIONS, JSON, GOOD + ', "n": 20}', 413, "20 completions in one call: must be at most 9"),
    ("POST", COMPLETIONS, JSON, GOOD + ', "model": "huge"}', 404, "model 'huge'"),
    ("POST", CHAT, JSON, '{"messages": []}', 400, "messages: must hold at least one message"),
    ("POST", CHAT, JSON, '{"messages": [{"role": "user", "content": 5}]}', 400, "messages"),
    ("POST", CHAT, JSON, '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 400, "messages"),
    ("POST", COMPLETIONS, JSON, json.dumps({"prompt": [5] * 300}), 413, "prompt of 300 tokens"),
    ("POST", COMPLETIONS, JSON, json.dumps({"prompt": [5] * 80, "n": 2}), 413, "request can never fit"),
    ("POST", COMPLETIONS, JSON, json.dumps({"prompt": [5], "max_tokens": 99, "n": 2}), 413, "request can never fit"),
    ("POST", COMPLETIONS, JSON, " " * 30_000, 413, "body: must be at most 20000 bytes"),
    ("POST", COMPLETIONS, JSON, [b" " * 9000] * 3, 413, "body: must be at most 20000 bytes"),
]
REASONS = {"completions in one call": "too_many_choices", "prompt of": "too_long", "can never fit": "too_long",
           "body: must be at most": "body_too_large"}  # fmt: skip
"""How what is turned away is counted, by what the client is told."""


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLAB_OPS", "reference")
        with ServerThread(speaking.engine(num_blocks=20), ServerLimits(5, max_body_bytes=20_000, drain_s=5)) as thread:
            yield thread


def send(server, method: str, path: str, kind: str | None, body) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    connection.request(method, path, body, {"Content-Type": kind} if kind else {})
    answer = connection.getresponse()
    return answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}


def turned_away(server) -> Counter[str]:
    return Counter(scrape(server.url).values("vllm:admission_rejections_total", "reason"))


@pytest.mark.parametrize(("method", "path", "kind", "body", "status", "says"), CALLS)
def test_every_error_has_openais_shape(server, method, path, kind, body, status, says):
    before = turned_away(server)
    found, raw, headers = send(server, method, path, kind, body)
    assert (found, headers["content-type"]) == (status, JSON)
    error = json.loads(raw)["error"]
    assert set(error) == {"message", "type", "param", "code"} and says in error["message"]
    assert ("allow" in headers) == (status == 405)
    # what was well said and too much is counted with its reason, what was wrong is not
    counted = [reason for told, reason in REASONS.items() if status == 413 and told in says]
    assert turned_away(server) - before == Counter(counted) and len(counted) == (status == 413)
    # and the server goes on
    assert send(server, "POST", COMPLETIONS, JSON, GOOD + "}")[0] == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_null_is_as_good_as_nothing_said(server, path):
    ask = {"prompt": "w5"} if path == COMPLETIONS else {"messages": [{"role": "assistant", "content": None},
                                                                      {"role": "user", "content": "w5"}]}  # fmt: skip
    names = ("model", "temperature", "top_p", "n", "seed", "stop", "stream", "stream_options", "logprobs", "tools")
    plain, nulls = ask | {"max_tokens": 3, "seed": 1}, ask | dict.fromkeys(names) | {"max_tokens": 3, "seed": 1}
    answers = [send(server, "POST", path, JSON, json.dumps(body)) for body in (plain, nulls)]
    assert [status for status, _, _ in answers] == [200, 200]
    assert json.loads(answers[0][1])["choices"] == json.loads(answers[1][1])["choices"]


def test_a_fault_of_the_servers_own_has_it_too(server, monkeypatch):
    monkeypatch.setattr(server.service, "jobs", lambda *_: 1 / 0)
    status, raw, _ = send(server, "POST", COMPLETIONS, JSON, GOOD + "}")
    assert status == 500 and json.loads(raw)["error"]["type"] == "server_error" and b"Traceback" not in raw


def test_the_announced_length_is_what_a_request_may_use(server):
    """A pool smaller than the model: models, chat's own limit, the line at the start and the refusal say one number."""
    longest = longest_sequence(server.service.engine)
    assert longest == 19 * 4 + 1 < server.service.engine.limits.max_model_len
    (row,) = json.loads(send(server, "GET", "/v1/models", None, None)[1])["data"]
    assert row["max_model_len"] == longest and f"sequences of {longest} tokens" in server.service.engine.describe()

    def ask(tokens: int) -> int:
        body = {"prompt": [5] * (longest - tokens), "max_tokens": tokens, "ignore_eos": True}
        return send(server, "POST", COMPLETIONS, JSON, json.dumps(body))[0]

    assert [ask(1), ask(40)] == [200, 200]
    body = {"prompt": [5] * (longest - 1), "max_tokens": 2, "ignore_eos": True}
    assert send(server, "POST", COMPLETIONS, JSON, json.dumps(body))[0] == 413


def test_ctrl_c_ends_the_process_quietly_and_tells_who_waits(directory):
    command = [sys.executable, "-m", "kvlab", "serve", "--model", str(directory), "--port", "0", "--json",
               "--num-blocks", "33", "--drain", "0"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    lines: list[bytes] = []
    try:
        facts = json.loads(process.stdout.readline())
        assert facts["max_model_len"] == 256  # the model's: the pool would hold 32 * 16 + 1
        body = json.dumps({"prompt": [5, 6], "max_tokens": 250, "ignore_eos": True, "stream": True}).encode()
        ask = urllib.request.Request(f"{facts['url']}/v1/completions", body, {"Content-Type": JSON})
        answer = urllib.request.urlopen(ask, timeout=60)
        reader = threading.Thread(target=lambda: lines.extend(answer))
        reader.start()
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        reader.join(10)
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()
    last = [line for line in lines if line.strip()][-1]
    assert last == b"data: [DONE]\n" or b"the server is shutting down" in last


def test_an_idle_connection_is_closed_by_the_client_before_the_server_would():
    """The other way round a call can go out on a connection that is just being closed, and fails (seen in a soak)."""
    from openai._constants import DEFAULT_CONNECTION_LIMITS

    with ServerThread(speaking.engine()) as thread:
        assert thread._server.config.timeout_keep_alive >= 2 * DEFAULT_CONNECTION_LIMITS.keepalive_expiry
