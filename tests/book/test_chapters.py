"""The rules that every chapter keeps, and that the checks see a chapter which breaks them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))  # tools import each other
CHAPTERS = sorted((ROOT / "chapters").glob("*.ipynb"))
HIDDEN_CELLS = 0  # cells tagged skip-execution or raises-exception, in all chapters together


def tool(name: str):
    """A module of tools/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


checks, hidden, numbers = tool("check_chapters"), tool("check_hidden"), tool("page_numbers")


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def text(source: str) -> dict:
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def code(source: str, **more: object) -> dict:
    return {"cell_type": "code", "metadata": {}, "source": source, "outputs": [], "execution_count": None, **more}


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_chapter_keeps_the_rules(path) -> None:
    assert checks.check(read(path)) == []


def test_no_cell_is_hidden_from_execution() -> None:
    found = [line for path in CHAPTERS for line in hidden.hidden_failures(read(path))]
    assert len(found) == HIDDEN_CELLS, found


def test_every_page_of_the_contents_exists_and_every_chapter_is_in_them() -> None:
    contents = (ROOT / "_toc.yml").read_text(encoding="utf-8")
    listed = [line.split("file:")[1].strip() for line in contents.splitlines() if "file: chapters/" in line]
    assert listed == [f"chapters/{p.stem}" for p in CHAPTERS]


@pytest.mark.parametrize(
    ("prose", "count"),
    [
        ("The cache takes 320 KiB per token.", 1),
        ("It is 2.5x faster and 40% smaller.", 2),
        ('It takes <span data-n="a">320 KiB</span> per token.', 0),
        ('It takes <span data-n="a">320 KiB</span>, not 64 KiB.', 1),
        ('It takes <span data-n="b">320 KiB</span>.', 1),
        ("`320 KiB` in code and $2 \\times 3$ in a formula, section 5, chapter 6.", 0),
        ("> The paper reports 3x.\n> Kwon et al., 2023.\n", 0),
        ("> The paper reports 3x.\n", 1),
        ("```{exercise} Size it\nA model has 32 layers.\n```", 0),
        ("```{note}\nIt has 32 layers.\n```", 1),
    ],
)
def test_numbers_in_prose_are_found(prose, count) -> None:
    cells = [text(prose), code('book.bound("a", "320 KiB", human_bytes(n))')]
    assert len(list(checks.unbound_numbers(cells))) == count


def test_the_checks_see_each_broken_rule() -> None:
    long_cell = "\n".join(["x = 1"] * 16)
    cells = [
        text("# Title"), text("word " * 2501), code(long_cell), code("y = 2", outputs=[{"output_type": "stream"}]),
        code('book.compare("early", 1)'), code('book.predict("late", "?", 1)'),
    ]  # fmt: skip
    found = "\n".join(checks.check({"cells": cells, "metadata": {}}))
    for said in (
        "2502 words",
        "16 lines",
        "has outputs",
        "three cells in a row",
        "'early' is compared without",
        "'late' is never",
    ):
        assert said in found


ASK = 'book.predict("a", "How many?", 3)'
EARLY = "cell 1: 'a' is asked after it was measured"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("x = 1", "run = measure(x)\nbook.compare('a', run.share)", None),
        ("import counts", "book.compare('a', counts.steps(8))", None),  # computed by the cell itself
        ("def steps(n):\n    return n", "book.compare('a', steps(8))", None),
        ("run = measure()", "book.compare('a', run.share)", EARLY),
        ("run = measure()", "book.compare('a', 100 * round(run.total('x'), 2))", EARLY),
        ("for run in measured:\n    show(run)", "book.compare('a', max(run))", EARLY),
        ("found = {}\nfound['x'] = 3", "book.compare('a', found['x'])", EARLY),
        (
            "engine = Engine()",
            "engine.step()\nbook.compare('a', engine.steps)",
            None,
        ),  # changed in place, then compared
        ("found = {}", "found['x'] = 3\nbook.compare('a', found['x'])", None),
        # another name for what was there is no measurement; a call of a function is one
        ("run = measure()", "share = 100 * run.total('x')\nbook.compare('a', share)", EARLY),
        ("run = measure()", "first, *_ = sorted(run)\nlow = round(first, 1)\nbook.compare('a', low)", EARLY),
        ("model = small()", "run = measure(model)\nbook.compare('a', run.share)", None),
        ("model = small()", "share = traffic.send(model)['hits']\nbook.compare('a', share)", None),
        ("engine = Engine()", "done = engine.generate([1])\nbook.compare('a', done.steps)", None),
    ],
)
def test_a_prediction_is_asked_before_its_value_is_measured(before, after, said) -> None:
    cells = [
        code(before),
        code(ASK),
        code(after),
        code('book.predict("b", "?", 1)'),
        code("y = 1\nbook.compare('b', y)"),
    ]
    found = list(checks.unpredicted(cells))
    assert [line.split(" (")[0] for line in found] == [said] * (said is not None)


def executed(source: str, *htmls: str) -> dict:
    outputs = [{"output_type": "display_data", "data": {"text/html": h, "text/plain": h}} for h in htmls]
    return code(source) | {"outputs": outputs}


