"""A trace of requests through the real scheduler and cache on a machine that is not here. Standard library only."""

from kvlab.simulate.clock import Machine, StepClock
from kvlab.simulate.options import SimulateOptions
from kvlab.simulate.simulator import Simulation, Simulator, simulate
from kvlab.simulate.summary import Objective
from kvlab.simulate.synthetic import Recipe, parse_recipe, synthetic
from kvlab.simulate.trace_files import parse_trace, read_trace
from kvlab.simulate.traces import Trace, TraceRequest

__all__ = [
    "Machine",
    "Objective",
    "Recipe",
    "SimulateOptions",
    "Simulation",
    "Simulator",
    "StepClock",
    "Trace",
    "TraceRequest",
    "parse_recipe",
    "parse_trace",
    "read_trace",
    "simulate",
    "synthetic",
]  # fmt: skip
