"""What holds for every launch, on tensors without memory: contiguous last axes, and a grid that a GPU accepts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is for Linux only")

from kvlab.lab.kernels import configs, more_configs
from kvlab.lab.kernels.shapes import SHAPES
from kvlab.ops.triton_support import Launch, building_for, warp_group_products

FEW = 65_535  # programs along the second and third axis of a CUDA grid
# what may be counted along those axes, and why it stays under the limit
BOUNDED = {
    "KV head": "of a model", "head": "of a model", "head block": "heads of a model",
    "sequence": "a step has at most max_num_seqs", "row": "a sequence's",
    "split": "512 tokens of one sequence: 33 million tokens", "split of the chosen pages": "32 pages of one sequence",
    "part of a page": "4 KiB of a page: 268 MB",
}  # fmt: skip


def launches() -> Iterator[tuple[str, Launch]]:
    """Every launch of every production configuration."""
    for config in configs.configs():
        for launch in config.build():
            yield config.name, launch


def test_a_last_axis_with_gaps_is_refused_by_every_launch() -> None:
    """The same shapes with every second element: refused by name, unless the kernel takes a stride for it."""
    seen = set()
    for where, launch in launches():
        for name, tensor in launch.args.items():
            if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0 or tensor.shape[-1] == 1:
                continue
            gaps = torch.empty((*tensor.shape, 2), dtype=tensor.dtype, device="meta")[..., 0]
            seen.add((launch.kernel.fn.__name__, name))
            if name in launch.strided:
                replace(launch, args=launch.args | {name: gaps})
                continue
            with pytest.raises(ValueError, match=rf"^{name} .* of {launch.kernel.fn.__name__}: the stride .* is 2"):
                replace(launch, args=launch.args | {name: gaps})
                pytest.fail(f"{where}: {name} was taken")
    assert (
        len({kernel for kernel, _ in seen}) >= 12
        and ("paged_decode", "p_q") in seen
        and ("write_rows", "p_key") in seen
    )


def test_a_signature_says_how_far_into_its_memory_a_tensor_begins() -> None:
    _, launch = next(launches())
    place = launch.kernel.arg_names.index("p_q")
    shape = launch.args["p_q"].shape
    for first, aligned in ((0, True), (8, True), (1, False)):
        query = torch.empty(first + shape.numel(), dtype=torch.bfloat16, device="meta")[first:].view(shape)
        facts = replace(launch, args=launch.args | {"p_q": query}).signature()[2]
        assert ((place,) in facts) == aligned


def test_what_grows_with_tokens_is_on_the_first_axis() -> None:
    """Axes by their names in the kernels' docstrings: "Program (first, second, third)"."""
    wrong, kernels = [], {}
    for _, launch in launches():
        kernels[launch.kernel.fn.__name__] = launch
    for name, launch in kernels.items():
        axes = re.search(r"Program \(([^)]*)\)", launch.kernel.fn.__doc__).group(1).split(", ")
        assert len(axes) == len(launch.grid), name
        wrong += [(name, axis) for axis in axes[1:] if axis not in BOUNDED]
    assert not wrong and len(kernels) >= 12


def test_grids_of_very_many_tokens_and_pages_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    many = 2_000_000
    llama = replace(SHAPES["llama-3-8b"], context=many)
    monkeypatch.setattr(more_configs, "LLAMA", llama)
    monkeypatch.setattr(more_configs, "CONTEXT", many)
    monkeypatch.setattr(more_configs, "COPIED", 100_000)
    at_once = replace(llama, batch=1, new=100_000)
    found = [c.build() for c in more_configs.more_configs()]
    found += [configs.cache_write(at_once), configs.prefill(at_once), configs.decode(llama)]
    found += [configs.prefill(replace(at_once, fmt="int4"))]
    for launch in (one for some in found for one in some):
        assert all(n <= FEW for n in launch.grid[1:]), (launch.kernel.fn.__name__, launch.grid)


def test_only_devices_with_group_products_get_the_large_tiles() -> None:
    """Capability 12.x has neither wgmma nor tcgen05, and 99 KiB of shared memory."""
    from triton.backends.compiler import GPUTarget

    found = {}
    for arch in (80, 89, 90, 100, 103, 110, 120, 121):
        with building_for(GPUTarget("cuda", arch, 32)):
            found[arch] = warp_group_products(torch.device("cuda"))
    assert [arch for arch, large in found.items() if large] == [90, 100, 103, 110]
