"""From bytes to capacity to time, for any model on any GPU: `make_plan`. Standard library only."""

from __future__ import annotations

from typing import Any

__all__ = ["Plan", "make_plan"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from kvlab.plan import plan

        return getattr(plan, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
