"""Who computes which tokens in which step: request, scheduler, events. Standard library only, no clock inside."""

from kvlab.schedule.events import Event, EventLog
from kvlab.schedule.request import Request, SamplingParams
from kvlab.schedule.scheduler import Chunk, Limits, Output, Scheduler, Step, Verified

__all__ = [
    "Chunk",
    "Event",
    "EventLog",
    "Limits",
    "Output",
    "Request",
    "SamplingParams",
    "Scheduler",
    "Step",
    "Verified",
]
