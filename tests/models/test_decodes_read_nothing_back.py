"""A step of decodes reads nothing back to the host, whatever its layers keep: it can be captured as a graph."""

import pytest
import torch
from recomputed import TEXT, tiny
from test_gated_delta_net import CONFIG as DELTA
from test_linear_attention_models import BASE, MODELS
from test_shared_caches import CLA, GEMMA
from test_small_states import KIMI, LFM2
from torch.utils._python_dispatch import TorchDispatchMode

from kvlab.lab.parity.paging import PagedSequences

CONFIGS = {"delta": DELTA, "lfm2": LFM2, "kimi": KIMI, "cla": CLA, "gemma3n": GEMMA}
CONFIGS |= {name: BASE | config for name, config in MODELS.items()}


class HostReads(TorchDispatchMode):
    """Raises on operations that wait for a device's values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(part in str(func) for part in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal.")):
            raise AssertionError(f"{func} reads back to the host")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_decode_step_runs_without_host_reads(name, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", "torch")
    model, _ = tiny(CONFIGS[name], "fp32")
    cache = PagedSequences(model, 2, 20)
    cache.step({0: TEXT[:5], 1: TEXT[:3]})
    forward = model.decoder.forward

    def watched(*inputs: object) -> torch.Tensor:
        with HostReads():
            return forward(*inputs)

    monkeypatch.setattr(model.decoder, "forward", watched)
    logits = cache.step({0: [3], 1: [4]}, padded_rows=1)
    assert all(rows.isfinite().all() for rows in logits.values())


def test_the_watch_sees_a_read():
    with pytest.raises(AssertionError, match="reads back"), HostReads():
        bool(torch.ones(1) > 0)
