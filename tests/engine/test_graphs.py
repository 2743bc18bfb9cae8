"""Replayed decode steps, with a stand-in for the CUDA graph: the same forward on the same buffers, run again."""

from __future__ import annotations

import pytest
from host_reads import NoHostReads
from kinds import kind

from kvlab.engine import Engine, SamplingParams
from kvlab.engine.graphs import replay_decodes
from kvlab.speculate import SpeculationOptions


class Graphs:
    """Notes what was captured. A replay computes what the launches would, into where the result was at first."""

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.replays = 0

    def __call__(self, run, warm_up):
        hidden = warm_up().clone()
        self.captured.append(len(hidden))

        def replay() -> None:
            self.replays += 1
            with NoHostReads():
                hidden.copy_(run())

        return replay, hidden


PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]


def tokens_of(model, graphs: Graphs | None, **options) -> list[list[int]]:
    engine = Engine(model, num_blocks=40, block_size=12, max_model_len=40, max_batched_tokens=6, check=True, **options)
    if graphs is not None:
        replay_decodes(engine, graphs)
    params = [SamplingParams(n) for n in (9, 4, 12)]
    return [done.token_ids for done in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize("name", ["full", "windows", "indexed", "delta", "compressed"])
@pytest.mark.parametrize("pad_to", [1, 4])
def test_replayed_steps_give_the_same_tokens(name: str, pad_to: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks between decodes, requests that end: steps of 1 to 3 sequences. States must step once, not twice."""
    monkeypatch.setenv("KVLAB_OPS", "torch")
    model, graphs = kind(name).model, Graphs()
    plain = tokens_of(model, None, pad_to=pad_to)
    assert tokens_of(model, graphs, pad_to=pad_to) == plain
    assert sorted(graphs.captured) == ([4] if pad_to == 4 else sorted(set(graphs.captured)))
    assert graphs.replays > len(graphs.captured)


def test_coded_pages_are_replayed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a format that has scales per row and turns its rows besides."""
    monkeypatch.setenv("KVLAB_OPS", "torch")
    model, graphs = kind("full").model, Graphs()
    plain = tokens_of(model, None, pad_to=4, kv_dtype="int4_had")
    assert tokens_of(model, graphs, pad_to=4, kv_dtype="int4_had") == plain and graphs.replays > 1


def test_a_graph_is_captured_for_the_longest_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid of a decode follows `max_seq_len` on the host: it must be the limit, not the length at capture."""
    monkeypatch.setenv("KVLAB_OPS", "torch")
    engine = Engine(kind("full").model, num_blocks=40, block_size=12, max_model_len=40)
    seen, inner = [], engine.runner.decoder.hidden_states
    engine.runner.decoder.hidden_states = lambda ids, batches, views, *more: (
        seen.append((batches[0].max_seq_len, batches[0].num_decodes, int(batches[0].seq_lens.sum())))
        or inner(ids, batches, views, *more)
    )
    replay_decodes(engine, lambda run, warm_up: (run, warm_up()))
    engine.generate([[1, 2, 3]], SamplingParams(3))
    # the prompt as it is, then padding alone, then one decode after the other
    assert seen == [(3, 0, 3), (40, 1, 0), (40, 1, 4), (40, 1, 5)]


def test_what_cannot_be_replayed_is_refused() -> None:
    model = kind("full").model
    with pytest.raises(ValueError, match="speculation: a step with drafts"):
        replay_decodes(Engine(model, num_blocks=40, speculation=SpeculationOptions("ngram", 2)))
    with pytest.raises(ValueError, match="kv dtype 'kivi4': which groups"):
        replay_decodes(Engine(model, num_blocks=40, kv_dtype="kivi4", block_size=32))
