"""The claims ledger: every checkable statement of the two texts, with what kvlab makes of it.

`python -m kvlab claims` prints it; a chapter shows its own part with `book.claims_table(chapter)`.
"""

from kvlab.book.claims.ledger import Entry, entries
from kvlab.book.claims.show import claims_table

__all__ = ["Entry", "claims_table", "entries"]