@pytest.mark.parametrize(
    ("heading", "shown", "told"),
    [
        ("## One", "81.6 %", 1),
        ("## One", "181.6 or 81.65 or 81.6.2", 0),  # another number
        ("## One", "82 %", 0),
        ("# Chapter", "81.6 %", 0),  # another section: chance
    ],
)
def test_a_result_that_is_told_before_it_is_asked_for_is_seen(heading, shown, told) -> None:
    box = '<input type="text" size="10" data-kv-predict="a"></label> %'
    result = 'Predicted 10%, found 81.6%: off.<span data-kv-guess="a"></span>'
    cells = [text("# Chapter"), text(heading), executed("x", shown), text("## Two" if heading[1] != "#" else "So?"),
             executed(ASK, box), executed("book.compare('a', y)", result)]  # fmt: skip
    assert len(list(checks.told_before(cells))) == told


@pytest.mark.parametrize(
    ("alt", "typed"),
    [
        ('"Half of an H100 and 40 GiB"', 2),
        ('"Eightfold, then two to four times"', 3),
        ('f"A line from {low:.1f} to {high:.0f} at 128k"', 0),
        ('f"A line from {low:.1f} to 70"', 1),
        ('"Llama-3.1 70B and FP8 in 2024, batch 8, at 4k: v0.1 goes flat"', 0),
        ('"A line that falls"', 0),
    ],
)
def test_figures_typed_into_an_alt_text_are_found(alt, typed) -> None:
    assert len(list(checks.typed_alts([code(f"book.show(fig, alt={alt}, caption='c')")]))) == typed


@pytest.mark.parametrize("tag", ["skip-execution", "raises-exception"])
def test_hiding_tags_and_settings_are_seen(tag) -> None:
    cell = code("1/0") | {"metadata": {"tags": [tag]}}
    assert list(hidden.hidden_failures({"cells": [cell], "metadata": {"execution": {"allow_errors": True}}})) == [
        "metadata: allow_errors",
        f"cell 0: tag {tag}",
    ]


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("!false", "'!false' is no Python"),
        ("x = 1\nfound = !ls", "'found = !ls' is no Python"),
        ("%%bash\nfalse", "'%%bash' is no Python"),
        ("for x in y:\n    %timeit x", "'%timeit x' is no Python"),
        ("import asyncio\nasyncio.create_task(fails())", "create_task() is a task that nobody awaits"),
        ("asyncio.ensure_future(fails())", "ensure_future() is a task that nobody awaits"),
        ("pool.submit(fails)", "submit() is a future that nobody asks"),
        ("get_ipython().system('false')", "get_ipython() is IPython's own calls"),
        ("import os; os.system('false')", "system() is a shell command"),
        ("subprocess.run(['false'])", "subprocess.run() without check=True"),
        ("subprocess.run(['false'], check=False)", "subprocess.run() without check=True"),
        ("subprocess.run(['false'], check=True)\nx = 5 % 3 != 1\nawait works()", None),
    ],
)
def test_code_whose_failure_nobody_would_see_is_found(cell, said) -> None:
    found = list(hidden.hidden_failures({"cells": [text("!text"), code(cell)], "metadata": {}}))
    assert bool(found) == (said is not None)
    assert not found or any(line.startswith(f"cell 1: {said}") for line in found)


def test_no_number_with_a_unit_is_typed_into_a_text_page() -> None:
    assert list(numbers.typed()) == []


def test_a_typed_number_in_a_text_page_is_found_and_a_named_one_is_computed(tmp_path, monkeypatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("It takes 13 MB and {{ chapter_words }} words, `8 GB` in code.")
    monkeypatch.setattr(numbers, "pages", lambda: [page])
    assert [(path.name, line) for path, line in numbers.typed()] == [("page.md", "'13 MB' is bound to no cell")]
    counts = [checks.words(read(path)["cells"]) for path in CHAPTERS]
    low, high = (int(n.replace(",", "")) for n in numbers.filled("{{chapter_words}}").split(" to "))
    assert abs(low - min(counts)) <= 50 and abs(high - max(counts)) <= 50
    assert numbers.filled("in {{default_weight_bits}}") == "in 4 bits"
    with pytest.raises(ValueError, match="no such number"):
        numbers.filled("{{ nonsense }}")


def test_a_second_run_in_the_same_kernel_is_compared_cell_by_cell() -> None:
    twice = tool("run_twice")
    cells = [text("# Title"), code("x = 1") | {"id": "a"}, code("print(x)") | {"id": "b"}]
    made = twice.doubled({"cells": cells, "metadata": {}})["cells"]
    assert [c["source"] for c in made] == ["x = 1", "print(x)"] * 2 and len({c["id"] for c in made}) == 4
    for cell, said in zip(made, ("<x at 0x7f8b>", "16 pages", "<x at 0x7f90>", "17 pages"), strict=True):
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": [said + "\n"]}]
    assert list(twice.other_numbers({"cells": made})) == ["code cell 1: '16 pages', then '17 pages'"]


def test_cleaning_removes_what_execution_leaves() -> None:
    cell = code("1") | {
        "outputs": [{}],
        "execution_count": 3,
        "metadata": {"execution": {"t": 1}, "tags": ["hide-input"]},
    }
    clean = tool("clean_chapters").cleaned({"cells": [cell], "metadata": {"widgets": {}}})
    assert clean["cells"] == [code("1") | {"metadata": {"tags": ["hide-input"]}}] and "widgets" not in clean["metadata"]
