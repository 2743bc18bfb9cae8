"""The attention kernels, interpreted, against a loop over queries: NaN in every unused slot, guards around the output."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged import Paged, drawn, fill, oracle, pairwise
from tolerances import assert_close

from kvlab.ops.attention import paged_attention, torch_, triton_
from kvlab.quant.fixed import FixedScales

MIXES = {
    "one token": ([1], [1]),
    "decodes": ([1, 1, 1], [40, 17, 16]),
    "prompt": ([17], [17]),
    "decode, then chunks": ([1, 5, 3], [33, 9, 40]),
    "padded": ([1, 1, 1], [5, 0, 18]),
}
FORMATS = [*triton_.WHOLE, *triton_.PACKED]
OPTIONS = {
    "fmt": FORMATS,
    "dims": [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256), (20, 12)],
    "heads": [(2, 2), (4, 1), (5, 1), (14, 2), (17, 1)],
    "block_size": [16, 1, 7],
    "split": [512, 16, 32],
    "window": [0, 1, 6, 100],
    "chunk": [0, 8],
    "softcap": [0.0, 1.5, 50.0],
    "sinks": [False, True],
    "alibi": [False, True],
    "query": ["fp32", "bf16", "fp16"],
    "mix": list(MIXES),
}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# by the type of query and output; bf16 is cut in the interpreter
TOLERANCE = {"fp32": "fp32", "bf16": "bf16 cut", "fp16": "fp16 products"}
GUARD = 777.0


def case_id(case: dict) -> str:
    return "-".join(str(v).replace(" ", "_") for v in case.values())


def guarded(query: torch.Tensor, paged: Paged) -> tuple[torch.Tensor, torch.Tensor]:
    """(a tensor full of a guard value, the output in its middle)."""
    around = torch.full((len(query) + 4, query.shape[1], paged.views.value_dim), GUARD, dtype=query.dtype)
    return around, around[2:-2]


def under_scales(paged: Paged, sides: tuple[int, int]) -> Paged:
    """The same codes, which count 0.2 to 2.2 times as much: one factor of [Hkv or 1, D or 1] for keys, one for values."""
    k, v = (0.2 + 2 * torch.rand(sides) for _ in range(2))
    views = replace(paged.views, fixed=FixedScales(k, v))
    return Paged(views, paged.batch, [x * k for x in paged.keys], [x * v for x in paged.values])


def check(case: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_, "SPLIT", case["split"])
    (num_heads, kv_heads), (head_dim, value_dim) = case["heads"], case["dims"]
    paged = fill(case["fmt"], (kv_heads, head_dim, case["block_size"]), MIXES[case["mix"]], 1, value_dim=value_dim)
    if case.get("fixed"):
        paged = under_scales(paged, case["fixed"])
    before = paged.views.buffer.clone()
    query = torch.randn(paged.batch.num_tokens, num_heads, head_dim).to(TYPES[case["query"]])
    options = {"scale": 2 * head_dim**-0.5, **{k: case[k] for k in ("window", "softcap", "chunk")}}
    options |= {k: torch.randn(num_heads) if case[k] else None for k in ("sinks", "alibi")}
    around, out = guarded(query, paged)
    monkeypatch.setattr(torch_, "paged_attention", None)  # no part of the batch may be decoded into memory first
    paged_attention(query, paged.views, paged.batch, **options, out=out)
    assert_close(case_id(case), oracle(query, paged, **options), out, TOLERANCE[case["query"]])
    assert (out[-1:] == 0).all(), "padded rows must give zeros"
    assert (around[:2] == GUARD).all() and (around[-2:] == GUARD).all(), "wrote outside of the output"
    assert torch.equal(before, paged.views.buffer), "attention must not change pages"


@pytest.mark.parametrize("case", pairwise(OPTIONS), ids=case_id)
def test_every_two_options_together(case: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case, monkeypatch)


@pytest.mark.parametrize(
    ("dims", "fmt"),
    [((72, 72), "nvfp4"), ((160, 160), "int4_g32"), ((192, 192), "bf16"), ((192, 128), "mxfp4")],
    ids=str,
)
def test_widths_that_are_no_power_of_two(dims: tuple[int, int], fmt: str, monkeypatch) -> None:
    """Groups of 16 and 32 values that the border between the halves of a row cuts, and values narrower than keys."""
    case = {"fmt": fmt, "split": 16, "dims": dims, "heads": (2, 1), "block_size": 7, "query": "fp32", "alibi": False}
    case |= {"mix": "decode, then chunks", "window": 6, "softcap": 0.0, "chunk": 0, "sinks": False}
    check(case, monkeypatch)


@pytest.mark.parametrize(("fmt", "sides"), [("fp8_e4m3", (2, 40)), ("fp8_e5m2", (2, 1)), ("fp8_e4m3", (1, 1))])
def test_scales_found_from_data_go_into_queries_and_results(fmt: str, sides: tuple[int, int], monkeypatch) -> None:
    """A scale per channel, head and tensor; two splits, a window, and chunks beside the decode."""
    case = {
        "fmt": fmt,
        "split": 16,
        "dims": (40, 40),
        "heads": (6, 2),
        "block_size": 2,
        "query": "fp32",
        "fixed": sides,
    }
    case |= {"mix": "decode, then chunks", "window": 20, "softcap": 0.0, "chunk": 0, "sinks": True, "alibi": False}
    check(case, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", drawn(OPTIONS, ("fmt", "dims", "block_size")), ids=case_id)
def test_the_product(case: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Format, widths and page size decide which code of a kernel runs: all of their combinations."""
    check(case, monkeypatch)
