"""A step of decodes reads nothing back to the host, whatever its layers keep: it can be captured as a graph."""

import pytest
import torch
from host_reads import NoHostReads
from recomputed import TEXT, tiny
from test_gated_delta_net import CONFIG as DELTA
from test_linear_attention_models import BASE, MODELS
from test_shared_caches import CLA, GEMMA
from test_small_states import KIMI, LFM2

from kvlab.lab.parity.paging import PagedSequences

CONFIGS = {"delta": DELTA, "lfm2": LFM2, "kimi": KIMI, "cla": CLA, "gemma3n": GEMMA}
CONFIGS |= {name: BASE | config for name, config in MODELS.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_decode_step_runs_without_host_reads(name, monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", "torch")
    model, _ = tiny(CONFIGS[name], "fp32")
    cache = PagedSequences(model, 2, 20)
    cache.step({0: TEXT[:5], 1: TEXT[:3]})
    forward = model.decoder.forward

    def watched(*inputs: object) -> torch.Tensor:
        with NoHostReads():
            return forward(*inputs)

    monkeypatch.setattr(model.decoder, "forward", watched)
    logits = cache.step({0: [3], 1: [4]}, padded_rows=1)
    assert all(rows.isfinite().all() for rows in logits.values())
