"""How long users wait between two tokens when pages move to the tier below and back: a run's events, priced.

The schedule is a real one; what a step and a page's transfer take is given, so that a small model can stand for a large
one. A transfer is taken to hold up its whole step, as a copy on the same stream does.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvlab.schedule.events import Event


def token_gaps(events: Iterable[Event], step_s: float, page_s: float) -> list[float]:
    """Seconds between each token and the request's last one; first tokens have none.

    Args:
        events: of a whole run, in order.
        step_s: what a step takes. page_s: what moving one page takes, out or in.
    """
    moved: dict[int, int] = {}
    tokens: list[tuple[int, str]] = []
    last: dict[str, int] = {}
    for event in events:
        moved.setdefault(event.step, 0)
        if event.kind in ("swap_out", "swap_in"):
            moved[event.step] += event.pages
        elif event.kind == "token":
            tokens.append((event.step, event.request_id))
    ends, clock = {}, 0.0
    for step in range(min(moved, default=0), max(moved, default=-1) + 1):
        clock += step_s + page_s * moved.get(step, 0)
        ends[step] = clock
    gaps = []
    for step, request_id in tokens:
        if request_id in last:
            gaps.append(ends[step] - ends[last[request_id]])
        last[request_id] = step
    return gaps
