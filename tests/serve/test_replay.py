"""`kvlab replay` against a server over a tiny model: what it counts is what the engine did, and nothing waits."""

from __future__ import annotations

import json
import time

import pytest
import speaking

from kvlab.cache.prefix import PrefixOptions
from kvlab.cli import main
from kvlab.lab.replay import Prompts, ReplayOptions, replay
from kvlab.serve.limits import ServerLimits
from kvlab.serve.server import ServerThread
from kvlab.simulate import Recipe, Trace, TraceRequest, synthetic


def rows(*shapes: tuple[float, int, int], ids: tuple[tuple[int, ...], ...] = ()) -> Trace:
    hashes = ids or ((),) * len(shapes)
    found = tuple(TraceRequest(*shape, own) for shape, own in zip(shapes, hashes, strict=True))
    return Trace("test", "test", found, block_tokens=8)


def test_every_request_is_sent_and_counted():
    with ServerThread(speaking.engine()) as server:
        trace = synthetic(Recipe(n=12, rate=60, prompt=20, output=6, spread=0.5, seed=1)).clipped(100)
        found = replay(trace, ReplayOptions(server.url))
        engine = server.service.engine
        assert (found["requests"], found["finished"], found["errors"]) == (12, 12, {})
        assert found["output_tokens"] == sum(r.output_tokens for r in trace.requests) == engine.events.counts["token"]
        assert sorted(e.tokens for e in engine.events.of("arrive")) == sorted(r.prompt_tokens for r in trace.requests)
        assert found["preemptions"] == 0 and found["replayed"]["model"] == "tiny"
        every = found["latency"]["all"]
        assert 0 < every["ttft_s"]["p50"] <= every["ttft_s"]["p99"] <= every["e2e_s"]["p99"]


def test_arrivals_do_not_wait_for_answers():
    """One place, slow steps: all five are at the server before the second is answered."""
    engine = speaking.engine(max_num_seqs=1)
    step = engine.step

    def slow():
        time.sleep(0.02)
        return step()

    engine.step = slow
    with ServerThread(engine) as server:
        found = replay(rows(*((0.01 * i, 5, 10) for i in range(5))), ReplayOptions(server.url))
        kinds = [(e.kind, e.request_id) for e in engine.events if e.kind in ("arrive", "finish")]
        assert [kind for kind, _ in kinds[:5]] == ["arrive"] * 5
    assert found["finished"] == 5
    # each waits for those before it: 10 steps of at least 20 ms for each
    assert found["latency"]["all"]["ttft_s"]["p99"] > 4 * 10 * 0.02 * 0.9


def test_equal_hash_ids_are_hits_in_the_servers_cache():
    engine = speaking.engine(prefix=PrefixOptions(), num_blocks=129)
    with ServerThread(engine) as server:
        trace = rows((0.0, 20, 2), (0.6, 22, 2), (1.2, 16, 2), ids=((1, 2, 3), (1, 2, 4), (2, 5)))
        found = replay(trace, ReplayOptions(server.url))
    # the second finds both whole blocks of 8; block 2 is another history in the third
    assert found["cached_tokens_by_source"] == {"device": 16, "host": 0, "disk": 0}
    assert found["hit_tokens"] == 16 and found["prefix_hit_rate"] == 16 / (20 + 22 + 16)


def test_refused_requests_are_errors_by_status():
    with ServerThread(speaking.engine(max_num_seqs=1), ServerLimits(max_waiting=0, drain_s=1)) as server:
        found = replay(rows((0.0, 5, 200), (0.05, 5, 5)), ReplayOptions(server.url))
        assert found["finished"] == 1 and found["errors"] == {"HTTP 429": 1}
        found = replay(rows((0.0, 400, 5)), ReplayOptions(server.url))
        assert found["finished"] == 0 and found["errors"] == {"HTTP 413": 1}
        assert found["latency"]["all"] is None and found["output_tokens"] == 0


def test_plain_requests_carry_openais_fields_alone():
    with ServerThread(speaking.engine()) as server:
        found = replay(rows((0.0, 5, 6)), ReplayOptions(server.url, plain=True))
    assert found["finished"] == 1 and found["output_tokens"] == 6


def test_prompts_of_equal_blocks_begin_alike_and_others_do_not():
    prompts = Prompts(61, 8, 0)
    a, b, c = (prompts.ids(TraceRequest(0, n, 1, ids), i) for i, (n, ids) in enumerate(
        [(12, (1, 2)), (16, (1, 2)), (16, (1, 3))]))  # fmt: skip
    assert a == b[:12] and b[:8] == c[:8] and b[8:] != c[8:]
    assert prompts.ids(TraceRequest(0, 30, 1), 0) != prompts.ids(TraceRequest(0, 30, 1), 1)
    assert all(10 <= token < 61 for token in b)
    with pytest.raises(ValueError, match="vocab 10: must be above 10"):
        Prompts(10, 8, 0)


def test_command_prints_json_and_a_table(tmp_path, capsys):
    path = tmp_path / "trace.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n9,3\n700,4\n12,5\n8,0\n")
    with ServerThread(speaking.engine()) as server:
        common = ["replay", str(path), "--url", server.url, "--rate", "50", "--clip", "64"]
        assert main([*common, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["finished"] == 3 and found["output_tokens"] == 12 and found["prompt_tokens"] == 9 + 60 + 12
        assert main([*common, "--limit", "1"]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith("1 requests, 1 finished") and "rows left out: 1 x no output tokens" in shown


def test_nobody_at_the_address_is_one_line(tmp_path, capsys):
    assert main(["replay", "random:n=1", "--url", "http://127.0.0.1:9"]) == 2
    assert capsys.readouterr().err.startswith("kvlab: http://127.0.0.1:9: nobody answers")
