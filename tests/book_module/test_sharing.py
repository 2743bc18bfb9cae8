"""Caches shared between the layers of a model that was not trained for it."""

from __future__ import annotations

import pytest
import torch

from kvlab.book.meet import config_of, tiny
from kvlab.book.sharing import share_layers, share_spec
from kvlab.engine.storage import PagedStorage
from kvlab.lab.parity.paging import PagedSequences
from kvlab.specs.families import from_config
from kvlab.specs.layout import group_parts

IDS = [5, 9, 31, 5, 77, 12, 40, 3, 101, 8, 60]


def logits(model):
    return PagedSequences(model, 1, len(IDS)).step({0: IDS})[0]


def test_every_second_layer_owns_nothing_and_reads_the_one_below() -> None:
    spec = share_spec(from_config(config_of("llama-2-7b", num_hidden_layers=5)))
    assert [layer.kind for layer in spec.layers] == ["full", "shared", "full", "shared", "full"]
    assert [layer.parts[0].source for layer in spec.layers[1::2]] == [0, 2]


def test_a_third_of_the_layers_is_a_third_of_the_bytes() -> None:
    spec = from_config(config_of("llama-2-7b", num_hidden_layers=6))
    assert spec.bytes_at(101) == 3 * share_spec(spec, 3).bytes_at(101)


def test_the_pool_has_buffers_for_owners_only() -> None:
    shared = share_layers(tiny("llama-3.1-8b"))
    storage = PagedStorage(group_parts(shared.spec, 4), [3], torch.device("cpu"))
    assert set(storage.buffers) == {(0, 0)}


def test_a_model_whose_layers_all_own_theirs_is_unchanged() -> None:
    model = tiny("llama-3.1-8b")
    assert torch.equal(logits(share_layers(model, 1)), logits(model))


def test_redirected_layers_are_another_function_and_read_no_page_that_is_not_written() -> None:
    model = tiny("llama-3.1-8b")
    redirected = logits(share_layers(model))
    assert redirected.isfinite().all() and not torch.allclose(redirected, logits(model), atol=0.1)


def test_every_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="every 0"):
        share_spec(from_config(config_of("llama-2-7b")), 0)
