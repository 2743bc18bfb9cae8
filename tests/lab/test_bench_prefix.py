"""The benchmark's record, and exactly what can be counted instead of timed."""

import random

import pytest

from kvlab.cache.prefix import DESIGNS
from kvlab.cli import main
from kvlab.lab import bench_prefix
from kvlab.lab.bench_prefix import PHASES, count_operations, manager, run_bench, serve, text
from kvlab.schedule import Request, SamplingParams


@pytest.mark.parametrize("design", DESIGNS)
def test_work_per_page_does_not_grow_with_the_pool(design):
    """The lines of Python that a new prompt, a known one, and evictions take: the same over 200 and 20,000 pages."""
    rng = random.Random(1)
    short, long = text(rng, 320), text(rng, 640)
    found = []
    for pages in (200, 20_000):
        cache, others = manager(design, pages), random.Random(2)
        for i in range(pages // 25):
            serve(cache, f"old {i}", text(others, 400))
        assert not cache.num_free
        found.append([
            count_operations(lambda cache=cache: serve(cache, "a", short)),
            count_operations(lambda cache=cache: serve(cache, "b", long)),
            count_operations(lambda cache=cache: serve(cache, "c", long)),
        ])  # fmt: skip
    assert found[0] == found[1]
    new_short, new_long, known = found[0]
    per_page = (new_long - new_short) / 20
    assert known < new_long and per_page < 120


def test_a_look_up_in_the_tree_does_nothing_for_each_page():
    """A known prompt is compared, and its pages are told, by as many lines of Python whatever its length; one that
    leaves a known one in the middle is followed there by halving."""
    rng, cache = random.Random(3), manager("radix", 2000)
    long = text(rng, 4096)
    serve(cache, "before", long)

    def lines(tokens):
        found = []
        request = Request("again", tokens, SamplingParams())
        count = count_operations(lambda: found.append(cache.match(request)))
        return found[0].tokens, count

    (few, short), (many, whole) = lines(long[:161]), lines(long)
    assert (few, many) == (160, 4080) and short == whole
    for same in (1, 100, 254):
        left = long[: 16 * same] + text(rng, 4096 - 16 * same)
        known, halved = lines(left)
        assert known == 16 * same and halved < whole + 5 * 9, "2 ** 8 pages take 8 steps of a few lines"


def test_the_record_names_what_was_measured(monkeypatch):
    # the device's name alone takes an import of torch
    monkeypatch.setattr(bench_prefix, "provenance", lambda command, packages: {"command": command})
    record = run_bench(repeats=1, cached=(8192, 16_384))
    assert [(row["design"], row["cached_tokens"]) for row in record["rows"]] == [
        ("hash", 8192), ("hash", 16_384), ("radix", 8192), ("radix", 16_384)]  # fmt: skip
    for row in record["rows"]:
        assert row["bare"] > 0 and set(row["new"]) == {*PHASES, "total"}
        assert set(row["known"]) == {*PHASES, "total"}
    assert set(record["ratios"]) == {f"{d} {what}" for d in DESIGNS for what in ("against the bare chain", "growth")}
    assert "hash growth" in bench_prefix.report(record) and record["command"] == "kvlab bench prefix --json"


def test_the_command_knows_both_benchmarks(capsys):
    assert main(["bench", "nothing"]) == 2
    assert "engine" in capsys.readouterr().err
