"""How many parameters a model has and how many of them a decode step reads. Standard library only."""

from kvlab.specs.weights.count import count
from kvlab.specs.weights.result import WeightCount, expected_distinct_experts

__all__ = ["WeightCount", "count", "expected_distinct_experts"]
