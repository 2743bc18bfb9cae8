"""Mixtures of experts: every routing against plain loops, both ways of running them, and a cache that never notices."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from host_reads import NoHostReads

from kvlab.lab.parity.paging import PagedSequences
from kvlab.models.facts import MLPFacts
from kvlab.models.load import cache_spec, empty_model, from_state_dict
from kvlab.models.modules import moe
from kvlab.models.modules.base import Place, WholeContext
from kvlab.models.modules.moe import MoE, MoEFacts
from kvlab.models.modules.router import RouterFacts
from kvlab.models.weights import Names, Source

HIDDEN = 9
V3 = RouterFacts(12, 3, "sigmoid", correction=True, num_groups=4, top_groups=2, group_members=2, normalise=True)
KINDS = {
    "mixtral": MoEFacts(RouterFacts(5, 2, normalise=True), 7),
    "qwen, not normalised": MoEFacts(RouterFacts(6, 3), 7),
    "one expert of one": MoEFacts(RouterFacts(1, 1), 4),
    "deepseek v2": MoEFacts(
        RouterFacts(8, 2, num_groups=4, top_groups=2, scale=1.7), 5, shared=MLPFacts(6, prefix="s")
    ),
    "deepseek v3": MoEFacts(replace(V3, scale=2.5, floor=1e-20), 5, shared=MLPFacts(6, prefix="shared_experts")),
    "deepseek v4": MoEFacts(RouterFacts(5, 2, "sqrtsoftplus", correction=True, normalise=True), 4, limit=0.5),
    "gpt-oss": MoEFacts(
        RouterFacts(5, 2, normalise=True, bias=True), 7, bias=True, limit=0.7, slope=1.7, up_offset=1.0
    ),
    "llama 4": MoEFacts(RouterFacts(5, 1, "sigmoid", on_input=True), 7, shared=MLPFacts(7, prefix="shared_expert")),
    "qwen2, gated shared expert": MoEFacts(RouterFacts(5, 2), 3, shared=MLPFacts(8, prefix="s"), shared_gate=True),
    "nemotron, not gated, latent": MoEFacts(V3, 5, "relu2", gated=False, latent=4, shared=MLPFacts(6, prefix="s")),
    "sparse mixer": MoEFacts(RouterFacts(5, 2, "sparsemixer", jitter=0.3), 7),
}


def made(facts: MoEFacts) -> tuple[MoE, dict[str, torch.Tensor]]:
    """The mixture with random weights, and those weights by name."""
    source = Source(None, torch.float64)
    mixture = MoE(facts, source.scope("layer"), HIDDEN, Place(0))
    rng = torch.Generator().manual_seed(5)
    source.fill([(n, torch.randn(t.shape, generator=rng, dtype=torch.float64)) for n, t in source.named.items()])
    return mixture, dict(source.named)


def step(max_query_len: int):
    return SimpleNamespace(batches=[SimpleNamespace(max_query_len=max_query_len)])


@pytest.mark.parametrize("tokens", [1, 2, 13])
@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_of_running_are_the_plain_loops(kind, tokens, monkeypatch):
    mixture, weights = made(KINDS[kind])
    x = torch.randn(tokens, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(tokens))
    whole = WholeContext(torch.zeros(tokens, dtype=torch.int64))
    expected = moe.reference(KINDS[kind], Names(weights, "layer"), x, whole)
    torch.testing.assert_close(mixture(x, step(13)), expected, rtol=0, atol=1e-12)
    # few at once: the experts of a step do not all fit side by side
    monkeypatch.setattr(moe, "GATHERED_BYTES", 1500)
    torch.testing.assert_close(mixture(x, step(1)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_decodes_reads_nothing_back(kind):
    mixture, _ = made(KINDS[kind])
    x = torch.randn(4, HIDDEN, dtype=torch.float64)
    with NoHostReads():
        mixture(x, step(1))
    with pytest.raises(AssertionError, match="bincount"), NoHostReads():
        mixture(x, step(2))


def test_a_token_gives_the_same_whoever_is_in_the_batch():
    mixture, _ = made(KINDS["deepseek v3"])
    x = torch.randn(11, HIDDEN, dtype=torch.float64)
    together = mixture(x, step(11))
    for t in range(11):
        torch.testing.assert_close(mixture(x[t : t + 1], step(1))[0], together[t], rtol=0, atol=1e-13)


MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 53, "max_position_embeddings": 64,
    "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 4,
}  # fmt: skip
TEXT = [3, 17, 4, 4, 50, 21, 8, 0, 33, 34, 2]


def random_state(config):
    rng = torch.Generator().manual_seed(2)
    places = empty_model(config, "fp64", "cpu", "tiny").decoder.weights.named
    return {n: torch.randn(t.shape, generator=rng, dtype=torch.float64) * 0.3 for n, t in places.items()}


def test_experts_one_by_one_or_stacked_in_the_checkpoint():
    stacked = random_state(MIXTRAL)
    single = {}
    for name, tensor in stacked.items():
        head, _, tail = name.partition("mlp.")
        if tail == "gate.weight":
            single[f"{head}block_sparse_moe.gate.weight"] = tensor
        elif tail == "experts.down_proj":
            single |= {f"{head}block_sparse_moe.experts.{e}.w2.weight": m for e, m in enumerate(tensor)}
        elif tail == "experts.gate_up_proj":
            for e, both in enumerate(tensor):
                for part, matrix in zip(("w1", "w3"), both.chunk(2), strict=True):
                    single[f"{head}block_sparse_moe.experts.{e}.{part}.weight"] = matrix
        else:
            single[name] = tensor
    assert len(single) == len(stacked) + 2 * (15 - 2)
    a, b = (PagedSequences(from_state_dict(MIXTRAL, s, "fp64"), 1, 11).step({0: TEXT})[0] for s in (stacked, single))
    assert torch.equal(a, b)


def test_a_missing_expert_is_told():
    state = random_state(MIXTRAL)
    stacked = state.pop("model.layers.1.mlp.experts.down_proj")
    state |= {f"model.layers.1.mlp.experts.{e}.down_proj.weight": stacked[e] for e in range(4)}
    with pytest.raises(ValueError, match=r"experts\.4\.down_proj\.weight"):
        from_state_dict(MIXTRAL, state, "fp64")


def test_routing_changes_nothing_about_the_cache():
    dense = MIXTRAL | {"model_type": "mistral"}
    assert cache_spec(MIXTRAL, "fp32").layers == cache_spec(dense, "fp32").layers
    # and in a run: whatever the router says, the same pages are written, and outside of them nothing
    state = random_state(MIXTRAL)
    other = state | {n: -t for n, t in state.items() if n.endswith("mlp.gate.weight")}
    written = []
    for weights in (state, other):
        cache = PagedSequences(from_state_dict(MIXTRAL, weights, "fp64"), 2, len(TEXT), block_size=3)
        cache.step({0: TEXT, 1: TEXT[:5]})
        views = [view for layer in cache._views for view in layer]
        written.append([torch.stack((v.k.isnan().flatten(2).any(-1), v.v.isnan().flatten(2).any(-1))) for v in views])
    dense_cache = PagedSequences(from_state_dict(dense, random_state(dense), "fp64"), 2, len(TEXT), block_size=3)
    dense_cache.step({0: TEXT, 1: TEXT[:5]})
    for layer, (a, b) in enumerate(zip(*written, strict=True)):
        view = dense_cache._views[layer][0]
        assert torch.equal(a, b)
        assert torch.equal(a[0], view.k.isnan().flatten(2).any(-1))
