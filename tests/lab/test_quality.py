"""Scoring storage formats: one token at a time through pages, compared with a full-precision cache."""

from __future__ import annotations

import json
import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kvlab.book.results import results_dir  # noqa: E402
from kvlab.lab.quality import (  # noqa: E402
    SAME,
    SegmentScores,
    joined,
    mean_and_band,
    score_formats,
    score_in_chunks,
    student_t95,
    summarize,
)  # fmt: skip
from kvlab.lab.quality_text import evaluation_text  # noqa: E402
from kvlab.models.load import from_state_dict  # noqa: E402
from kvlab.ops.batch import make_batch  # noqa: E402
from kvlab.ops.views import page_views  # noqa: E402
from kvlab.specs.formats import FORMATS  # noqa: E402
from kvlab.specs.layout import page_layout  # noqa: E402

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    from kvlab.models.load import empty_model

    torch.manual_seed(3)
    named = empty_model(CONFIG, "fp32", "cpu", "tiny").decoder.weights.named
    state = {
        name: torch.randn(t.shape) * (2.0 if t.dim() == 1 else 1.5 * t.shape[-1] ** -0.5) for name, t in named.items()
    }
    return from_state_dict(CONFIG, state)


def whole_prefill(model, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [N, vocab] of one sequence computed at once: the other way to the same numbers."""
    views = [(page_views(torch.zeros(6, (lay := page_layout(x.parts[0], 16)).page_bytes, dtype=torch.uint8), lay),)
             for x in model.spec.layers]  # fmt: skip
    batch = make_batch([len(ids)], [len(ids)], torch.tensor([[1, 2, 3, 4]], dtype=torch.int32), 16)
    return torch.log_softmax(model.decoder.forward(torch.tensor(ids), [batch], views), dim=-1)


def test_full_precision_agrees_with_a_whole_prefill_and_with_itself(model) -> None:
    segments = torch.randint(64, (3, 37), generator=torch.Generator().manual_seed(1))
    scores = score_formats(model, segments, ["fp32"])
    assert list(scores) == ["fp32"]
    assert scores["fp32"].kl == [0.0] * 3 and scores["fp32"].top1 == [1.0] * 3
    for row, nll in zip(segments.tolist(), scores["fp32"].nll, strict=True):
        logp = whole_prefill(model, row)[:-1]
        assert nll == pytest.approx(-logp[torch.arange(36), row[1:]].mean().item(), abs=1e-4)


def test_a_segment_read_as_one_chunk_scores_as_one_read_token_by_token(model) -> None:
    segments = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(4))
    names = ["int8", "int4", "fp8_e4m3"]
    one, whole = (
        score_formats(model, segments, names),
        score_in_chunks(model, segments, [*names, "int4,first=1:native"]),
    )
    for name in names:
        assert whole[name].kl == pytest.approx(one[name].kl, abs=2e-4)
        assert whole[name].nll == pytest.approx(one[name].nll, abs=2e-4)
    assert whole["fp32"].kl == [0.0, 0.0]
    # a layer in full precision helps
    assert sum(whole["int4,first=1:native"].kl) < sum(whole["int4"].kl)


def test_coarser_formats_are_further_away(model) -> None:
    segments = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(2))
    scores = score_formats(model, segments, ["bf16", "int8", "fp8_e4m3"])
    for i in range(2):
        assert 0 < scores["bf16"].kl[i] < scores["fp8_e4m3"].kl[i] < 1
        assert 0 < scores["int8"].kl[i] < scores["fp8_e4m3"].kl[i]
        assert scores["fp8_e4m3"].top1[i] <= 1.0


def test_a_segment_longer_than_the_model_is_refused(model) -> None:
    with pytest.raises(ValueError, match="segments of 65 tokens: must be 2 to 64"):
        score_formats(model, torch.zeros(1, 65, dtype=torch.int64), [])


@pytest.mark.parametrize(("df", "quantile"), [(7, 2.3646), (15, 2.1314), (39, 2.0227), (1000, 1.9623)])
def test_students_t_is_that_of_the_tables(df: int, quantile: float) -> None:
    assert student_t95(df) == pytest.approx(quantile, rel=1e-3)


def test_a_band_is_the_interval_of_the_mean() -> None:
    mean, (low, high) = mean_and_band([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    half = 2.3646 * math.sqrt(6.0) / math.sqrt(8)
    assert mean == 4.5 and low == pytest.approx(4.5 - half, rel=1e-3) and high == pytest.approx(4.5 + half, rel=1e-3)
    with pytest.raises(ValueError, match="at least two segments"):
        mean_and_band([1.0])


def test_perplexity_is_of_the_mean_log_likelihood() -> None:
    found = summarize(SegmentScores([0.1, 0.1], [2.0, 4.0], [1.0, 0.5]))
    assert found["perplexity"]["mean"] == pytest.approx(math.exp(3.0))
    assert found["top1"]["mean"] == 0.75


def test_the_evaluation_text_is_prose_long_enough_and_says_its_licence() -> None:
    text = evaluation_text()
    paragraphs = text.text.split("\n\n")
    assert len(paragraphs) == len(set(paragraphs)) and len(text.text.split()) > 20_000
    assert "Python Software Foundation" in text.licence and len(text.sha256) == 64
    assert not any(line.startswith(" ") for line in text.text.split("\n"))


def run_of(formats: dict[str, float], /, **changed) -> dict:
    """A record as `kvlab.lab.quality` writes it, of formats whose divergence is given."""
    same = dict.fromkeys(("what", "commit", "device", "versions", "conditions", "text", "seeds"), "x")
    same |= {"segments": 1, "segment_tokens": 2, "baseline": {"format": "fp32", "perplexity": {"mean": 3.0}}}
    own = {"command": " ".join(formats), "date": "2026-01-02", "seconds": 1.5}
    rows = {name: {"kl": {"mean": kl}} for name, kl in formats.items()}
    scores = {name: {"kl": [kl]} for name, kl in ({"fp32": 0.0} | formats).items()}
    return same | own | {"formats": rows, "per_segment": scores} | changed


def test_runs_of_different_formats_become_one_record_in_the_order_of_the_menu() -> None:
    found = joined([run_of({"int4": 0.3, "bf16": 0.1}), run_of({"int8": 0.2, "int4,first=1:bf16": 0.25})])
    assert list(found["formats"]) == ["bf16", "int8", "int4", "int4,first=1:bf16"]
    assert list(found["per_segment"]) == ["fp32", *found["formats"]]
    assert found["formats"]["int8"]["kl"]["mean"] == 0.2 and found["seconds"] == 3.0
    assert [run["command"] for run in found["runs"]] == ["int4 bf16", "int8 int4,first=1:bf16"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [({key: "other"}, f"runs differ in {key}:") for key in SAME] + [({"formats": {"bf16": {}}}, "formats bf16:")],
)
def test_runs_of_different_measurements_are_not_joined(changed: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        joined([run_of({"bf16": 0.1}), run_of({"int8": 0.2}, **changed)])


@pytest.fixture(scope="module")
def recorded() -> dict[str, dict]:
    """The two records: every format in chunks, three formats token by token."""
    paths = [results_dir() / f"quality_{name}.json" for name in ("kv_formats", "one_by_one")]
    if not all(path.is_file() for path in paths):
        pytest.skip("quality is not recorded yet (make quality)")
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def test_the_recorded_results_have_what_a_reader_must_know(recorded) -> None:
    for result in recorded.values():
        assert result["text"]["tokens"] >= 30_000 and result["segments"] >= 8
        assert "4-bit" in result["conditions"] and result["text"]["licence"]
        for name, row in result["formats"].items():
            low, high = row["kl"]["band95"]
            assert 0 <= low <= row["kl"]["mean"] <= high < 1, name
            assert len(result["per_segment"][name]["kl"]) == result["segments"]


def test_the_record_in_chunks_says_what_the_one_token_by_token_says(recorded) -> None:
    """The same text in two ways through the cache. Products of other shapes sum in another order, so some codes are
    the next ones and later layers see other rounding: segments scatter, their mean stays."""
    chunks, steps = recorded["quality_kv_formats"], recorded["quality_one_by_one"]
    assert "as one chunk" in chunks["conditions"] and "one token at a time" in steps["conditions"]
    assert chunks["text"] == steps["text"] and chunks["segments"] == steps["segments"]
    assert chunks["per_segment"]["fp32"]["nll"] == pytest.approx(steps["per_segment"]["fp32"]["nll"], abs=1e-5)
    for name, row in steps["formats"].items():
        again = chunks["formats"][name]
        assert again["kl"]["mean"] == pytest.approx(row["kl"]["mean"], rel=0.05), name
        assert again["top1"]["mean"] == pytest.approx(row["top1"]["mean"], abs=0.003), name
        assert chunks["per_segment"][name]["kl"] == pytest.approx(steps["per_segment"][name]["kl"], rel=0.25), name


def test_every_format_has_a_record_and_they_are_compared_by_relations(recorded) -> None:
    """What chapter 8 says of it: scales matter more than a half bit, and eight bits are not eight bits."""
    record = recorded["quality_kv_formats"]
    assert list(record["formats"]) == [name for name in FORMATS if name not in ("fp64", "fp32")]
    kl = {name: row["kl"]["mean"] for name, row in record["formats"].items()}
    assert kl["int8"] < 0.3 * kl["fp8_e4m3"] < 0.6 * kl["fp8_e5m2"]
    assert kl["int4_had"] < 0.8 * kl["int4"] and kl["int4_g32"] < 0.8 * kl["int4"] and kl["nvfp4"] < kl["mxfp4"]
    assert kl["kivi4"] < kl["kivi2"] and max(kl.values()) < 1
