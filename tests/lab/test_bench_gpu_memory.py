"""The layers that the GPU bench builds to keep its caches cold, on tensors without memory: they fit the card."""

from __future__ import annotations

from fnmatch import fnmatch

import pytest
import torch

pytest.importorskip("triton", reason="triton is for Linux only")

from kvlab.lab import bench_gpu_rows
from kvlab.lab import bench_gpu_time as clock
from kvlab.lab.kernels.configs import configs

GPU = torch.device("cuda")
L2 = 50 * 2**20  # an H200's


@pytest.fixture(autouse=True)
def _card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "l2_cache", lambda device: L2)


def free(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (n_bytes, 2 * n_bytes))


def test_every_measured_configuration_fits_70_gb_without_the_cap_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 10**15)
    chosen = [c for c in configs() if any(fnmatch(c.name, p) for s in bench_gpu_rows.STAGES.values() for p in s)]
    total, warm = {}, set()
    for config in chosen:
        built = clock.built_bytes(config.build())
        layers = clock.layers_for(config.cost.bytes, GPU, built)
        assert layers >= 2 and built >= config.cost.bytes / 4, config.name  # a kernel's rows read twice count twice
        total[config.name] = layers * built
        if not clock.is_cold(config.cost.bytes, layers, GPU):
            warm.add(config.name)
    assert len(total) >= 50 and {name: n for name, n in total.items() if n > 70e9} == {}
    assert not {name for name in warm if not name.startswith(("write/", "page-scores/"))}


def test_layers_are_as_many_as_keep_the_cache_cold_and_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 2**20
    free(monkeypatch, 100 * mib)
    assert clock.layers_for(20 * mib, GPU) == 10 and clock.layers_for(200 * mib, GPU) == 2
    assert clock.layers_for(1, GPU) == clock.LAYERS == 256
    # one is built; four more of 20 MiB fit 0.8 of 100 MiB
    assert clock.layers_for(20 * mib, GPU, 20 * mib) == 5 and clock.is_cold(20 * mib, 5, GPU)
    assert not clock.is_cold(20 * mib, 4, GPU)
    assert clock.layers_for(20 * mib, GPU, 200 * mib) == 1, "what is built is there"


def test_memory_is_counted_once_and_whole() -> None:
    from kvlab.ops.copy_pages.triton_ import copy_launch

    pool, pairs = (
        torch.empty(shape, dtype=t, device="meta") for shape, t in (((9, 64), torch.uint8), ((2, 2), torch.int64))
    )
    assert clock.built_bytes([copy_launch(pool[1:], pool[1:], pairs)] * 2) == 9 * 64 + 32
