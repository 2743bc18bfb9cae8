"""Lookahead decoding: no token changes, guesses become right, and runs are what the model said."""

import pytest
from conftest_engine import Tiny
from kinds import KINDS, kind

from kvlab.engine import Engine, SamplingParams
from kvlab.plan.policies import default_block_size
from kvlab.speculate import SpeculationOptions

PROMPTS = [[5, 3, 8, 1, 40], [7], list(range(20, 39)), [9, 9, 9]]


@pytest.mark.parametrize("params", [SamplingParams(16), SamplingParams(16, 0.8, 5, seed=3, ignore_eos=True)])
def test_tokens_are_those_without(params):
    llama = Tiny("full")
    engine = Engine(llama.model(), num_blocks=60, block_size=4, check=True,
                    speculation=SpeculationOptions("lookahead", k=7))  # fmt: skip
    got = [c.token_ids for c in engine.generate(PROMPTS, params)]
    assert got == [llama.reference.tokens(p, params) for p in PROMPTS]
    assert engine.speculator.acceptance.drafted > 60
    assert engine.kv.held_bytes == 0 and not engine.speculator.proposer.windows


@pytest.mark.parametrize("name", KINDS)
def test_chains_where_trees_cannot_branch(name):
    model, params = kind(name), SamplingParams(10, ignore_eos=True)
    prompt = [(7 * i + 3) % model.vocab for i in range(7)]
    engine = Engine(model.model, num_blocks=80, block_size=default_block_size(model.model.spec, 2), check=True,
                    speculation=SpeculationOptions("lookahead", k=4))  # fmt: skip
    assert engine.generate([prompt], params)[0].token_ids == model.tokens(prompt, params)
    assert engine.speculator.proposer.branches == (name == "full" or name == "neighbours")


def test_a_text_that_repeats_itself_is_soon_guessed():
    """A model whose next token follows from the last one alone: a guess is right once the one before it is."""
    llama = Tiny("full")
    for name, tensor in llama.state.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    params = SamplingParams(40)
    expected = llama.reference.tokens([5, 3], params)
    engine = Engine(llama.model(), num_blocks=60, block_size=4, check=True,
                    speculation=SpeculationOptions("lookahead", k=8))  # fmt: skip
    assert engine.generate([[5, 3]], params)[0].token_ids == expected
    # the window moves on by one right guess a step, and a run adds two
    assert engine.scheduler.step_number < 25
