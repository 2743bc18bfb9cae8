"""The formats that quantize groups of tokens: which module encodes and decodes the groups of each."""

from __future__ import annotations

from types import ModuleType

from kvlab.quant import kivi, kvquant
from kvlab.specs.grouped import ClosedGroups

_MODULES = {"kivi4": kivi, "kivi2": kivi, "kvquant3": kvquant}
BEFORE_ROTATION = ("kvquant3",)
"""Formats whose keys are turned back before they are encoded."""


def codec_of(part: ClosedGroups) -> ModuleType:
    """The module with `encode(key, value, part)` and `decode(segments, part)` for the groups of `part`."""
    return _MODULES[part.format.name]
