"""The recorded recall experiment: it resumes, its bytes are the specs', and its weights score what it says."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kvlab.book.results import results_dir  # noqa: E402
from kvlab.lab.mqar import show  # noqa: E402
from kvlab.lab.mqar.data import tokens_of  # noqa: E402
from kvlab.lab.mqar.models import KINDS, RecallModel  # noqa: E402
from kvlab.lab.mqar.record import KEPT_SEED, SEEDS, mean_and_band, record  # noqa: E402
from kvlab.lab.mqar.train import Settings, score  # noqa: E402

TINY = Settings(steps=2, tokens_per_step=96, loads=(2, 4), easy_loads=(2,))


@pytest.fixture(scope="module")
def recorded() -> dict:
    return show.results()


def test_a_stopped_recording_goes_on_where_it_stopped(tmp_path) -> None:
    out = tmp_path / "small.json"
    record(out, TINY, ["mqa"], [0])
    first = json.loads(out.read_text())["runs"]
    found = record(out, TINY, ["mqa", "mla"], [0, 1])
    assert [(run["model"], run["seed"]) for run in found["runs"]] == [("mqa", 0), ("mla", 0), ("mqa", 1), ("mla", 1)]
    assert found["runs"][0] == first[0], "what is recorded is not run again"
    assert found == json.loads(out.read_text())
    assert {path.stem for path in (tmp_path / "small_models").iterdir()} == {"mqa", "mla"}
    with pytest.raises(ValueError, match="recorded under"):
        record(out, Settings(steps=3), ["mqa"], [0])


def test_an_unknown_kind_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"'mamba9'.*mha"):
        record(tmp_path / "x.json", TINY, ["mamba9"])
    with pytest.raises(ValueError, match=r"'mamba9'.*mha"):
        show.load("mamba9")


def test_the_band_of_three_seeds_is_students() -> None:
    mean, (low, high) = mean_and_band([0.50, 0.52, 0.54])
    assert mean == pytest.approx(0.52)
    assert high - mean == pytest.approx(4.303 * 0.02 / 3**0.5) and mean - low == pytest.approx(high - mean)
    assert mean_and_band([0.0, 0.0, 1.0])[1] == (0.0, 1.0), "an accuracy stays an accuracy"
    assert mean_and_band([0.5]) == (0.5, None), "one seed says nothing of the spread"
    with pytest.raises(ValueError, match="one to 5"):
        mean_and_band([])


def test_the_record_holds_every_kind_with_every_seed(recorded) -> None:
    assert list(recorded["models"]) == list(KINDS) and recorded["seeds"] == list(SEEDS)
    assert {(run["model"], run["seed"]) for run in recorded["runs"]} == {(k, s) for k in KINDS for s in SEEDS}
    assert recorded["settings"] == json.loads(json.dumps(Settings().__dict__)), "the settings in the code made it"


@pytest.mark.parametrize("name", KINDS)
def test_recorded_bytes_are_those_of_the_spec(recorded, name) -> None:
    row, spec = recorded["models"][name], RecallModel(KINDS[name]).spec()
    assert row["pattern"] == KINDS[name].pattern and row["state_bytes"] == spec.state_bytes
    for pairs, cell in row["loads"].items():
        assert cell["kv_bytes"] == spec.bytes_at(tokens_of(int(pairs)))


@pytest.mark.parametrize("name", KINDS)
def test_kept_weights_score_what_the_record_says(recorded, name) -> None:
    """On the recorded sequences nearly exactly, on fresh ones within what so many queries can differ by chance."""
    pairs, sequences = 16, 64
    model = show.load(name)
    said = recorded["models"][name]["loads"][str(pairs)]["accuracy"][KEPT_SEED]
    again = score(model, pairs, seed=KEPT_SEED, sequences=256)
    assert again == pytest.approx(said, abs=2e-3)  # another processor may turn a near-tie
    # answers within a sequence are not independent: five standard errors, a sequence counted as one observation
    margin = 5 * (max(said * (1 - said), 0.01) / sequences) ** 0.5
    assert show.accuracy(name, pairs, seed=11, sequences=sequences) == pytest.approx(said, abs=margin)


def test_what_the_chapter_says_of_the_record(recorded) -> None:
    """Relations, not figures: attention answers every load, a window and a small state do not, one layer is enough."""
    at = {name: row["loads"]["32"] for name, row in recorded["models"].items()}
    assert at["mha"]["mean"] > 0.95
    assert at["window"]["mean"] < at["mha"]["mean"] - 0.3
    assert at["mamba2"]["mean"] < at["mha"]["mean"]
    assert at["hybrid_1_7"]["kv_bytes"] < at["hybrid_1_3"]["kv_bytes"] < at["hybrid_1_1"]["kv_bytes"]
    assert at["hybrid_1_1"]["kv_bytes"] < at["mha"]["kv_bytes"]


def test_the_kept_weights_are_small() -> None:
    files = list((results_dir() / "mqar_models").glob("*.safetensors"))
    assert {path.stem for path in files} == set(KINDS)
    assert sum(path.stat().st_size for path in files) < 3_000_000


def test_rows_of_the_table_are_those_of_the_record_fewest_bytes_first(recorded) -> None:
    rows = show.rows(recorded, 32)
    assert [row[2] for row in rows] == sorted(cell["loads"]["32"]["kv_bytes"] for cell in recorded["models"].values())
    by_label = {row[0]: row for row in rows}
    for model in recorded["models"].values():
        assert by_label[model["label"]][3] == model["loads"]["32"]["mean"]
        assert by_label[model["label"]][5] <= recorded["settings"]["steps"]
