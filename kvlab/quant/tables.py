"""Constants that decoding looks up, kept on the device that asked first: a step sends none of them again.

A copy from pageable memory to a GPU waits for the device, and a CUDA graph cannot record one.
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def table(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """`values` as fp32 on `device`; always the same tensor, for reading only."""
    # made outside of inference mode, so that whoever asks later may differentiate through it
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device)
