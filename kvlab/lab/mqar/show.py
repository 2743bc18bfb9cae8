"""What a chapter asks of the experiment: the record, a trained model, and its accuracy scored again."""

from __future__ import annotations

from typing import Any

from kvlab.lab.mqar.models import KINDS, RecallModel
from kvlab.lab.mqar.train import score

RECORD = "mqar"


def results() -> dict[str, Any]:
    """The recorded experiment, with its provenance.

    Raises:
        FileNotFoundError: nothing is recorded.
    """
    from kvlab.book.results import load_result

    return load_result(RECORD)


def rows(result: dict[str, Any], pairs: int) -> list[list[Any]]:
    """A table's rows, fewest bytes first: label, pattern, bytes of a sequence, accuracy, its band, most steps, seeds.

    Accuracies are fractions; the band is None where a single seed is recorded.
    """
    found = []
    for row in result["models"].values():
        cell = row["loads"][str(pairs)]
        steps, seeds = max(row["steps"]), len(row["seeds"])
        found.append([row["label"], row["pattern"], cell["kv_bytes"], cell["mean"], cell["band95"], steps, seeds])
    return sorted(found, key=lambda entry: entry[2])


def load(name: str) -> RecallModel:
    """The trained model of kind `name`, seed 0, from its recorded weights.

    Raises:
        ValueError: no such kind.
        FileNotFoundError: its weights are not recorded.
    """
    from safetensors.torch import load_file

    from kvlab.book.results import results_dir

    if name not in KINDS:
        raise ValueError(f"kind {name!r}: must be one of {', '.join(KINDS)}")
    path = results_dir() / f"{RECORD}_models" / f"{name}.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"kind {name!r}: no weights recorded at {path}")
    model = RecallModel(KINDS[name])
    model.load_state_dict({key: value.float() for key, value in load_file(path).items()})
    return model.eval().requires_grad_(False)


def accuracy(checkpoint: str, pairs: int, seed: int = 7, sequences: int = 128) -> float:
    """The accuracy of a recorded model on fresh sequences of `pairs` pairs, computed now, in a second or two.

    Seeds 0 to 2 drew the recorded scores; any other draws sequences that no record has seen.
    """
    return score(load(checkpoint), pairs, seed=seed, sequences=sequences)
