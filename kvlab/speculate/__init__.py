"""Speculation: drafts from a text's own past, a smaller model or trained heads, verified by one rule."""

from kvlab.speculate.draft import Draft, Proposer
from kvlab.speculate.options import SpeculationOptions

__all__ = ["Draft", "Proposer", "SpeculationOptions"]
