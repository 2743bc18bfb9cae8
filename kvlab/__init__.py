"""kvlab: the engine and the planner under The KV Cache Lab. Importing it imports nothing heavy."""

__version__ = "0.1.0"
