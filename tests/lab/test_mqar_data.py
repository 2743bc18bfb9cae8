"""The recall task: what a sequence states, what it asks, and that batches depend on their number alone."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kvlab.lab.mqar.data import FRESH, NUM_KEYS, VOCAB, make_batch, tokens_of  # noqa: E402


@pytest.mark.parametrize("pairs", [1, 5, NUM_KEYS])
def test_each_query_asks_for_the_value_that_was_stated_beside_its_key(pairs) -> None:
    batch = make_batch(pairs, 9, seed=1, index=3)
    assert batch.ids.shape == (9, tokens_of(pairs)) and batch.answers.shape == (9, pairs)
    for ids, answers in zip(batch.ids.tolist(), batch.answers.tolist(), strict=True):
        stated = dict(zip(ids[0 : 2 * pairs : 2], ids[1 : 2 * pairs : 2], strict=True))
        queries = ids[2 * pairs :]
        assert len(stated) == pairs, "every key is stated once"
        assert sorted(queries) == sorted(stated), "every key is asked for once"
        assert [stated[q] for q in queries] == answers
        assert max(stated) < NUM_KEYS <= min(stated.values()) and max(stated.values()) < VOCAB


def test_queries_do_not_come_in_the_order_of_the_pairs() -> None:
    batch = make_batch(16, 64, seed=0, index=0)
    same = batch.ids[:, 0:32:2] == batch.ids[:, 32:]
    assert same.double().mean() < 0.2  # one in sixteen by chance


def test_a_batch_is_a_function_of_its_arguments_alone() -> None:
    first = make_batch(8, 4, seed=5, index=7)
    make_batch(8, 4, seed=5, index=6)  # whatever was drawn in between
    assert torch.equal(first.ids, make_batch(8, 4, seed=5, index=7).ids)
    others = [
        make_batch(8, 4, seed=6, index=7),
        make_batch(8, 4, seed=5, index=8),
        make_batch(8, 4, seed=5, index=7, stream=FRESH),
    ]
    assert all(not torch.equal(first.ids, other.ids) for other in others)


@pytest.mark.parametrize(("pairs", "size", "named"), [(0, 1, "pairs"), (NUM_KEYS + 1, 1, "pairs"), (4, 0, "size")])
def test_what_cannot_be_drawn_is_refused_with_the_rule(pairs, size, named) -> None:
    with pytest.raises(ValueError, match=named):
        make_batch(pairs, size, seed=0, index=0)
