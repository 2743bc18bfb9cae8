"""The device path reads nothing back to the host, so that a step can be captured as a graph (decision 5)."""

from __future__ import annotations

import pytest
import torch
from paged import fill
from torch.utils._python_dispatch import TorchDispatchMode

from kvlab.ops.attention import paged_attention
from kvlab.ops.write_kv import write_kv

READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "item", "masked_select", "unique")


class NoHostReads(TorchDispatchMode):
    """Raises on operations whose result the host waits for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in READS):
            raise AssertionError(f"{func} reads device memory on the host")
        return func(*args, **(kwargs or {}))


def test_the_guard_sees_a_read() -> None:
    with NoHostReads(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        torch.ones(1).item()


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("lens", [([1, 1], [9, 4]), ([1, 6], [9, 8])], ids=["decodes", "mixed"])
def test_write_and_attend_without_host_reads(fmt: str, lens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAB_OPS", "torch")
    paged = fill(fmt, (2, 16, 4), lens, padded_rows=2)
    tokens = paged.batch.num_tokens
    query, key = torch.randn(tokens, 4, 16), torch.randn(tokens, 2, 16)
    with NoHostReads():
        write_kv(key, key, paged.views, paged.batch.slot_mapping)
        paged_attention(query, paged.views, paged.batch, scale=0.25, window=5, softcap=2.0)
