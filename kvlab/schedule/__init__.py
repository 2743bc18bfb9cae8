"""Who computes which tokens in which step: request, scheduler, events. Standard library only, no clock inside."""

from kvlab.schedule.events import Event, EventLog
from kvlab.schedule.policy import SchedulingPolicy, SwapCosts, Victim
from kvlab.schedule.request import Request, SamplingParams
from kvlab.schedule.scheduler import Scheduler
from kvlab.schedule.spared import SparedTokens
from kvlab.schedule.step import Chunk, Limits, Output, Step, Verified

__all__ = [
    "Chunk",
    "Event",
    "EventLog",
    "Limits",
    "Output",
    "Request",
    "SamplingParams",
    "Scheduler",
    "SchedulingPolicy",
    "SparedTokens",
    "Step",
    "SwapCosts",
    "Verified",
    "Victim",
]
