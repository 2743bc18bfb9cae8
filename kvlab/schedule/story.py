"""A story: a few requests given beforehand, run by the real scheduler and cache with tokens that nobody computed.

`story_state(params)` is what the step-through widget shows, in a kernel and in the reader's browser alike: the block
pool, the tables, the free list and the queue after every step. Only the model is missing, so a token's id says no more
than whose it is: token p of request k is p when it belongs to the shared beginning, else 1000 * (k + 1) + p.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kvlab.cache import KVCacheManager
from kvlab.cache.prefix import DESIGNS, PrefixOptions
from kvlab.schedule.events import EventLog
from kvlab.schedule.policy import SchedulingPolicy
from kvlab.schedule.request import Request, SamplingParams
from kvlab.schedule.scheduler import Limits, Scheduler
from kvlab.schedule.snapshots import Recorder, recording
from kvlab.specs.formats import get_format
from kvlab.specs.layout import group_parts
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import Attention, SlidingWindow
from kvlab.specs.settings import over_defaults, whole_number

MOST_STEPS = 300
NAMES = "ABCDEFGH"
CHOICES = {
    "layers": ("full", "window", "both"), "prefix": ("off", *DESIGNS), "order": ("fcfs", "longest_prefix"),
    "victim": ("last", "least_progress", "cheapest"),
}  # fmt: skip

DEFAULTS: dict[str, Any] = {
    "block_size": 4, "pages": 12, "budget": 16, "max_seqs": 4, "layers": "full", "window": 8,
    "prefix": "off", "order": "fcfs", "victim": "last",
    "requests": [[9, 7, 0, 0], [6, 8, 0, 0], [14, 5, 2, 0]],
}  # fmt: skip
"""The settings of a story. A request is [prompt tokens, new tokens, arrival (steps before it), shared tokens]."""

RANGES = {"block_size": (1, 64), "pages": (1, 200), "budget": (1, 512), "max_seqs": (1, 8), "window": (1, 512)}
REQUEST_RANGES = (("prompt", 1, 500), ("new tokens", 1, 100), ("arrives", 0, 200), ("shared", 0, 500))

STORIES: dict[str, dict[str, Any]] = {
    "three requests": {},
    "six blocks, one comes back": {
        "pages": 6, "budget": 18, "requests": [[11, 1, 0, 0], [7, 3, 0, 0], [7, 2, 1, 0]],
    },
    "the pool runs out": {"pages": 8, "requests": [[9, 10, 0, 0], [8, 10, 0, 0], [7, 6, 1, 0]]},
    "a window gives pages back": {"layers": "window", "requests": [[14, 16, 0, 0], [6, 14, 3, 0]]},
    "layers of both kinds": {"layers": "both", "requests": [[14, 12, 0, 0], [6, 10, 3, 0]]},
    "a shared beginning": {"prefix": "hash", "requests": [[13, 4, 0, 12], [15, 3, 2, 12], [18, 2, 7, 12]]},
    "a tree of beginnings": {
        "prefix": "radix", "pages": 16, "requests": [[14, 3, 0, 12], [14, 3, 2, 8], [17, 2, 4, 12], [9, 2, 7, 8]],
    },
    "kept pages make room": {
        "prefix": "radix", "pages": 7, "requests": [[13, 3, 0, 12], [14, 4, 4, 0], [13, 3, 9, 12]],
    },
    "one long prompt, in chunks": {"budget": 8, "pages": 16, "requests": [[5, 9, 0, 0], [30, 4, 1, 0]]},
}  # fmt: skip
"""Named stories: what each changes of `DEFAULTS`."""


def story_params(params: dict[str, Any]) -> dict[str, Any]:
    """`params` over the defaults.

    Raises:
        ValueError: an unknown setting, or one out of its range; it is named.
    """
    found = over_defaults(DEFAULTS, params)
    for name, (low, high) in RANGES.items():
        found[name] = whole_number(name, found[name], low, high)
    for name, known in CHOICES.items():
        if found[name] not in known:
            raise ValueError(f"{name} {found[name]!r}: must be one of {', '.join(known)}")
    requests = found["requests"]
    if not isinstance(requests, list) or not 1 <= len(requests) <= len(NAMES):
        raise ValueError(f"requests: must be a list of 1 to {len(NAMES)}")
    found["requests"] = [_request_numbers(NAMES[k], row) for k, row in enumerate(requests)]
    return found


def _request_numbers(name: str, row: Any) -> list[int]:
    if not isinstance(row, list | tuple) or len(row) != len(REQUEST_RANGES):
        raise ValueError(f"request {name}: must be {', '.join(label for label, _, _ in REQUEST_RANGES)}")
    numbers = [whole_number(f"{label} of request {name}", value, low, high)
               for value, (label, low, high) in zip(row, REQUEST_RANGES, strict=True)]  # fmt: skip
    if numbers[3] > numbers[0]:
        raise ValueError(f"shared of request {name} {numbers[3]}: must be at most its prompt, {numbers[0]}")
    return numbers


def story_state(params: dict[str, Any]) -> dict[str, Any]:
    """The story that `params` tells, as JSON data.

    Returns:
        `params` as used, `groups` ([name, tokens per page, "all" or "window", its size] each), `pools` (pages of each,
        the null page not counted), `snapshots` (see `kvlab.schedule.snapshots`), `counts` of events by kind, and
        `cut`: whether the story goes on behind the last snapshot.

    Raises:
        ValueError: a setting out of its range.
    """
    used = story_params(params)
    scheduler = story_scheduler(used)
    with recording(scheduler, 2 * MOST_STEPS + 1) as recorder:
        run(scheduler, story_requests(used))
    return {"params": used, **recorded_state(recorder)}


def recorded_state(recorder: Recorder) -> dict[str, Any]:
    """What the widget shows of a recording, a real engine's too.

    Raises:
        ValueError: pools of sectors, whose units are not pages.
    """
    cache, counts = recorder.scheduler.cache, recorder.scheduler.events.counts
    if cache.layout.policy == "sectors":
        raise ValueError("pools 'sectors': not shown here, a cell would be a sector and not a page")
    return {
        "groups": [[g.name, g.block_size, g.retention.rule, g.retention.size] for g in cache.groups],
        "pools": [pool.num_blocks - 1 for pool in cache.unit_pools],
        "pool_of": [cache.layout.pool_of(g) for g in range(len(cache.groups))],
        "snapshots": recorder.snapshots,
        "counts": {kind: count for kind, count in counts.items() if count},
        "cut": recorder.full,
    }


def story_scheduler(used: dict[str, Any]) -> Scheduler:
    """The scheduler of a story, over a pool of its size for each kind of layer."""
    fmt = get_format("bf16")
    parts = {"full": [Attention(1, 64, 64, fmt)], "window": [SlidingWindow(1, 64, 64, fmt, window=used["window"])]}
    parts["both"] = parts["full"] + parts["window"]
    layers = tuple(LayerSpec(i, (part,)) for i, part in enumerate(parts[used["layers"]]))
    groups = group_parts(ModelSpec("story", "llama", layers, 64, 1, 10_000), used["block_size"])
    prefix = None if used["prefix"] == "off" else PrefixOptions(design=used["prefix"])
    cache = KVCacheManager(groups, [used["pages"] + 1] * len(groups), used["budget"], prefix=prefix)
    limits = Limits(used["max_seqs"], used["budget"], 1000)
    return Scheduler(cache, limits, EventLog(64), SchedulingPolicy(order=used["order"], victim=used["victim"]))


def story_requests(used: dict[str, Any]) -> list[tuple[int, Request]]:
    """(steps before it arrives, request) of each request, in the order of their arrival."""
    made = []
    for k, (prompt, new, arrives, shared) in enumerate(used["requests"]):
        tokens = [p if p < shared else story_token(k, p) for p in range(prompt)]
        made.append((arrives, Request(NAMES[k], tokens, SamplingParams(max_tokens=new))))
    return sorted(made, key=lambda pair: pair[0])


def story_token(k: int, position: int) -> int:
    """The token of request number k at `position`, behind what it shares."""
    return 1000 * (k + 1) + position


def run(scheduler: Scheduler, arrivals: list[tuple[int, Request]]) -> None:
    """Steps until every request has ended, or `MOST_STEPS` have passed. A refused request is in the events."""
    left = list(arrivals)
    for step_number in range(MOST_STEPS):
        while left and (left[0][0] <= step_number or not scheduler.has_work):
            with suppress(ValueError):  # its event says why
                scheduler.add(left.pop(0)[1], float(step_number))
        if not scheduler.has_work:
            return
        step = scheduler.schedule(float(step_number))
        tokens = [story_token(NAMES.index(c.request.request_id), len(c.request.tokens)) for c in step.sampling]
        scheduler.update(step, tokens, float(step_number))
