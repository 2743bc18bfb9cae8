"""The models of the recall experiment: two forms of each mixer agree, and the bytes they keep are their spec's."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kvlab.lab.mqar.data import VOCAB  # noqa: E402
from kvlab.lab.mqar.models import KINDS, LAYERS, MIXERS, STATE, WIDTH, WINDOW, Kind, RecallModel  # noqa: E402
from kvlab.lab.mqar.train import Settings, score, train  # noqa: E402


@pytest.mark.parametrize("letter", MIXERS)
def test_the_form_for_training_equals_token_by_token(letter) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(5)
        mixer = MIXERS[letter](STATE)
        with torch.no_grad():
            for parameter in mixer.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        x = torch.randn(3, 2 * WINDOW + 5, WIDTH)
        state, outputs = mixer.start(3), []
        for t in range(x.shape[1]):
            y, state = mixer.step(x[:, t], state)
            outputs.append(y)
        whole = mixer(x)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(torch.stack(outputs, dim=1), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("letter", MIXERS)
def test_no_token_sees_the_future(letter) -> None:
    torch.manual_seed(6)
    mixer = MIXERS[letter](STATE).requires_grad_(False)
    x = torch.randn(1, 23, WIDTH)
    changed = x.clone()
    changed[:, 15:] += 1.0
    before, after = mixer(x), mixer(changed)
    torch.testing.assert_close(before[:, :15], after[:, :15])
    assert not torch.allclose(before[:, 15:], after[:, 15:])


@pytest.mark.parametrize("name", KINDS)
def test_a_model_decodes_what_it_computes_at_once_and_keeps_the_bytes_of_its_spec(name) -> None:
    model = RecallModel(KINDS[name]).requires_grad_(False)
    ids = torch.randint(VOCAB, (2, WINDOW + 7), generator=torch.Generator().manual_seed(3))
    states = model.start(2)
    for t in range(ids.shape[1]):
        logits, states = model.step(ids[:, t], states)
        held = sum(array[0].numel() * array.element_size() for layer in states for array in layer)
        assert held == model.spec().bytes_at(t + 1)
    torch.testing.assert_close(logits, model(ids, 1)[:, 0], rtol=1e-4, atol=1e-4)


def test_every_model_is_as_deep_and_a_hybrid_has_the_ratio_of_its_name() -> None:
    assert {len(kind.pattern) for kind in KINDS.values()} == {LAYERS}
    for ratio in (1, 3, 7):
        pattern = KINDS[f"hybrid_1_{ratio}"].pattern
        assert pattern.count("M") == ratio * pattern.count("A") and set(pattern) == {"A", "M"}


def test_a_window_layer_forgets_what_lies_outside_it() -> None:
    model = RecallModel(Kind("one", "one window layer", "W")).requires_grad_(False)
    ids = torch.randint(VOCAB, (1, 3 * WINDOW), generator=torch.Generator().manual_seed(8))
    other = ids.clone()
    reach = WINDOW + 3  # the window, and the convolution before it
    other[:, :-reach] = (other[:, :-reach] + 1) % VOCAB
    assert torch.equal(model(ids, 1), model(other, 1))
    other[:, -reach] = (other[:, -reach] + 1) % VOCAB
    assert not torch.equal(model(ids, 1), model(other, 1))


def test_training_is_a_function_of_its_seed_and_lowers_the_loss() -> None:
    kind, settings = (
        Kind("small", "one attention layer", "A"),
        Settings(steps=60, tokens_per_step=384, loads=(2, 4), easy_loads=(2,)),
    )
    losses: list[float] = []
    model = train(kind, 3, settings, lambda step, loss: losses.append(loss))
    again = train(kind, 3, settings)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert all(torch.equal(p, p.half().float()) for p in model.parameters()), "fp16 holds the weights exactly"
    assert 0.0 <= score(model, 2, seed=9, sequences=32) <= 1.0


def test_a_model_that_knows_the_answers_scores_one_and_an_untrained_one_does_not() -> None:
    class Oracle:
        """Answers by looking the key up in the sequence itself."""

        def __call__(self, ids, scored):
            logits = torch.zeros(*ids[:, -scored:].shape, VOCAB)
            for row, query in enumerate(ids[:, -scored:]):
                where = (ids[row, None, : 2 * scored : 2] == query[:, None]).int().argmax(1)
                logits[row, torch.arange(scored), ids[row, 1 : 2 * scored : 2][where]] = 1.0
            return logits

    assert score(Oracle(), 16, seed=1, sequences=8) == 1.0
    assert score(RecallModel(KINDS["mha"]), 16, seed=1, sequences=8) < 0.2


def test_one_load_per_step_easy_ones_first() -> None:
    settings = Settings(steps=100, loads=(4, 8, 16, 32), easy_loads=(4, 8), easy_fraction=0.3)
    loads = [settings.load_at(step) for step in range(100)]
    assert set(loads[:30]) == {4, 8} and set(loads[30:34]) == {4, 8, 16, 32}
    rates = [dataclasses.replace(settings, warmup=10).rate_at(step) for step in range(100)]
    assert max(rates) == rates[9] and rates[-1] < 0.1 * max(rates)


def test_training_ends_when_the_largest_load_is_answered() -> None:
    """With a bar of zero the first batches clear it; with one that nothing clears the whole budget is used."""
    steps: list[int] = []
    settings = Settings(steps=12, tokens_per_step=24, loads=(2, 4), easy_loads=(2,), solved=0.0, solved_batches=2)
    train(Kind("small", "", "Q"), 0, settings, lambda step, loss: steps.append(step))
    assert steps[-1] == 8  # steps 4 and on take both loads in turn; the second batch of the larger is the eighth
    steps.clear()
    train(Kind("small", "", "Q"), 0, dataclasses.replace(settings, solved=1.1), lambda step, loss: steps.append(step))
    assert steps[-1] == 12
