"""Trained heads as drafters: what they draft is what a forward without pages drafts, and no token changes."""

import random

import pytest
import torch
from conftest_engine import Tiny
from kinds import kind

from kvlab.engine import Engine, SamplingParams
from kvlab.speculate import Draft, SpeculationOptions
from kvlab.speculate.draft import ROOT
from kvlab.speculate.heads import Eagle, Medusa, load_heads, save_heads
from kvlab.speculate.trees import best_nodes, product_tree

PROMPTS = [[5, 3, 8, 1, 40], [7], list(range(20, 39)), [9, 9, 9]]
HIDDEN = 24


@pytest.fixture(scope="module")
def llama():
    return Tiny("full")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Heads with random weights, which draft any of 40 of the 61 tokens."""
    path = tmp_path_factory.mktemp("heads")
    torch.manual_seed(3)
    rows = torch.randperm(61)[:40]
    medusa, eagle = Medusa(HIDDEN, 3), Eagle(HIDDEN, 4, 2, 6, 16)
    for network in (medusa, eagle):
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    save_heads(path / "medusa.safetensors", medusa, rows, {})
    save_heads(path / "eagle.safetensors", eagle, rows, {"heads": "4", "kv_heads": "2", "head_dim": "6"})
    return path


def engine_of(llama, files, method, **options):
    own = {name: options.pop(name) for name in ("k", "branches", "drawn", "adapt") if name in options}
    speculation = SpeculationOptions(method, heads=str(files / f"{method}.safetensors"), **{"k": 4} | own)
    return Engine(
        llama.model(), **{"num_blocks": 60, "block_size": 3, "check": True} | options, speculation=speculation
    )


@pytest.mark.parametrize("branches", [(), (3, 2), (2, 2, 2)])
@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_tokens_are_those_without_heads(llama, files, method, branches):
    for params in (SamplingParams(14), SamplingParams(14, 0.9, seed=4, ignore_eos=True)):
        engine = engine_of(llama, files, method, branches=branches, k=6, drawn=False)
        got = [c.token_ids for c in engine.generate(PROMPTS, params)]
        assert got == [llama.reference.tokens(p, params) for p in PROMPTS]
        assert engine.speculator.acceptance.drafted > 0
    assert engine.kv.held_bytes == 0
    assert (engine.speculator.kv_bytes > 0) == (method == "eagle")


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules(llama, files, seed):
    """Small pools, preemption, chunked prompts, trees and chains: whatever is drafted, the tokens stay."""
    rng = random.Random(seed)
    engine = engine_of(
        llama, files, ["medusa", "eagle"][seed % 2], branches=rng.choice([(), (2, 2)]), block_size=rng.choice([1, 3, 8]),
        num_blocks=1 + 36 + rng.randint(0, 30), max_num_seqs=rng.randint(1, 4), drawn=False, adapt=seed > 3,
        max_batched_tokens=rng.choice([3, 8, 64]),
    )  # fmt: skip
    live, expected = {}, {}
    for _ in range(6):
        prompt = [rng.randrange(61) for _ in range(rng.randint(1, 24))]
        params = SamplingParams(rng.randint(1, 12), rng.choice([0.0, 0.8]), seed=rng.randrange(99), ignore_eos=True)
        request_id = engine.add_request(prompt, params)
        live[request_id], expected[request_id] = engine.requests[request_id], llama.reference.tokens(prompt, params)
        for _ in range(rng.randint(0, 3)):
            engine.step()
    while engine.scheduler.has_work:
        engine.step()
    assert {i: r.output for i, r in live.items()} == expected


class Overheard:
    """Every draft of a proposer, and the features that it was given, by position."""

    def __init__(self, engine):
        self.engine, self.proposer, self.features, self.drafts = engine, engine.speculator.proposer, {}, []
        self.observe, self.propose = self.proposer.observe, self.proposer.propose
        self.proposer.observe, self.proposer.propose = self.on_observe, self.on_propose

    def on_observe(self, step, hidden, certain, picked):
        for chunk, rows in zip(step.chunks, certain, strict=True):
            made = self.engine.model.decoder.final_norm(hidden[list(rows)]).float()
            self.features |= {chunk.start + i: feature for i, feature in enumerate(made)}
        self.observe(step, hidden, certain, picked)

    def on_propose(self, requests, counts):
        drafts = self.propose(requests, counts)
        for request, draft in zip(requests, drafts, strict=True):
            features = torch.stack([self.features[i] for i in range(len(request.tokens) - 1)])
            self.drafts.append((request.tokens.tolist(), features, draft))
        return drafts


def chain_logits(head, matrix, embedding, tokens, features):
    """Logits of each draft of a chain: the last known tokens' rows, then the head's own predictions."""
    features = features.clone()
    found = []
    while len(features) < len(tokens):
        made = head(features, embedding[torch.tensor(tokens[1 : len(features) + 1])])
        found.append(made[-1] @ matrix.T)
        features = torch.cat((features, made[-1:]))
    return found


@pytest.mark.parametrize("branches", [(), (3, 2), (2, 2, 2)])
def test_an_eagle_head_drafts_from_pages_what_it_drafts_from_whole_sequences(llama, files, branches):
    engine = engine_of(llama, files, "eagle", branches=branches, k=4, block_size=3)
    heard = Overheard(engine)
    engine.generate([[5, 3, 8, 1, 40]], SamplingParams(20))
    head, rows, _ = load_heads(files / "eagle.safetensors")
    matrix, embedding = llama.model().decoder.head[rows].float(), llama.model().decoder.embedding.float()
    checked = 0
    for tokens, features, draft in heard.drafts:
        for i in range(len(draft.tokens)):
            path, node = [], i
            while node != ROOT:
                path.insert(0, draft.tokens[node])
                node = draft.parent(node)
            # what follows is drafted from the path up to the draft itself
            logits = chain_logits(head, matrix, embedding, [*tokens, *path[:-1]], features)[-1]
            best = rows[logits.topk(max(branches, default=1)).indices].tolist()
            assert path[-1] in best, (i, path)
            checked += 1
    assert checked > 20


def test_product_trees_hold_the_likeliest_paths():
    levels = [[(1, -0.1), (2, -2.0), (3, -3.0)], [(4, -0.2), (5, -0.3)], [(6, -1.0)]]
    tree = product_tree(levels, 6)
    # paths by their sums: 1 | 1 4 | 1 5 | 1 4 6 | 1 5 6 | 2
    assert tree.tokens == (1, 4, 5, 6, 6, 2) and tree.parents == (-1, 0, 0, 1, 2, -1)
    assert len(product_tree(levels, 99).tokens) == 3 + 6 + 6
    assert product_tree([], 3).tokens == ()


def test_best_nodes_keep_parents():
    draft = best_nodes([7, 8, 9, 10], [-1, -1, 0, 1], [-1.0, -0.5, -1.0, -3.0], 3)
    assert draft.tokens == (8, 7, 9) and draft.parents == (-1, -1, 1)


class PlantedTree:
    """A tree whose second branch is right: its entries must move, and every table stay right."""

    kv_bytes = 0

    def __init__(self, answer, prompt, vocab):
        self.answer, self.prompt, self.vocab = answer, prompt, vocab

    def propose(self, requests, counts):
        done = len(requests[0].tokens) - self.prompt
        right = self.answer[done : done + 3]
        wrong = [(t + 1) % self.vocab for t in right]
        if len(right) < 3:
            return [Draft()]
        return [Draft((wrong[0], right[0], wrong[1], right[1], right[2]), (-1, -1, 1, 1, 3))]

    def observe(self, step, hidden, certain, picked):
        pass

    def retain(self, request_ids):
        pass


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
def test_an_accepted_branch_is_compacted_over_page_boundaries(llama, block_size):
    prompt, params = [5, 3, 8, 1, 40], SamplingParams(23)
    answer = llama.reference.tokens(prompt, params)
    engine = Engine(llama.model(), num_blocks=80, block_size=block_size, check=True,
                    speculation=SpeculationOptions(lambda e: PlantedTree(answer, 5, 61), k=5))  # fmt: skip
    assert engine.generate([prompt], params)[0].token_ids == answer
    assert {e.tokens for e in engine.events.of("accept")[:-1]} == {3}
    assert engine.scheduler.step_number < 9


@pytest.mark.parametrize("name", ["windows", "latent", "states", "sinks", "compressed"])
def test_trees_are_refused_where_a_part_cannot_branch(name):
    model = kind(name).model
    with pytest.raises(ValueError, match="branches: layer"):
        Engine(model, num_blocks=60, block_size=24, speculation=SpeculationOptions(branches=(2, 2)))
    planted = PlantedTree([1] * 20, 3, model.config.vocab_size)
    engine = Engine(model, num_blocks=60, block_size=24, speculation=SpeculationOptions(lambda e: planted))
    with pytest.raises(ValueError, match="takes trees"):
        engine.generate([[1, 2, 3]], SamplingParams(9, ignore_eos=True))


def test_heads_that_do_not_fit_are_refused(llama, files, tmp_path):
    for method, path in (("medusa", "eagle"), ("eagle", "medusa"), ("eagle", "missing")):
        options = SpeculationOptions(method, heads=str(files / f"{path}.safetensors"))
        with pytest.raises(ValueError, match="heads"):
            Engine(llama.model(), num_blocks=20, speculation=options)
    save_heads(tmp_path / "wide.safetensors", Medusa(32), torch.arange(5), {})
    with pytest.raises(ValueError, match="24 values"):
        Engine(
            llama.model(),
            num_blocks=20,
            speculation=SpeculationOptions("medusa", heads=str(tmp_path / "wide.safetensors")),
        )
