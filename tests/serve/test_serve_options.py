"""What `kvlab serve`'s options make of an engine, over HTTP: drafts, swaps, recoded pages and who is evicted are counted."""

from __future__ import annotations

import argparse
import json
import urllib.request

import pytest
import speaking
import torch

from kvlab.cli import serve
from kvlab.cli.engine_arguments import engine_changes, make_engine
from kvlab.engine import SamplingParams
from kvlab.lab.scrape import Scrape, scrape
from kvlab.serve.metrics import EngineMetrics
from kvlab.serve.server import ServerThread
from kvlab.speculate.heads import Eagle, Medusa, save_heads

AGAIN = [5, 6, 7, 8] * 4
"""A text that has a past to draft from."""


def engine_of(folder, words: str):
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    common = f"--model {folder} --dtype fp64 --block-size 4 --num-blocks 65 --max-num-seqs 4"
    args = parser.parse_args(f"{common} {words}".split())
    return make_engine(args, engine_changes(args))


def ask(server, prompt, tokens: int) -> list[int]:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    headers = {"Content-Type": "application/json"}
    call = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(call, timeout=60) as answer:
        return json.loads(answer.read())["choices"][0]["token_ids"]


def heads(folder, method: str) -> str:
    """A file of random heads that fit the tiny model."""
    torch.manual_seed(0)
    network = Medusa(speaking.HIDDEN, 3) if method == "medusa" else Eagle(speaking.HIDDEN, 2, 1, 32, 16)
    path, about = folder / "heads" / method, {"heads": "2", "kv_heads": "1", "head_dim": "32"}
    save_heads(path, network, torch.arange(speaking.VOCAB), about)
    return f"--speculate {method}:3 --heads {path}"


@pytest.mark.parametrize(
    "words",
    ["--speculate ngram:2 --adapt-k", "--speculate lookahead:6", "--speculate draft:3 --draft-layers 2",
     "--speculate draft:2 --draft-model {folder}", "medusa", "eagle", "eagle --draft-tree 2,2"],
)  # fmt: skip
def test_drafts_are_counted_and_change_no_token(words, directory):
    method, _, more = words.partition(" ")
    said = f"{heads(directory, method)} {more}" if method in ("medusa", "eagle") else words.format(folder=directory)
    engine = engine_of(directory, said)
    metrics = EngineMetrics(engine, "tiny")
    params = SamplingParams(24, ignore_eos=True)
    assert engine.generate([AGAIN], params) == engine_of(directory, "").generate([AGAIN], params)
    look = Scrape.of(metrics.exposition()[0].decode())
    drafts, tokens, right = (look.total(f"vllm:spec_decode_num_{n}_total") for n in
                             ("drafts", "draft_tokens", "accepted_tokens"))  # fmt: skip
    assert 0 < drafts <= tokens and right <= tokens
    by_place = look.values("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position")
    assert sum(by_place.values()) == right
    # what the model itself drafts is right
    assert right == tokens or "draft:" not in words


def test_drafts_of_a_served_engine_move_its_metrics(directory):
    with ServerThread(engine_of(directory, "--speculate draft:3 --draft-layers 2")) as server:
        found = ask(server, AGAIN, 24)
        look = scrape(server.url)
    assert found == engine_of(directory, "").generate([AGAIN], SamplingParams(24, ignore_eos=True))[0].token_ids
    # a token of the prompt's step, five steps of three drafts and one more token, and what is left: two drafts and one
    assert look.total("vllm:spec_decode_num_drafts_total") == 6
    assert look.total("vllm:spec_decode_num_accepted_tokens_total") == 5 * 3 + 2


@pytest.mark.parametrize(
    ("words", "kind"),
    [("--link-rate 1TB --flop-rate 1", "swap_out"), ("--link-rate 1B --flop-rate 1e15", ""),
     ("--link-rate 1TB --flop-rate 1 --park-dtype int8", "compress"), ("", None)],
)  # fmt: skip
def test_a_sequence_that_lost_its_pages_is_had_back_the_cheaper_way(words, kind, directory, capsys):
    engine = engine_of(directory, f"--preempt auto --host-bytes 4MiB {words}")
    assert ("GFLOP/s, whichever is faster" in capsys.readouterr().err) == (not words)
    name = engine.add_request(AGAIN)
    while not engine.requests[name].output:
        engine.step()
    engine.scheduler.preempt(name, 0.0)
    events = engine.events.counts
    assert kind is None or [k for k in ("swap_out", "compress") if events[k]] == ([kind] if kind else [])
    (event,) = engine.events.of("compress") or engine.events.of("swap_out") or engine.events.of("preempt")
    assert "; swap " in event.reason and " ms, recompute " in event.reason


@pytest.mark.parametrize(("eviction", "hits"), [("lru", 0), ("fifo", 0), ("lfu", 16)])
def test_who_is_evicted_is_the_policys_choice(eviction, hits, directory):
    """A prompt that was found twice, then others that fill the pool: only counting uses keeps it."""
    engine = engine_of(directory, f"--num-blocks 17 --prefix-eviction {eviction}")
    metrics = EngineMetrics(engine, "tiny")

    def hits_of(first: int) -> float:
        engine.generate([[first] * 17], SamplingParams(1))
        return Scrape.of(metrics.exposition()[0].decode()).total("vllm:prefix_cache_hits_total")

    before = [hits_of(first) for first in (5, 5, 5, 20, 30, 40, 50)][-1]
    assert hits_of(5) - before == hits
