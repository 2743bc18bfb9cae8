"""What a computed claim may ask of kvlab: a row `{call = name, ...arguments}` names one of these functions.

Each calls the planner, the specs or the counts; none has a formula of its own beyond a ratio, a difference and a
comparison of other checks.
"""

from kvlab.book.claims.checks import mechanisms, memory, plans, prefixes, relations, shapes
from kvlab.book.claims.checks.registry import CHECKS, Value, describe, run

__all__ = ["CHECKS", "Value", "describe", "mechanisms", "memory", "plans", "prefixes", "relations", "run", "shapes"]
