"""The official `openai` client against a server over a tiny model: what it is answered, whole and streamed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import speaking
from calling import alone, client_of, idle, slowed, words

from kvlab.engine import SamplingParams
from kvlab.lab.scrape import grown, scrape
from kvlab.serve.server import ServerThread


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


def test_prompts_and_choices_come_in_order_and_are_counted_by_prompt(server, client):
    before = scrape(server.url)
    answer = client.completions.create(model="tiny", prompt=["w5 w6", "w9"], n=2, seed=3, max_tokens=4)
    expected = [
        words(alone(prompt, max_tokens=4, temperature=1.0, seed=seed))
        for prompt in ([5, 6], [9])
        for seed in (3, 4)
    ]  # fmt: skip
    assert [c.text for c in answer.choices] == expected
    assert answer.usage.prompt_tokens == 3
    after = scrape(server.url)
    assert [grown(before, after, f"vllm:request_params_{n}") for n in ("n_count", "n_sum", "max_tokens_sum")] == [
        2,
        4,
        16,
    ]


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


def test_answers_together_are_the_answers_alone(server, client):
    """Twelve calls at once on four places: each gets what it gets alone."""
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
