"""A streamed event is one line for every client, also for those that split where Python does."""

from __future__ import annotations

import json

from kvlab.serve.answers import _event


def test_event_is_one_line_of_ascii_whatever_the_text() -> None:
    text = "".join(map(chr, [*range(0x20), 0x7F, 0x85, 0x2028, 0x2029, 0x4E2D, 0x1F600]))
    event = _event({"text": text})
    assert event.isascii() and len(event.splitlines()) == 2 and event.endswith("\n\n")
    assert json.loads(event[6:])["text"] == text
