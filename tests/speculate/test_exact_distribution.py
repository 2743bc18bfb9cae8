"""Every proposer through the whole engine: sampled texts have the model's own distribution, computed by brute force.

The vocabulary has five tokens, so the joint distribution of the tokens behind a prompt is a sum of products of softmaxes
over every text there is. A planted wrong acceptance fails the same comparison, so it is able to fail.
"""

import itertools
import math

import pytest
import torch
from conftest_engine import DenseReference, config_of, random_state

from kvlab.engine import Engine, SamplingParams
from kvlab.models.load import from_state_dict
from kvlab.speculate import SpeculationOptions, speculator
from kvlab.speculate.heads import Eagle, Medusa, save_heads
from kvlab.speculate.skip import skip_layers

VOCAB, REQUESTS, NEW = 5, 400, 4
PROMPT = [1, 2, 3, 0, 4, 1, 2, 2, 3, 1, 4, 0]
TEMPERATURE = 1.6
# method, and what else its options are
PROPOSERS = {
    "n-gram": ("ngram", {}),
    "lookahead": ("lookahead", {}),
    "draft model": ("draft", {"draft": "other"}),
    "draft model, likeliest": ("draft", {"draft": "other", "drawn": False}),
    "skipped layers": ("draft", {"draft": "skipped"}),
    "medusa": ("medusa", {}),
    "medusa tree": ("medusa", {"branches": (2, 2)}),
    "eagle": ("eagle", {}),
    "eagle tree": ("eagle", {"branches": (2, 2)}),
}


def small(seed):
    config = config_of("full", vocab_size=VOCAB)
    state = random_state(config, seed)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = state[name][:VOCAB].clone()
    return config, state


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The model, another one, a file of heads for each method, and the distribution of texts of `NEW` tokens."""
    config, state = small(0)
    path = tmp_path_factory.mktemp("heads")
    torch.manual_seed(3)
    heads = {"medusa": (Medusa(24, 2), {}), "eagle": (Eagle(24, 4, 2, 6, 16), {"heads": "4", "kv_heads": "2",
                                                                              "head_dim": "6"})}  # fmt: skip
    for name, (network, about) in heads.items():
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
        save_heads(path / f"{name}.safetensors", network, torch.arange(VOCAB), about)
    model = from_state_dict(config, state, "fp64", "cpu")
    drafts = {"other": from_state_dict(*small(7), "fp64", "cpu"), "skipped": skip_layers(model, [0])}
    return model, drafts, path, distribution(DenseReference(config, state))


def distribution(reference):
    """The probability of each text of `NEW` tokens behind the prompt, [VOCAB] * NEW."""
    p = torch.ones(())
    for length in range(NEW):
        texts = itertools.product(range(VOCAB), repeat=length)
        after = [torch.softmax(reference.logits([*PROMPT, *text])[-1] / TEMPERATURE, 0) for text in texts]
        p = p[..., None] * torch.stack(after).view(*[VOCAB] * length, VOCAB)
    return p


def sampled(world, name):
    """(how often each text behind the prompt came, [VOCAB] * NEW; the engine)."""
    model, drafts, path, _ = world
    method, options = PROPOSERS[name]
    options = options | ({"draft": drafts[options["draft"]]} if "draft" in options else {})
    if method in ("medusa", "eagle"):
        options["heads"] = str(path / f"{method}.safetensors")
    engine = Engine(model, num_blocks=1 + 5 * REQUESTS, block_size=4, max_model_len=32, max_num_seqs=REQUESTS,
                    max_batched_tokens=4 * REQUESTS,
                    speculation=SpeculationOptions(method, k=3, **options))  # fmt: skip
    params = [SamplingParams(NEW, TEMPERATURE, seed=i, ignore_eos=True) for i in range(REQUESTS)]
    texts = torch.tensor([c.token_ids for c in engine.generate([PROMPT] * REQUESTS, params)])
    found = torch.zeros([VOCAB] * NEW)
    found.index_put_(tuple(texts.T), torch.ones(REQUESTS), accumulate=True)
    return found, engine


def excess(found, p):
    """The chi-square statistic of `found` over its 1 - 1e-6 quantile (Wilson-Hilferty); rare texts are one outcome.

    The first token, which nobody drafts, is summed over.
    """
    expected, counts = p.sum(0).flatten() * REQUESTS, found.sum(0).flatten()
    common = expected >= 5
    expected = torch.cat((expected[common], expected[~common].sum()[None]))
    counts = torch.cat((counts[common], counts[~common].sum()[None]))
    statistic, freedom = float(((counts - expected) ** 2 / expected).sum()), len(expected) - 1
    assert freedom > 8
    a = 2 / (9 * freedom)
    return statistic / (freedom * (1 - a + 4.75 * math.sqrt(a)) ** 3)


@pytest.mark.parametrize("name", PROPOSERS)
def test_texts_are_distributed_as_the_model_says(world, name):
    found, engine = sampled(world, name)
    seen = engine.speculator.acceptance
    assert 0 < seen.accepted < seen.drafted, "drafts must be right and wrong, both"
    assert excess(found, world[-1]) < 1


@pytest.mark.parametrize("name", PROPOSERS)
def test_a_draft_taken_without_asking_shows(world, name, monkeypatch):
    def credulous(draft, picked):
        """The first draft at each depth counts as right."""
        path = []
        for i in range(len(picked) - 1):
            if draft.parent(i) == (path[-1] if path else -1):
                path.append(i)
        return path, picked[path[-1] + 1] if path else picked[0]

    monkeypatch.setattr(speculator, "walk", credulous)
    assert excess(sampled(world, name)[0], world[-1]) > 1
