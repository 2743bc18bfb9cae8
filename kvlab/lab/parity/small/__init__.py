"""How each family's config is made small: `SMALL` has a row per family, `small` finds it.

Widths, heads, vocabulary and layers shrink; so does every length (window, chunk, ratio, top-k, original_max_position),
to where it binds within the tested tokens. A ratio that a mechanism depends on is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlab.lab.parity.small import classic, compressed, delta, dense, latent, linear, mamba, moe, shared, windows
from kvlab.lab.parity.small.row import Small
from kvlab.models.families import family_name

SMALL: dict[str, Small] = {
    **dense.SMALL, **classic.SMALL, **windows.SMALL, **delta.SMALL, **moe.SMALL,
    **compressed.SMALL, **latent.SMALL, **linear.SMALL, **shared.SMALL, **mamba.SMALL,
}  # fmt: skip


def small(config: Mapping[str, Any]) -> Small:
    """The row of the family that runs `config`; Llama's where a family has none of its own."""
    return SMALL.get(family_name(config), SMALL["llama"])
