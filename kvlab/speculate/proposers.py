"""The proposer that options name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvlab.speculate.options import SpeculationOptions

HEADS = Path(__file__).resolve().parents[2] / "book" / "results" / "heads"
"""Where the trained heads of the default model lie."""


def make_proposer(engine: Any, options: SpeculationOptions) -> Any:
    """The proposer for `engine`.

    Raises:
        ValueError: a drafting model or heads that do not fit.
    """
    if callable(options.method):
        return options.method(engine)
    if options.method == "ngram":
        from kvlab.speculate.ngram import NGramProposer

        return NGramProposer(options.longest)
    if options.method == "draft":
        from kvlab.speculate.model import ModelProposer

        return ModelProposer(engine, options.draft, options.k, options.drawn)
    if options.method == "lookahead":
        from kvlab.speculate.lookahead import LookaheadProposer

        return LookaheadProposer(engine, options)
    from kvlab.speculate.from_heads import EagleProposer, MedusaProposer

    path = Path(options.heads) if options.heads else HEADS / f"{options.method}.safetensors"
    return (MedusaProposer if options.method == "medusa" else EagleProposer)(engine, path, options)
