"""KIVI: keys per channel, values per token, over closed groups of tokens. Source: arXiv 2402.02750, section 3.

A key channel has about the same size for every token, so its values share a step over the group; a value has no such
channels, so each token has its own.
"""

from __future__ import annotations

import torch

from kvlab.quant import groups
from kvlab.specs.grouped import ClosedGroups


def encode(key: torch.Tensor, value: torch.Tensor, part: ClosedGroups) -> dict[str, torch.Tensor]:
    """The segments of closed groups, by name, [n, Hkv, ...] each.

    Args:
        key, value: [n, Hkv, tokens of a group, D] and [.., Dv], n groups.
    """
    bits, tokens = part.format.bits, part.format.group_tokens
    k, k_scale = groups.encode(key.transpose(2, 3).flatten(2), bits, tokens)
    v, v_scale = groups.encode(value.flatten(2), bits, part.value_group)
    return {"k_closed": k, "k_closed_scale": k_scale, "v_closed": v, "v_closed_scale": v_scale}


def decode(stored: dict[str, torch.Tensor], part: ClosedGroups) -> tuple[torch.Tensor, torch.Tensor]:
    """(key, value) fp32 [n, Hkv, tokens, D] of the segments that `encode` gave."""
    bits, tokens = part.format.bits, part.format.group_tokens
    widths = part.key_width * tokens, part.value_width * tokens
    key = groups.decode(stored["k_closed"], stored["k_closed_scale"], bits, widths[0], tokens)
    value = groups.decode(stored["v_closed"], stored["v_closed_scale"], bits, widths[1], part.value_group)
    key = key.unflatten(-1, (part.key_width, tokens)).transpose(-1, -2)
    return key, value.unflatten(-1, (tokens, part.value_width))
