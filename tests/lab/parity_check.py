"""What the parity tests share: one config that all families' shapes start from, and the claim itself."""

from __future__ import annotations

from functools import cache
from typing import Any

from kvlab.lab.parity import Report, run_parity

BASE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
MODES = ["whole prefill", "decode", "chunked prefill", "ragged batch", "preempt and resume"]


class Reports:
    """The report of each family of a table, computed once."""

    def __init__(self, families: dict[str, dict[str, Any]], base: dict[str, Any] = BASE) -> None:
        self._of = cache(lambda family: run_parity(base | families[family], seed=3, mutations=True))

    def __call__(self, family: str) -> Report:
        return self._of(family)

    def changes(self, family: str) -> set[str]:
        """What the mutation test changed in `family`."""
        return {m.mode for m in self(family).mutations}


def assert_parity(report: Report) -> None:
    """Every mode within 1e-4 and every changed fact seen: not just outside the tolerance, but far outside."""
    assert report.entropy_fraction < 0.5
    errors = {m.mode: m.error for m in report.modes}
    assert list(errors) == MODES
    assert all(error <= 1e-4 for error in errors.values()), errors
    assert {m.mode: m.error for m in report.mutations if not m.error > 20 * m.tolerance} == {}
    assert report.passed
