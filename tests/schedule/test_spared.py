"""What a prompt was spared is told once, at the first admission, by where it was found; what a log only counts."""

import pytest

from kvlab.schedule import Event, EventLog, SparedTokens


def told(*lines: str) -> list[dict[str, int]]:
    """What each first admission of a script came to; a line is "kind request tokens source"."""
    spared, found = SparedTokens(), []
    for line in lines:
        kind, name, *rest = line.split()
        tokens, reason = int(rest[0]) if rest else 0, f"{rest[1]}: 9 bytes" if rest[1:] else ""
        answer = spared.hear(Event(1, 0.0, kind, name, reason, tokens))
        if answer is not None:
            found.append(answer)
    return found


def test_each_request_once_by_source():
    assert told("arrive a 9", "hit a 8", "admit a 1") == [{"device": 8}]
    assert told("load a 8 host", "load a 4 disk", "admit a 1") == [{"host": 8, "disk": 4}]
    assert told("hit a 8", "hit b 4", "admit b 1", "admit a 1") == [{"device": 4}, {"device": 8}]
    assert told("arrive a 9", "admit a 9") == [{}]


def test_what_is_found_after_a_preemption_is_no_saving():
    assert told("hit a 8", "admit a 1", "preempt a 9", "hit a 9", "admit a 1") == [{"device": 8}]
    # nothing at first, its own pages later
    assert told("admit a 9", "preempt a 9", "hit a 8", "admit a 1") == [{}]


def test_an_id_that_ended_may_come_again():
    assert told("hit a 8", "admit a 1", "finish a 9", "hit a 4", "admit a 1") == [{"device": 8}, {"device": 4}]
    assert told("hit a 8", "finish a 9", "admit a 1") == [{}]


def test_kinds_that_are_only_counted_are_neither_kept_nor_told():
    log, heard = EventLog(4, only_counted=("token",)), []
    log.subscribe(heard.append)
    for kind in ("chunk", "token", "token", "finish"):
        log.emit(Event(1, 0.0, kind, "a"))
    log.count("token")
    assert [e.kind for e in log] == [e.kind for e in heard] == ["chunk", "finish"]
    assert log.total == 5 and (log.counts["token"], log.counts["chunk"]) == (3, 1)
    with pytest.raises(ValueError, match="only_counted 'tokens'"):
        EventLog(4, only_counted=("tokens",))
