"""The catalogue: every row can be sized, rows agree with the published configs, names are found and suggested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvlab.specs import catalogue
from kvlab.specs.families import from_config
from kvlab.specs.weights import count

CONFIGS = Path(__file__).parents[3] / "shared" / "configs"

# parameters as the publishers state them, in billions; rows typed from papers and cards must come out there
PUBLISHED = {
    "llama-1-65b": 65.2, "llama-2-13b": 13.0, "llama-2-70b": 69.0, "llama-3-8b": 8.03, "llama-3-70b": 70.6,
    "llama-3.1-70b": 70.6, "tinyllama-1.1b": 1.1, "yi-6b": 6.06, "smollm2-135m": 0.1345, "smollm2-360m": 0.362,
    "smollm2-1.7b": 1.71, "mixtral-8x22b": 140.6, "mistral-small-24b": 23.6, "mistral-large-2": 123.0,
    "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09, "qwen2.5-14b": 14.8, "qwen2.5-32b": 32.8, "qwen3-1.7b": 1.72,
    "qwen3-14b": 14.8, "qwen3-235b-a22b": 235.0, "deepseek-v2": 236.0, "deepseek-v3": 671.0, "glm-4.5": 353.0,
    "gemma-2b": 2.51, "gemma-2-9b": 9.24, "gemma-3-1b": 1.0, "gemma-3-27b": 27.0, "gpt2": 0.124, "gpt2-medium": 0.355,
    "gpt2-xl": 1.56, "gpt-oss-120b": 116.8, "gpt-neox-20b": 20.6, "pythia-6.9b": 6.86, "pythia-12b": 11.85,
    "opt-125m": 0.125, "opt-1.3b": 1.32, "opt-6.7b": 6.66, "opt-13b": 12.85, "opt-30b": 29.97, "opt-66b": 65.7,
    "falcon-180b": 179.0, "starcoder-15b": 15.5, "phi-3-medium-4k": 14.0, "phi-4-mini": 3.84, "command-r-plus": 104.0,
    "olmo-2-7b": 7.3, "olmo-3.1-32b": 32.2, "internlm2-7b": 7.74, "mamba-2.8b": 2.77, "jamba-1.5-large": 398.0,
    "lfm2-2.6b": 2.57,
}  # fmt: skip

# the guide's fifteen table models
GUIDE = {
    "llama-3-8b", "llama-3-70b", "llama-3-405b", "llama-2-70b", "llama-1-65b", "mistral-7b-v0.1", "mixtral-8x7b",
    "mixtral-8x22b", "qwen2.5-7b", "qwen2.5-72b", "deepseek-v2", "deepseek-v3", "falcon-180b", "phi-3-medium-4k",
    "gemma-2-27b",
}  # fmt: skip


def test_at_least_sixty_models_and_the_guides_table() -> None:
    assert len(catalogue.names()) >= 60
    assert set(catalogue.names()) >= GUIDE


@pytest.mark.parametrize("name", catalogue.names())
def test_every_row_can_be_sized(name: str) -> None:
    entry = catalogue.entry(name)
    model = from_config(entry.config, name=name)
    assert model.vocab_size > 0 and model.hidden_size > 0 and entry.source
    assert model.bytes_at(4096) > 0
    assert count(entry.config).total > 10**8


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_give_the_published_number_of_parameters(name: str) -> None:
    assert count(catalogue.get(name)).total / 1e9 == pytest.approx(PUBLISHED[name], rel=0.005)


def _published() -> list[tuple[str, str]]:
    file = CONFIGS / "expected.json"
    if not file.is_file():
        return []
    models = {row["model"].lower(): name for name, row in json.loads(file.read_text())["configs"].items()}
    hubs = {name: catalogue.entry(name).hub.lower() for name in catalogue.names()}
    return [(name, models[hub]) for name, hub in hubs.items() if hub in models]


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="../shared/configs is not here")
@pytest.mark.parametrize(("name", "file"), _published())
def test_rows_cache_what_the_published_config_caches(name: str, file: str) -> None:
    published = json.loads((CONFIGS / file).read_text())
    ours, theirs = from_config(catalogue.get(name)), from_config(published)
    assert ours.layers == theirs.layers
    assert (ours.hidden_size, ours.num_query_heads) == (theirs.hidden_size, theirs.num_query_heads)
    # rows that say so complete what an excerpt left out, or correct a re-typed copy
    if catalogue.entry(name).source == "config.json":
        assert count(catalogue.get(name)).total == count(published).total
        assert ours.max_position == theirs.max_position


def test_names_are_found_in_any_case_and_by_hub_id() -> None:
    assert catalogue.entry("Llama-3-70B").name == "llama-3-70b"
    assert catalogue.entry("qwen/qwen3-8b").name == "qwen3-8b"
    assert catalogue.find("no-such-model") is None


def test_unknown_names_get_suggestions() -> None:
    with pytest.raises(ValueError, match=r"model 'lama-3-70b': not in the catalogue; did you mean llama-3-70b"):
        catalogue.get("lama-3-70b")


def test_a_row_like_another_takes_over_its_facts_but_not_its_hub_id() -> None:
    small, large = catalogue.get("gpt-oss-20b"), catalogue.get("gpt-oss-120b")
    assert (small["num_hidden_layers"], large["num_hidden_layers"]) == (24, 36)
    assert small["hidden_size"] == large["hidden_size"]
    assert catalogue.entry("llama-3-405b").hub == ""


def test_get_gives_a_fresh_dict() -> None:
    catalogue.get("gpt2")["n_layer"] = 1
    assert catalogue.get("gpt2")["n_layer"] == 12


def test_lists_are_spelled_out() -> None:
    assert catalogue.expand("a*2 (b 4)*2 c") == ["a", "a", "b", 4, "b", 4, "c"]
    ratios = catalogue.get("deepseek-v4-pro")["compress_ratios"]
    assert ratios[:4] == [128, 128, 4, 128] and ratios[-1] == 0 and len(ratios) == 62
