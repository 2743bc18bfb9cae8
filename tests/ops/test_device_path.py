"""The device path reads nothing back to the host, so that a step can be captured as a graph (decision 5)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from host_reads import NoHostReads
from paged import fill

from kvlab.ops.attention import paged_attention
from kvlab.ops.write_kv import write_kv
from kvlab.quant import row_formats

READS = {
    "item": lambda x: x.sum().item(), "int": lambda x: int(x.argmax()), "truth": lambda x: bool((x > 0).any()),
    "tolist": lambda x: x.tolist(), "numpy": lambda x: x.numpy(), "cpu": lambda x: x.cpu(),
    "array": lambda x: np.asarray(x), "mask": lambda x: x[x > 0], "write by mask": lambda x: x.__setitem__(x > 0, x[0]),
    "nonzero": lambda x: x.nonzero(), "where": lambda x: torch.where(x > 0), "select": lambda x: x.masked_select(x > 0),
    "bincount": lambda x: x.long().abs().bincount(), "counts": lambda x: x.long().abs().bincount().tolist(),
    "unique": lambda x: x.unique(), "equal": lambda x: torch.equal(x, x + 1),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_the_guard_sees_a_read_and_is_gone_afterwards(name: str) -> None:
    x = torch.arange(4.0)
    with pytest.raises(AssertionError, match="host read"), NoHostReads():
        READS[name](x)
    READS[name](x)
    with NoHostReads():
        torch.where(x > 0, x, 0).index_select(0, torch.tensor([1])).topk(1)


@pytest.mark.parametrize("fmt", [name for name in row_formats() if name != "fp64"])
@pytest.mark.parametrize("lens", [([1, 1], [9, 4]), ([1, 6], [9, 8])], ids=["decodes", "mixed"])
def test_write_and_attend_without_host_reads(fmt: str, lens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAB_OPS", "torch")
    paged = fill(fmt, (2, 16, 4), lens, padded_rows=2)
    tokens = paged.batch.num_tokens
    query, key = torch.randn(tokens, 4, 16), torch.randn(tokens, 2, 16)
    with NoHostReads():
        write_kv(key, key, paged.views, paged.batch.slot_mapping)
        paged_attention(query, paged.views, paged.batch, scale=0.25, window=5, softcap=2.0)
