"""Parity: kvlab's logits against transformers' on a small random model of any config.

shrink   the config made small, every mechanism still at work
weights  random weights under which every mechanism counts
notes    where transformers differs, and what was followed
oracle   transformers' whole-prefill logits
plain    the plain forward in its place, for families of our own
paging   sequences in pages, without a scheduler
compare  prefill, decode, chunked prefill, ragged batch
mutate   each fact changed alone: parity must fail
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvlab.lab.parity import compare, mutate
from kvlab.lab.parity.notes import notes
from kvlab.lab.parity.oracle import Oracle
from kvlab.lab.parity.plain import NATIVE, PlainOracle
from kvlab.lab.parity.shrink import Shrunk, shrink
from kvlab.lab.parity.weights import first_eps, randomize
from kvlab.models.facts import ModelConfig
from kvlab.models.load import from_state_dict


@dataclass(frozen=True)
class Report:
    """What parity found for one config and seed.

    Attributes:
        shrunk: the small config and how it came to be.
        seed: of weights and prompts.
        entropy_fraction: mean attention entropy over its maximum, under a half; None for a model without attention.
        modes: error of each way of running.
        mutations: (what was changed, error of whole prefill, tolerance); empty unless asked for.
        notes: where transformers differs from itself or from kvlab, and which of them was followed.
    """

    shrunk: Shrunk
    seed: int
    entropy_fraction: float | None
    modes: tuple[compare.ModeResult, ...]
    mutations: tuple[compare.ModeResult, ...] = field(default=())
    notes: tuple[str, ...] = field(default=())

    @property
    def unseen(self) -> tuple[str, ...]:
        """Mutations that parity did not notice."""
        return tuple(m.mode for m in self.mutations if not m.seen)

    @property
    def passed(self) -> bool:
        """Every mode within tolerance, every mutation outside."""
        return all(m.passed for m in self.modes) and not self.unseen

    def to_json(self) -> dict[str, Any]:
        """The report as `kvlab parity --json` prints it."""
        return {
            "model_type": self.shrunk.config["model_type"],
            "seed": self.seed,
            "passed": self.passed,
            "max_error": max(m.error for m in self.modes),
            "tolerance": self.modes[0].tolerance,
            "attention_entropy_fraction": self.entropy_fraction,
            "modes": [{"mode": m.mode, "error": m.error, "passed": m.passed} for m in self.modes],
            "mutations": [{"change": m.mode, "error": m.error, "seen": m.seen} for m in self.mutations],
            "notes": list(self.notes),
            "kept_layers": list(self.shrunk.kept_layers),
            "changes": [{"field": n, "old": a, "new": b} for n, a, b in self.shrunk.changes],
        }


def run_parity(config: dict[str, Any], *, seed: int = 0, all_layers: bool = False, mutations: bool = False) -> Report:
    """Parity of kvlab with transformers on a small random model of `config`, a parsed config.json.

    Raises:
        ValueError: the engine does not run this architecture.
    """
    small = shrink(config, all_layers=all_layers)
    facts = ModelConfig.from_hf(small.config)
    native = small.config["model_type"].startswith(NATIVE)
    oracle = PlainOracle(small.config) if native else Oracle(small.config)
    texts = compare.prompts(seed)
    entropy = randomize(oracle, first_eps(facts), seed, texts[0])
    wanted = [oracle.logits(ids) for ids in texts]
    model = from_state_dict(small.config, oracle.state())
    found = []
    if mutations:
        state = dict(model.decoder.weights.named)
        for change, mutant in mutate.mutants(facts, state):
            got = compare.whole_prefill(mutate.mutated(model, mutant), texts)[0]
            found.append(compare.ModeResult(change, compare.error(got, wanted[0]), compare.tolerance_of(model)))
        found += compare.forgetful(model, texts, wanted[0])
    return Report(small, seed, entropy, compare.compare(model, texts, wanted), tuple(found), notes(small.config, facts))
