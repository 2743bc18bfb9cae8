"""Transfers are measured on the engine's own pages, which hold the same bytes afterwards."""

import pytest
import torch

from kvlab.engine import Engine
from kvlab.lab.transfers import measure_transfers
from kvlab.models.load import empty_model

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 50,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 100.0, "tie_word_embeddings": False,
}  # fmt: skip


def test_each_way_moves_the_bytes_that_it_says_and_changes_none(tmp_path):
    engine = Engine(empty_model(CONFIG, "fp32", torch.device("cpu"), "tiny"), num_blocks=9, block_size=4)
    engine.storage.fill(3)
    found = measure_transfers(engine, 8, tmp_path)
    assert [t.way for t in found] == [
        "pool to host memory", "host memory to pool", "host memory to disk, flushed", "disk (page cache) to host memory"
    ]  # fmt: skip
    assert {(t.pages, t.num_bytes) for t in found} == {(8, 8 * engine.layout.page_bytes(0))}
    assert all(t.seconds > 0 and t.expected_s > 0 for t in found)
    assert all((rows == 3).all() for rows in engine.storage.rows(0))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="pages 9: must be from 1 to the 8 of the pool"):
        measure_transfers(engine, 9)
