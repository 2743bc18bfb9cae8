"""The official `openai` client against a server over a tiny model: answers, streams, limits, leaving, ending."""

from __future__ import annotations

import http.client
import json
import time
import urllib.request
from urllib.parse import urlsplit

import openai
import pytest
import speaking

from kvlab.engine import SamplingParams
from kvlab.serve.limits import ServerLimits
from kvlab.serve.server import ServerThread


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLAB_OPS", "reference")
        with ServerThread(speaking.engine(), ServerLimits(max_body_bytes=20_000, drain_s=5)) as thread:
            yield thread


@pytest.fixture(scope="module")
def client(server):
    return client_of(server)


def client_of(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def alone(prompt: list[int], **params) -> list[int]:
    """The tokens of an engine that serves nothing else."""
    return speaking.engine().generate([prompt], SamplingParams(**params))[0].token_ids


def words(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def idle(server) -> None:
    end = time.monotonic() + 10
    while server.service.loop.num_live or server.service.engine.cache.held_bytes:
        assert time.monotonic() < end, "requests or pages are left"
        time.sleep(0.01)


# answers


def test_completion_is_what_the_engine_says_alone(client):
    answer = client.completions.create(model="tiny", prompt="w5 w6 w7", max_tokens=6, temperature=0)
    assert answer.choices[0].text == words(alone([5, 6, 7], max_tokens=6))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 6)
    assert answer.choices[0].finish_reason == "length"


def test_token_ids_in_and_out(client):
    answer = client.completions.create(
        model="tiny", prompt=[5, 6, 7], max_tokens=6, temperature=0, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].token_ids == alone([5, 6, 7], max_tokens=6)


def test_sixteen_tokens_when_a_completion_names_no_limit(client):
    answer = client.completions.create(model="tiny", prompt="w5", temperature=0, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


def test_prompts_and_choices_come_in_order(client):
    answer = client.completions.create(model="tiny", prompt=["w5 w6", "w9"], n=2, seed=3, max_tokens=4)
    expected = [
        words(alone(prompt, max_tokens=4, temperature=1.0, seed=seed))
        for prompt in ([5, 6], [9])
        for seed in (3, 4)
    ]  # fmt: skip
    assert [c.text for c in answer.choices] == expected
    assert answer.usage.prompt_tokens == 3


def test_streamed_pieces_are_the_whole_answer(client):
    ask = {"model": "tiny", "prompt": "w8 w2", "max_tokens": 9, "seed": 1}
    pieces = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    whole = client.completions.create(**ask)
    assert "".join(p.choices[0].text for p in pieces if p.choices) == whole.choices[0].text
    assert [p.choices[0].finish_reason for p in pieces if p.choices][-1] == "length"
    assert pieces[-1].choices == [] and pieces[-1].usage.completion_tokens == 9


def test_chat_goes_through_the_models_template(client):
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "w9 w10"}], "max_tokens": 5, "temperature": 0}
    whole = client.chat.completions.create(**ask)
    assert whole.choices[0].message.content == words(alone([1, 2, 9, 10, 4, 1, 3], max_tokens=5))
    assert whole.usage.prompt_tokens == 7
    pieces = [p.choices[0].delta.content for p in client.chat.completions.create(**ask, stream=True)]
    assert "".join(pieces) == whole.choices[0].message.content


def test_chat_without_a_limit_ends_at_the_models_length(client):
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "w9"}], temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.total_tokens == 256 and answer.choices[0].finish_reason == "length"


def test_stop_string_ends_the_answer_before_itself(client, server):
    ids = alone([5, 6, 7], max_tokens=12, temperature=1.0, seed=1)
    cut = next(i for i in range(3, 12) if f" w{ids[i]}" not in words(ids[:i]))
    answer = client.completions.create(model="tiny", prompt="w5 w6 w7", max_tokens=12, seed=1, stop=f" w{ids[cut]}")
    assert answer.choices[0].text == words(ids[:cut]) and answer.choices[0].finish_reason == "stop"
    idle(server)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_its_own_choice_as_stopped_and_no_other(stream):
    ask = {"model": "tiny", "prompt": "w5 w6 w7", "max_tokens": 60, "seed": 1, "n": 3}
    ask |= {"extra_body": {"ignore_eos": True, "return_token_ids": True}}
    params = [SamplingParams(60, temperature=1.0, seed=seed, ignore_eos=True) for seed in (1, 2, 3)]
    ids = [done.token_ids for done in speaking.engine().generate([[5, 6, 7]] * 3, params)]
    # a word that one choice says soon and another never says, and that begins no other
    said = {w: [own.index(w) if w in own else None for own in ids] for own in ids for w in own[3:30] if w >= 10}
    # early enough for the reader of the text to stop it in time
    word = next(w for w, places in said.items() if None in places and max(p for p in places if p is not None) < 30)
    engine = slowed(speaking.engine(), 0.005)
    with ServerThread(engine) as server:
        texts = ["", "", ""]
        answer = client_of(server).completions.create(**ask, stop=f" w{word}", stream=stream)
        for choice in [c for piece in answer for c in piece.choices] if stream else answer.choices:
            texts[choice.index] += choice.text
        idle(server)
    assert texts == [words(own if at is None else own[:at]) for own, at in zip(ids, said[word], strict=True)]
    stopped = sum(at is not None for at in said[word])
    ends = sorted(e.reason for e in engine.events.of("finish"))
    assert ends == ["length: 63 tokens"] * (3 - stopped) + ["stop: a stop string"] * stopped
    metrics = server.service.metrics.exposition()[0].decode()
    assert f'vllm:request_success_total{{engine="0",finished_reason="stop",model_name="tiny"}} {stopped}.0' in metrics
    assert 'finished_reason="abort"' not in metrics
    # a choice that stopped takes no more steps while the others go on
    assert max(e.tokens for e in engine.events.of("finish") if e.reason.startswith("stop")) < 63


