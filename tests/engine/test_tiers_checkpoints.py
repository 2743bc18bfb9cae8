"""Checkpoints in the tiers: another continuation of a beginning finds it there after a restart, whatever the kind of cache.

A new engine over the same directory stands for the new process: nothing but the files is common to both.
"""

import random

import pytest
from kinds import KINDS, kind
from late_copies import LateCopier
from test_tiers import HOST, engine_of, plain, prompt_of, run
from test_tiers_at_rest import late_engine

from kvlab.cache.prefix import PrefixOptions
from kvlab.cache.prefix.rules import unit_tokens
from kvlab.engine import SamplingParams
from kvlab.engine.kv_formats import kv_formats
from kvlab.engine.tiers import TierOptions
from kvlab.plan.policies import default_block_size
from kvlab.specs.layout import group_parts

__all__ = ["plain"]
SHORT = SamplingParams(2, ignore_eos=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", "torch")
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


class Place:
    """Engines of one kind over one directory; `unit`: tokens at whose multiples checkpoints lie."""

    def __init__(self, name, path, **options):
        self.kind = kind(name)
        size = default_block_size(self.kind.model.spec, 4)
        self.options = {"block_size": size, "tiers": TierOptions(HOST, path, 1 << 22)} | options
        self.unit = unit_tokens(group_parts(self.kind.model.spec, size))

    def process(self, late=False, **options):
        options = self.options | options
        return (
            late_engine(self.kind, **{k: v for k, v in options.items() if k != "block_size"})
            if late
            else engine_of(self.kind, **options)
        )

    def right(self, engine, prompt, **fields):
        """Tokens that came from a tier; those of the answer are a forward's over everything before them."""
        said, loaded = run(engine, prompt, SHORT, **fields)
        assert said == self.kind.tokens(prompt, SHORT)
        return loaded


@pytest.mark.parametrize("name", KINDS)
def test_another_question_behind_the_same_text_finds_it_in_a_new_process(tmp_path, name):
    """The last page end of a prompt is a checkpoint: here of the text, as the questions are short."""
    place = Place(name, tmp_path)
    text = prompt_of(place.kind, 2 * place.unit)
    assert place.right(place.process(), [*text, 1]) == 0
    assert place.right(place.process(), [*text, 2]) == 2 * place.unit
    if name in ("windows", "delta"):
        # another fingerprint; what else makes one is in `test_tiers`
        assert place.right(place.process(max_model_len=60), [*text, 2]) == 0


@pytest.mark.parametrize("name", ["full", "windows", "chunks", "delta", "compressed", "states"])
def test_where_a_second_request_leaves_the_first_is_found_by_a_third(tmp_path, name):
    """Behind long questions the text's end is no checkpoint until somebody parts there; each is another process."""
    place = Place(name, tmp_path)
    unit = place.unit
    text = prompt_of(place.kind, 2 * unit)
    asked = [[*text, *range(first, first + 2 + unit)] for first in (2, 30, 60)]
    found = [place.right(place.process(), prompt) for prompt in asked]
    assert found == [0, 2 * unit if name == "full" else 0, 2 * unit]


@pytest.mark.parametrize(
    ("name", "design"),
    [("windows", "hash"), ("chunks", "radix"), ("delta", "radix"), ("compressed", "hash"), ("states", "radix")],
)
def test_what_the_pool_keeps_states_for_is_on_disk_too(tmp_path, name, design):
    place = Place(name, tmp_path, prefix=PrefixOptions(design, checkpoint_tokens=1))
    unit = place.unit
    first, text = place.process(late=True), prompt_of(place.kind, 3 * unit)
    both = [[*text, 1], [*text[: 2 * unit], 5, 6]]
    names = [first.add_request(prompt, SHORT) for prompt in both]
    live = [first.requests[name] for name in names]
    while first.scheduler.has_work:
        first.step()
    assert [list(request.output) for request in live] == [place.kind.tokens(prompt, SHORT) for prompt in both]
    saved = {event.tokens for event in first.events.of("save")}
    assert {unit, 2 * unit, 3 * unit} <= saved
    for units in (1, 2, 3):
        assert place.right(place.process(), [*text[: units * unit], 7, 8]) == units * unit


@pytest.mark.parametrize("name", ["windows", "delta", "compressed", "states"])
def test_a_flipped_bit_anywhere_is_a_miss_or_the_right_tokens(tmp_path, name):
    place = Place(name, tmp_path)
    text = prompt_of(place.kind, 2 * place.unit)
    place.right(place.process(), [*text, 1])
    rng, files = random.Random(name), sorted(tmp_path.iterdir())
    whole = {path: path.read_bytes() for path in files}
    found = set()
    for damaged in files:
        for path, data in whole.items():
            path.write_bytes(data)
        data = bytearray(whole[damaged])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        damaged.write_bytes(data)
        found.add(place.right(place.process(), [*text, 2]))
    assert 0 in found and found <= {0, 2 * place.unit}


def test_pages_that_several_checkpoints_need_lie_there_once(tmp_path):
    place = Place("delta", tmp_path, prefix=PrefixOptions(checkpoint_tokens=1))
    engine, unit = place.process(), place.unit
    place.right(engine, prompt_of(place.kind, 5 * unit + 1))
    lengths = [event.tokens for event in engine.events.of("save")]
    assert lengths == [unit * i for i in range(1, 6)] + [5 * unit + 2]
    # a full page for each unit and the one that is begun, a state for each length
    assert [event.pages for event in engine.events.of("save")] == [2, 2, 2, 2, 2, 2]
    assert engine.tiers.saved.disk.num_files == 2 * 6 + 6


def test_groups_that_close_go_on_from_a_checkpoint_although_its_copy_came_late(tmp_path, plain):
    """The last groups of its pages are open there, and the one who wrote them closes them before the copy is made."""
    model = kind("full")
    size = default_block_size(kv_formats(model.model, "kivi2")[1], 8)
    options = {"kv_dtype": "kivi2", "block_size": size, "max_batched_tokens": 200}
    first = engine_of(model, **options, tiers=TierOptions(HOST, tmp_path, 1 << 22))
    first.tiers.copier = LateCopier(first.tiers.copier)
    text, long = prompt_of(model, 2 * size), SamplingParams(12, ignore_eos=True)
    first.generate([[*text, 1]], long)
    again = [*text, 2, 9]
    said, loaded = run(engine_of(model, **options, tiers=TierOptions(HOST, tmp_path, 1 << 22)), again, long)
    assert loaded == 2 * size and said == run(engine_of(model, **options), again, long)[0]
