"""Prefix caching: pages of computed tokens stay findable by their whole history. Two designs, one interface."""

from kvlab.cache.prefix.keys import History
from kvlab.cache.prefix.options import DESIGNS, EVICTIONS, PrefixOptions
from kvlab.cache.prefix.prefix import Counters, Hit, PrefixCache

__all__ = ["DESIGNS", "EVICTIONS", "Counters", "History", "Hit", "PrefixCache", "PrefixOptions"]