def test_models_lists_the_served_one(client):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len, model.vocab_size) == ("tiny", 256, 61)


# what is turned away


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


# leaving and ending


def slowed(engine, seconds: float = 0.01):
    """The engine with steps long enough for a client to do something in between."""
    step = engine.step

    def slow():
        time.sleep(seconds)
        return step()

    engine.step = slow
    return engine


def test_client_that_leaves_a_stream_gives_its_pages_back():
    engine = slowed(speaking.engine())
    with ServerThread(engine) as server:
        ask = {"model": "tiny", "prompt": "w5", "max_tokens": 200, "extra_body": {"ignore_eos": True}}
        stream = client_of(server).completions.create(**ask, stream=True)
        next(iter(stream))
        stream.close()
        idle(server)
        assert [e.reason for e in engine.events.of("finish")] == ["abort: asked for"]


def test_client_that_leaves_a_whole_answer_gives_its_pages_back():
    engine = slowed(speaking.engine())
    with ServerThread(engine) as server:
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=10)
        body = json.dumps({"prompt": "w5", "max_tokens": 200, "ignore_eos": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        while not engine.events.of("token"):
            time.sleep(0.01)
        connection.close()
        idle(server)
        assert [e.reason for e in engine.events.of("finish")] == ["abort: asked for"]


def test_shutdown_lets_answers_finish_and_takes_no_new_ones():
    engine = slowed(speaking.engine(), 0.005)
    server = ServerThread(engine, ServerLimits(drain_s=120)).start()
    client = client_of(server)
    ask = {"model": "tiny", "prompt": "w5", "max_tokens": 60, "extra_body": {"ignore_eos": True}}
    stream = iter(client.completions.create(**ask, stream=True))
    first = next(stream)
    server._server.should_exit = True
    rest = list(stream)
    assert rest[-1].choices[0].finish_reason == "length"
    assert len(("".join(p.choices[0].text for p in [first, *rest])).split()) == 60
    server.stop()
    with pytest.raises(openai.APIConnectionError):
        client.completions.create(**ask)
    assert not server.service.loop.alive and not engine.requests


def test_shutdown_ends_answers_that_take_longer_than_the_drain():
    engine = slowed(speaking.engine(), 0.05)
    server = ServerThread(engine, ServerLimits(drain_s=1)).start()
    ask = {"model": "tiny", "prompt": "w5", "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    stream = iter(client_of(server).completions.create(**ask, stream=True))
    next(stream)
    server.stop()
    assert not engine.requests and engine.cache.held_bytes == 0


def test_engine_that_fails_is_500_for_those_who_wait_and_503_from_then_on():
    engine = speaking.engine()
    engine.step = lambda: 1 / 0
    with ServerThread(engine) as server:
        client = client_of(server)
        with pytest.raises(openai.InternalServerError, match="division by zero"):
            client.completions.create(model="tiny", prompt="w5")
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(model="tiny", prompt="w5")
        assert refused.value.status_code == 503
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{server.url}/health")


def test_answers_together_are_the_answers_alone(server, client):
    """Twelve calls at once on four places: each gets what it gets alone."""
    from concurrent.futures import ThreadPoolExecutor

    prompts = [[5 + i, 6, 7 + i % 3] for i in range(12)]

    def ask(i: int) -> list[int]:
        answer = client.completions.create(
            model="tiny", prompt=prompts[i], max_tokens=20, seed=i, extra_body={"return_token_ids": True}
        )
        return answer.choices[0].token_ids

    with ThreadPoolExecutor(12) as pool:
        got = list(pool.map(ask, range(12)))
    assert got == [alone(p, max_tokens=20, temperature=1.0, seed=i) for i, p in enumerate(prompts)]
    idle(server)


def scrape(server) -> str:
    return urllib.request.urlopen(f"{server.url}/metrics").read().decode()
