"""What the chapters share. Nothing here computes a size: that is `kvlab.specs` and `kvlab.plan`.

Conventions a chapter keeps, checked by `tests/book`:

- the first code cell calls `book.setup(chapter)`;
- before a run the reader writes down a guess, `book.predict(id, question, guess, unit)`; after it,
  `book.compare(id, value)` puts the two side by side;
- a sentence with computed numbers is printed by `book.say(...)`; a number with a unit typed into prose is wrapped
  as `<span data-n="id">320 KiB</span>` and a cell asserts it with `book.bound("id", "320 KiB", computed_text)`;
- a number taken from somewhere else stands in a block quote that ends with its source and date;
- an exercise answer is checked, without being revealed, by `book.check(id, answer)`;
- a figure is shown by `book.show(figure, alt=..., caption=...)`, a table by `book.table(...)`.
"""

from kvlab.book.answers import check
from kvlab.book.claims import claims_table
from kvlab.book.plots import new_figure, show
from kvlab.book.predictions import compare, predict
from kvlab.book.results import load_result
from kvlab.book.sections import sections_table
from kvlab.book.session import bound, progress, say, setup, table

__all__ = [
    "bound", "check", "claims_table", "compare", "load_result", "new_figure", "predict",
    "progress", "say", "sections_table", "setup", "show", "table",
]  # fmt: skip
