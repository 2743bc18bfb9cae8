"""The engine: storage, runner, sampler and the step loop that joins them with scheduler and cache."""

from kvlab.engine.engine import Completion, Engine, EngineOptions
from kvlab.engine.storage import KVUse
from kvlab.engine.stream import Piece
from kvlab.schedule import Output, SamplingParams

__all__ = ["Completion", "Engine", "EngineOptions", "KVUse", "Output", "Piece", "SamplingParams"]
