"""What the server turns away, as the official `openai` client sees it: the status, the reason, and that it goes on."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

import openai
import pytest
import speaking
from calling import client_of, idle, scrape, slowed

from kvlab.serve.limits import ServerLimits
from kvlab.serve.server import ServerThread


def test_prompt_longer_than_the_model_is_413_with_the_reason(client):
    with pytest.raises(openai.APIStatusError, match="prompt of 256 tokens: must leave room") as refused:
        client.completions.create(model="tiny", prompt=[1] * 256)
    assert refused.value.status_code == 413 and refused.value.code == "context_length_exceeded"


def test_request_that_no_pool_holds_is_413():
    with ServerThread(speaking.engine(num_blocks=6, max_model_len=64)) as small:
        with pytest.raises(openai.APIStatusError, match="request can never fit") as refused:
            client_of(small).completions.create(model="tiny", prompt=[1] * 10, max_tokens=40)
        assert refused.value.status_code == 413
        # 5 pages of 4 tokens, and the last token is never cached
        (model,) = client_of(small).models.list().data
        assert model.max_model_len == 21
        ends = client_of(small).chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "w9"}], extra_body={"ignore_eos": True}
        )
        assert ends.usage.total_tokens == 21
        assert small.service.loop.num_live == 0


def test_large_body_is_413_whether_or_not_it_says_its_length(server, client):
    with pytest.raises(openai.APIStatusError, match="body: must be at most 20000 bytes") as refused:
        client.completions.create(model="tiny", prompt="w5 " * 10_000)
    assert refused.value.status_code == 413
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=10)
    connection.request("POST", "/v1/completions", body=iter([b" " * 9000] * 3), encode_chunked=True,
                       headers={"Content-Type": "application/json", "Transfer-Encoding": "chunked"})  # fmt: skip
    assert connection.getresponse().status == 413


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        ({"temperature": -1}, "temperature -1.0: must be 0"),
        ({"top_p": 0}, "top_p 0.0: must be above 0"),
        ({"max_tokens": 0}, "max_tokens 0: must be at least 1"),
        ({"n": 0}, "n 0: must be at least 1"),
        ({"logprobs": 2}, "logprobs: is not supported"),
        ({"stop": [""]}, "stop: must not hold an empty string"),
        ({"stop": ["x"] * 17}, "stop: at most 16 strings of at most 1024"),
        ({"stop": "x" * 1025}, "stop: at most 16 strings of at most 1024"),
        ({"prompt": []}, "prompt: must hold at least one"),
        ({"prompt": [61]}, "token id 61 must be at least 0 and below the vocabulary's 61"),
        ({"prompt": {"text": "w5"}}, "prompt"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_value_is_400_and_says_which(client, ask, reason):
    with pytest.raises(openai.BadRequestError, match=reason):
        client.completions.create(**({"model": "tiny", "prompt": "w5"} | ask))


def test_text_that_utf8_cannot_hold_is_400_and_the_server_goes_on(server, client):
    """A lone surrogate is valid JSON, but no key of a page can be made of it."""
    netloc = urlsplit(server.url).netloc
    for field in ('"cache_salt": "\\ud800"', '"prompt": "\\ud800"'):
        connection = http.client.HTTPConnection(netloc, timeout=10)
        body = '{"model": "tiny", "prompt": "w5", ' + field + "}"
        connection.request("POST", "/v1/completions", body=body, headers={"Content-Type": "application/json"})
        assert connection.getresponse().status == 400, field
    assert client.completions.create(model="tiny", prompt="w5", max_tokens=1).choices[0].finish_reason == "length"


def test_unknown_model_is_404(client):
    with pytest.raises(openai.NotFoundError, match="model 'huge': must be one of tiny"):
        client.completions.create(model="huge", prompt="w5")


def test_full_queue_is_429_and_says_when_to_come_again():
    engine = slowed(speaking.engine(max_num_seqs=1))
    with ServerThread(engine, ServerLimits(max_waiting=1, drain_s=1)) as full:
        client = client_of(full)
        ask = {"model": "tiny", "prompt": "w5", "max_tokens": 200, "stream": True, "extra_body": {"ignore_eos": True}}
        streams = [client.completions.create(**ask) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="2 requests run or wait: the queue is full") as refused:
            client.completions.create(**ask)
        assert refused.value.response.headers["retry-after"] == "1"
        assert 'vllm:admission_rejections_total{engine="0",model_name="tiny",reason="capacity"} 1.0' in scrape(full)
        for stream in streams:
            stream.close()
        idle(full)
