"""What the GPU bench times was checked on the device before: every kernel, in each of its ways."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

pytest.importorskip("triton", reason="triton is for Linux only")

from kvlab.lab import bench_gpu_check
from kvlab.lab.kernels.compiling import TARGETS
from kvlab.lab.kernels.configs import configs
from kvlab.ops.triton_support import Launch, building_for

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
WORDS = ("KIND", "SCALES", "SHARED", "BITS", "TURN", "PAIRS", "SOFTCAP", "ALONE")  # each value is code of its own
ON = ("WINDOW", "CHUNK", "HALF")  # so is any value but 0


def ways(launches: Iterable[Launch]) -> set[tuple]:
    """(kernel, what of its code runs) for each constant that chooses code, each tensor it may do without, and the type of
    each tensor of codes; not sizes, nor the types of numbers, which are others in the interpreter."""
    found = set()
    for launch in launches:
        name = launch.kernel.__name__
        found |= {(name, key, value) for key, value in launch.meta.items() if key in WORDS}
        found |= {(name, key, value > 0) for key, value in launch.meta.items() if key in ON}
        for key, value in launch.args.items():
            if isinstance(value, torch.Tensor):
                found.add((name, key, value.dtype if value.dtype not in FLOATS else "numbers"))
    return found


def timed() -> set[tuple]:
    """The ways of every configuration: all of them are in a stage, and what else is in one is of these kernels."""
    with building_for(TARGETS["sm_90"]):
        return ways(launch for config in configs() for launch in config.build())


def checked(monkeypatch: pytest.MonkeyPatch) -> set[tuple]:
    """The ways of what `check` launches; nothing is run here."""
    launches: list[Launch] = []
    monkeypatch.setattr(Launch, "run", lambda launch: launches.append(launch))
    bench_gpu_check.check(torch.device("cpu"))
    return ways(launches)


def test_every_kernel_is_checked_in_every_way_that_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = checked(monkeypatch), timed()
    assert not sorted(map(str, theirs - mine))
    kernels = {name for name, *_ in theirs}
    assert len(kernels) >= 12 and ("paged_prefill_packed", "p_tree", torch.uint8) in theirs
    # what engines use besides: no configuration has it
    assert {("paged_decode", "p_alibi", "numbers"), ("paged_prefill_packed", "p_alibi", "numbers"),
            ("write_rows", "p_k_fixed", "numbers"), ("write_rows", "PAIRS", True)} <= mine  # fmt: skip
