"""Tiers below the pool: host memory, and a directory on disk below it. Bookkeeping only, standard library only.

Two things move down: the pages of a request that was preempted ("parked"), and those that a later request may begin
with ("saved"), at a request's end and at checkpoints on its way. They come back bit for bit: a page is bytes.

    slots.py     places for pages in host memory
    snapshot.py  which pages a request holds, so that it can be rebuilt
    keys.py      names of saved pages
    saved.py     saved pages in host memory and on disk
    files.py     page files of a directory: their layout, and which are known
    ends.py      lengths of sequences that are saved whole, for windows and states
    marks.py     at which lengths that is
    finding.py   which saved pages a request can begin with
    lookups.py   what was found for waiting requests, while it is read from disk
    tiers.py     parks, saves, finds and loads; pins what a copy under way reads or writes
"""

from kvlab.cache.tiers.slots import HostSlots
from kvlab.cache.tiers.tiers import Tiers

__all__ = ["HostSlots", "Tiers"]
