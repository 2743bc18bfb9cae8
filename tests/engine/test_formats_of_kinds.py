"""Formats of the kinds that have states beside their rows, of groups in every kind, of rules per layer. Drawn, and slow.

Prefixes, small steps, swaps and drafts are on, as in `test_every_format`: the tokens are those of a calm engine.
"""

import random

import pytest
from kinds import KINDS, kind
from test_every_format import GROUPED, NO_GROUPS, REFUSED, ROWS, UNROTATED, check_schedules, small_groups

from kvlab.specs.kv_dtypes import with_formats

__all__ = ["small_groups"]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize(
    "name", ["delta", "kda", "convolutions", "parallel", "hybrid", "shared blocks", "neighbours"]
)  # fmt: skip
def test_rows_beside_states_or_read_by_neighbours(name, seed):
    """Five formats of each kind."""
    rng = random.Random(f"{name} {seed}")
    for kv_dtype in rng.sample(ROWS, 5):
        check_schedules(name, kv_dtype, seed + rng.randrange(99))


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("kv_dtype", GROUPED)
@pytest.mark.parametrize("name", [name for name in KINDS if name != "full"])
def test_groups_in_every_kind_or_the_reason(name, kv_dtype, small_groups, seed):
    refused = REFUSED | (UNROTATED if kv_dtype == "kvquant3" else {})
    if name in refused:
        with pytest.raises(ValueError, match=refused[name]):
            check_schedules(name, kv_dtype, seed)
    else:
        check_schedules(name, kv_dtype, seed + len(name) + len(kv_dtype))


def drawn_rule(spec, rng):
    """A rule of formats with one or two exceptions, under which layers differ."""
    kinds = sorted({part.kind for _, part in spec.parts() if hasattr(part, "format")})
    exceptions = ["first=1:", "last=1:", *(f"{name}=" for name in kinds)]
    while True:
        terms = [term + rng.choice([*ROWS, "bf16", "native"]) for term in rng.sample(exceptions, rng.choice([1, 2]))]
        rule = ",".join([rng.choice([*ROWS, *GROUPED]), *terms])
        try:
            parts = with_formats(spec, rule).parts()
        except ValueError as refused:
            # the exceptions took every layer that groups are for
            assert NO_GROUPS in str(refused)
            continue
        if len({part.format.name for _, part in parts if hasattr(part, "format")}) > 1:
            return rule


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["full", "windows", "sinks", "chunks"])
def test_drawn_rules_per_layer(name, small_groups, seed):
    rng = random.Random(f"{name} {seed}")
    check_schedules(name, drawn_rule(kind(name).model.spec, rng), seed + rng.randrange(99))
