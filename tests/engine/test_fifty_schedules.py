"""Fifty random schedules for every kind of cache, everything on at once: each request gets the tokens it gets alone.

Prefixes, chunks, preemption both ways, tiers down to the disk with late copies, pages that wait re-encoded, drafts,
adapters, steps back, aborts; exactly, in fp64. Engines run with `check`: invariants after each step, NaN in every page
nobody holds.
"""

import pytest
from kinds import KINDS, kind
from schedules import Ask, Schedule, check, run

HAPPENS = ("hit", "save", "preempt", "swap_out", "swap_in", "right draft", "wrong draft", "abort", "part of a prompt")


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("name", KINDS)
def test_fifty_schedules(name, seed):
    seen = check(name, seed, 50)
    packed = any(hasattr(part, "format") for _, part in kind(name).model.spec.parts())
    # what other seeds draw need not bring all of it about
    assert seed or not [what for what in (*HAPPENS, *["compress"] * packed) if not seen[what]]


FAULTS = {
    "a swap beside a copy": (
        lambda s: s.preempt == "swap" and s.tiers and s.looks and any(a.then == "preempt" for a in s.asks),
        lambda s: Schedule("full", (Ask(then="preempt"),), preempt="swap", tiers=s.tiers, looks=s.looks),
    ),
    "two of one text, the second long enough": (
        lambda s: any(a.text == b.text and b.tokens > 2 for i, b in enumerate(s.asks) for a in s.asks[:i]),
        lambda s: Schedule("full", (Ask(s.asks[0].text), Ask(s.asks[0].text, tokens=3))),
    ),
    "any": (lambda s: True, lambda s: Schedule("full")),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_schedule_that_fails_is_shrunk_to_what_makes_it_fail(name):
    """Planted faults that need two or three things to meet: nothing else is left, and it is printed as Python."""
    fault, core = FAULTS[name]

    def faulty(schedule):
        assert not fault(schedule), "planted"
        return {}

    with pytest.raises(AssertionError, match="planted") as found:
        check("full", 0, 50, faulty)
    [line] = [line for line in str(found.value).splitlines() if line.startswith("run(")]
    [drawn_line] = [line for line in str(found.value).splitlines() if line.startswith("as drawn: ")]
    first, small = (eval(text, {"Schedule": Schedule, "Ask": Ask}) for text in (drawn_line[10:], line[4:-1]))
    assert fault(first) and small == core(small)


def test_a_page_that_is_reused_while_a_copy_reads_it_is_found_and_shrunk(monkeypatch):
    """The engine itself with a fault: copies pin nothing. One request that is swapped out is left."""
    monkeypatch.setattr("kvlab.cache.pins.Pins.pin", lambda self, pages: None)
    monkeypatch.setattr("kvlab.cache.pins.Pins.unpin", lambda self, pages: None)
    with pytest.raises(AssertionError) as found:
        check("linear", 0, 50)
    [line] = [line for line in str(found.value).splitlines() if line.startswith("run(")]
    small = eval(line[4:-1], {"Schedule": Schedule, "Ask": Ask})
    assert small.tiers and len(small.asks) == 1, line
    with pytest.raises(AssertionError):
        run(small)
