"""The access viewer tells what an interpreted decode read: live tokens, each byte once, in the table's order."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is for Linux only")

from kvlab.lab.kernel_access import Example, recorded


def test_every_live_byte_is_read_once_in_the_order_of_the_table() -> None:
    example = Example()
    found = recorded(example)
    row = 2 * example.dim
    for head in range(2):
        for segment in ("k", "v"):
            mine = [a for a in found if a["segment"] == segment and a["head"] == head]
            assert [a["page"] for a in mine] == [5, 2, 7, 3]
            assert [a["slots"] for a in mine] == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0]]
            assert sum(a["bytes"] for a in mine) == 13 * row
            # a tile's rows are tokens of 16 values: token t begins at lane 16 * t, whichever page it is in
            assert [a["lanes"] for a in mine] == [[0, 16, 32, 48], [64, 80, 96, 112], [128, 144, 160, 176], [192]]
            assert [a["first"] for a in mine] == [mine[0]["first"]] * 4
    assert [a["order"] for a in found] == list(range(len(found)))
    assert {tuple(a["program"]) for a in found} == {(0, 0, 0), (1, 0, 0)}


def test_a_window_and_splits_leave_pages_alone() -> None:
    """A window of 6 of 13 tokens begins in the second page; splits of 8 tokens are two programs a head."""
    found = recorded(Example(window=6, split=8, kv_heads=1, heads=1, fmt="int8"))
    keys = [a for a in found if a["segment"] == "k"]
    assert [(a["program"][1], a["page"], a["slots"]) for a in keys] == [(0, 2, [3]), (1, 7, [0, 1, 2, 3]), (1, 3, [0])]
    assert {a["segment"] for a in found} == {"k", "v", "k_scale", "v_scale"}
    # tiles begin at multiples of their length, wherever a split does: token 7 is lane 7 of scales, 112 of 16 values a token
    assert [a["lanes"] for a in keys] == [[112], [128, 144, 160, 176], [192]]
    assert [a["lanes"] for a in found if a["segment"] == "k_scale"] == [[7], [8, 9, 10, 11], [12]]
