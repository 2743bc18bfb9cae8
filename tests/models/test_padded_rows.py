"""Rows that no sequence owns stay finite in every kind of layer: a captured step is padded to a fixed size."""

from dataclasses import replace
from functools import cache

import pytest
import test_compressed
import test_indexed_mla
import test_mla
import torch
from recomputed import TEXT, tiny
from test_attention_kinds import BASE as ATTENTION
from test_attention_kinds import KINDS
from test_gated_delta_net import CONFIG as DELTA
from test_hymba import CONFIG as HYMBA
from test_linear_attention_models import BASE as LINEAR
from test_linear_attention_models import MODELS
from test_mamba_models import CONFIGS as MAMBAS
from test_shared_caches import CLA, GEMMA
from test_small_states import KIMI, LFM2

from kvlab.lab.parity.mutate import _records
from kvlab.lab.parity.paging import PagedSequences
from kvlab.models.modules import LAYERS, MODULES

CONFIGS = {"delta": DELTA, "lfm2": LFM2, "kimi": KIMI, "cla": CLA, "gemma3n": GEMMA, "hymba": HYMBA} | MAMBAS
CONFIGS |= {name: LINEAR | config for name, config in MODELS.items()}
CONFIGS |= {name: ATTENTION | config for name, config in KINDS.items()}
BUILT = {
    "latent": lambda: test_mla.tiny("queries from the stream"),
    "indexed": lambda: test_indexed_mla.tiny("choices shared"),
    "compressed": lambda: test_compressed.tiny("all three"),
}
NAMES = [*CONFIGS, *BUILT]


@cache
def model_of(name):
    return (BUILT[name]() if name in BUILT else tiny(CONFIGS[name]))[0]


def padded(batch):
    """`batch` with one sequence more that has no token, as the runner pads: length 0, the null page."""
    return replace(
        batch,
        query_start_loc=torch.cat((batch.query_start_loc, batch.query_start_loc[-1:])),
        seq_lens=torch.cat((batch.seq_lens, batch.seq_lens.new_zeros(1))),
        block_table=torch.cat((batch.block_table, torch.zeros_like(batch.block_table[:1]))),
        num_seqs=batch.num_seqs + 1,
    )


@pytest.mark.parametrize("name", NAMES)
def test_padded_rows_are_finite_after_the_last_layer(name, monkeypatch):
    """Beside decodes, and beside decodes and a chunk; the null page holds NaN."""
    monkeypatch.setenv("KVLAB_OPS", "torch")
    model = model_of(name)
    cache, left = PagedSequences(model, 2, 20), []

    def hidden(ids, batches, views, rows):
        left.append(model.decoder.hidden_states(ids, [padded(b) for b in batches], views))
        return model.decoder.logits(left[-1])

    monkeypatch.setattr(model.decoder, "forward", hidden)
    cache.step({0: TEXT[:5]}, padded_rows=3)
    cache.step({0: TEXT[5:6], 1: TEXT[:4]}, padded_rows=2)
    cache.step({0: TEXT[6:7], 1: TEXT[4:5]}, padded_rows=3)
    assert [len(rows) for rows in left] == [8, 7, 5]
    assert all(rows.isfinite().all() for rows in left)


def test_every_module_and_every_layer_is_among_them():
    seen = {type(record) for name in NAMES for record in _records(model_of(name).config)}
    assert set(MODULES) | set(LAYERS) <= seen
