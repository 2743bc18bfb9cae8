"""Whole pages from one buffer to another, or within one: copies, swaps and transfers know bytes and no format."""

from __future__ import annotations

import torch

from kvlab.ops.dispatch import backend


def copy_pages(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copies page pairs[i, 0] of `source` to page pairs[i, 1] of `target`; changes `target` in place.

    Args:
        source, target: uint8 [num_pages, page_bytes], contiguous, of equal page size, on one device; may be the same
            buffer where no page is both read and written.
        pairs: int64 [n, 2]; no page is written twice.

    Raises:
        ValueError: buffers of another type or of different page sizes.
    """
    for name, buffer in (("source", source), ("target", target)):
        if buffer.dtype != torch.uint8 or buffer.dim() != 2 or not buffer.is_contiguous():
            raise ValueError(f"{name} {tuple(buffer.shape)} {buffer.dtype}: must be contiguous uint8 [pages, bytes]")
    if source.shape[1] != target.shape[1]:
        raise ValueError(f"target pages of {target.shape[1]} bytes: must have the source's {source.shape[1]}")
    if backend(source, triton=True) == "triton" and source.shape[1] % 16 == 0:
        from kvlab.ops.copy_pages import triton_

        triton_.copy_launch(source, target, pairs).run()
    else:
        from kvlab.ops.copy_pages import reference

        reference.copy_pages(source, target, pairs)
