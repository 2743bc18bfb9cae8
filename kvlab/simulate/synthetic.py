"""Traces made up from a recipe: arrivals, lengths, shared prefixes; all from one seed.

A recipe is a text such as "random:n=500,rate=2,prompt=512,output=128,burstiness=0.5,spread=0.6,prefixes=4,prefix=256".
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields

from kvlab.simulate.traces import Trace, TraceRequest

PREFIX_BLOCK = 16


@dataclass(frozen=True)
class Recipe:
    """How a made-up trace looks.

    Attributes:
        n: requests.
        rate: arrivals per second on average.
        burstiness: shape of the gamma distribution of gaps: 1 is a Poisson process, smaller is burstier.
        prompt, output: median lengths.
        spread: sigma of the log-normal lengths; 0: all are equal.
        longest: cap on each length.
        prefix, prefixes: each prompt begins with one of so many prefixes of so many tokens (in whole blocks of 16),
            on top of its own length; 0: nothing is shared.
        seed: of everything.
    """

    n: int = 100
    rate: float = 1.0
    burstiness: float = 1.0
    prompt: int = 512
    output: int = 128
    spread: float = 0.0
    longest: int = 131_072
    prefix: int = 0
    prefixes: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("n", "prompt", "output", "longest", "prefixes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least 1")
        for name in ("rate", "burstiness"):
            if not 1e-9 <= getattr(self, name) <= 1e9:
                raise ValueError(f"{name} {getattr(self, name)}: must be from 1e-9 to 1e9")
        if not (0 <= self.spread <= 10 and self.prefix >= 0):
            raise ValueError(f"spread {self.spread}, prefix {self.prefix}: must not be negative, spread at most 10")


def parse_recipe(text: str) -> Recipe:
    """The recipe written as "random:name=value,...".

    Raises:
        ValueError: names the part that cannot be read.
    """
    kind, _, rest = text.partition(":")
    if kind != "random":
        raise ValueError(f"recipe {text!r}: must begin with random:")
    types = {f.name: type(f.default) for f in fields(Recipe)}
    values = {}
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        if name not in types:
            raise ValueError(f"recipe {name!r}: must be one of {', '.join(types)}")
        try:
            values[name] = types[name](value)
        except ValueError:
            raise ValueError(f"recipe {part!r}: must be a {'whole ' if types[name] is int else ''}number") from None
    return Recipe(**values)


def arrivals(recipe: Recipe) -> Iterator[float]:
    """Seconds of the arrivals, the first at 0, without end."""
    rng = random.Random(f"arrivals {recipe.seed}")
    shape = recipe.burstiness
    gaps = (rng.gammavariate(shape, 1 / (shape * recipe.rate)) for _ in itertools.count())
    return itertools.accumulate(gaps, initial=0.0)


def synthetic(recipe: Recipe) -> Trace:
    """The trace of `recipe`: equal recipes give equal traces."""
    rng = random.Random(f"lengths {recipe.seed}")

    def length(median: int) -> int:
        factor = math.exp(rng.gauss(0.0, recipe.spread)) if recipe.spread else 1.0
        return max(1, min(recipe.longest, round(median * factor)))

    shared = recipe.prefix // PREFIX_BLOCK
    requests = []
    fresh = itertools.count(recipe.prefixes * shared)
    for at in itertools.islice(arrivals(recipe), recipe.n):
        own, output = length(recipe.prompt), length(recipe.output)
        which = rng.randrange(recipe.prefixes)
        ids = range(which * shared, (which + 1) * shared)
        blocks = (*ids, *itertools.islice(fresh, math.ceil(own / PREFIX_BLOCK))) if shared else ()
        requests.append(TraceRequest(at, own + shared * PREFIX_BLOCK, output, blocks))
    return Trace(f"random, seed {recipe.seed}", "random", tuple(requests), PREFIX_BLOCK)
