"""The disk's thread: nothing counts before it is told, nothing is lost that was asked, and no step waits for a file."""

import os
import random
import threading

import pytest
from kinds import kind
from late_disk import LateDisk
from test_disk_store import MARK, NAME, NEXT, PAYLOAD, store
from test_tiers import GREEDY, HOST, engine_of, prompt_of, run

from kvlab.engine import SamplingParams
from kvlab.engine.tiers import TierOptions
from kvlab.engine.tiers_disk import DiskStore
from kvlab.engine.tiers_disk_worker import DiskWorker, settled
from kvlab.plan.policies import default_block_size


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", "torch")


def late(path, most=10**6, **options):
    """A worker that does nothing until somebody waits for it."""
    pool = LateDisk()
    pool._rng = random.Random()
    pool._rng.randint = lambda low, high: 10**9
    return DiskWorker(DiskStore(path, MARK, most), pool=pool, **options)


def read(disk, name=NAME, length=999):
    into = bytearray(length)
    job = disk.read(name, memoryview(into))
    disk.wait(job)
    return bytes(into) if disk.result(job) else None


def test_a_file_counts_when_its_write_has_ended_and_holds_what_was_given(tmp_path):
    disk, source = late(tmp_path), bytearray(PAYLOAD)
    disk.write(NAME, memoryview(source), "a note")
    source[:] = bytes(999)
    disk.poll()
    assert (disk.has(NAME), disk.is_coming(NAME), disk.notes(), list(tmp_path.iterdir())) == (False, True, [], [])
    disk.drain()
    assert (disk.has(NAME), disk.is_coming(NAME), disk.notes()) == (True, False, [(NAME, "a note")])
    job = disk.read(NAME, memoryview(source))
    assert disk.result(job) is None
    disk.wait(job)
    assert disk.result(job) and source == PAYLOAD == read(DiskWorker(store(tmp_path)))


def test_what_is_forgotten_while_it_is_written_is_not_found_and_what_is_written_again_is(tmp_path):
    disk = late(tmp_path)
    disk.write(NAME, memoryview(bytes(999)))
    disk.forget(NAME)
    assert not disk.has(NAME) and not disk.is_coming(NAME)
    disk.write(NAME, memoryview(PAYLOAD))
    disk.forget(NEXT)
    jobs = list(disk._jobs)
    disk.wait(jobs[0])
    assert not disk.has(NAME), "its write has ended, and it is to be deleted"
    disk.drain()
    assert disk.has(NAME) and read(disk) == PAYLOAD
    # what is expelled is gone at once, from the directory too
    disk.write(NEXT, memoryview(PAYLOAD))
    disk.expel([NAME, NEXT])
    assert not list(tmp_path.iterdir()) and not disk.num_files and not disk.has(NEXT)


def test_the_last_thing_asked_of_a_name_is_what_becomes_of_it(tmp_path):
    disk = late(tmp_path)
    disk.write(NAME, memoryview(PAYLOAD))
    disk.drain()
    for asked in (disk.forget, lambda name: disk.write(name, memoryview(PAYLOAD)), disk.forget):
        asked(NAME)
    disk.drain()
    assert (disk.has(NAME), disk.is_coming(NAME), list(tmp_path.iterdir())) == (False, False, [])
    disk.forget(NAME)
    disk.write(NAME, memoryview(PAYLOAD))
    assert disk.is_coming(NAME)
    disk.write(NAME, memoryview(PAYLOAD))
    assert len(disk._jobs) == 1
    disk.drain()
    assert read(disk) == PAYLOAD


def test_two_engines_of_one_process_write_the_same_page_at_once(tmp_path):
    """One is in the middle of its file when the other begins, writes all of its own, and ends."""
    first, second = store(tmp_path), store(tmp_path)
    stages = []

    def on_stage(name):
        stages.append(name)
        if name == "written":
            first.on_stage = lambda name: None
            assert second.write(NAME, memoryview(PAYLOAD))

    first.on_stage = on_stage
    assert first.write(NAME, memoryview(PAYLOAD)) and "written" in stages
    assert [p.name for p in tmp_path.iterdir()] == [first.known.path(NAME).name]
    into = bytearray(999)
    assert first.read(NAME, memoryview(into)) and into == PAYLOAD and not first.failures


def test_all_workers_of_a_directory_are_waited_for_under_any_name_of_it(tmp_path):
    folder, link = tmp_path / "pages", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    begun, hold = threading.Event(), threading.Event()
    slow, quick = DiskWorker(store(folder)), DiskWorker(store(link))
    slow.store.on_stage = lambda stage: (begun.set(), hold.wait(10))
    slow.write(NAME, memoryview(PAYLOAD))
    assert begun.wait(10)
    quick.write(NEXT, memoryview(PAYLOAD))
    quick.close()
    threading.Timer(0.05, hold.set).start()
    settled(link)
    assert {NAME, NEXT} <= set(store(folder).known) and hold.is_set()


def test_a_page_that_cannot_be_read_for_any_reason_is_not_read_for_ever(tmp_path, monkeypatch):
    """The store forgets what is damaged; a read that fails for another reason must end the search too."""
    model, options = kind("full"), {"tiers": TierOptions(HOST, tmp_path, 10**7)}
    prompt, engine = prompt_of(model, 40), engine_of(model, **options)
    tokens, _ = run(engine, prompt)
    engine.close()
    monkeypatch.setattr(DiskStore, "read", lambda self, name, into: (_ for _ in ()).throw(MemoryError("none left")))
    again = engine_of(model, **options)
    assert run(again, prompt) == (tokens, 0)
    assert again.events.of("lost") and "MemoryError: none left" in again.tiers.saved.disk.failures


def test_no_more_bytes_wait_than_may(tmp_path):
    """Whoever brings more waits for as many writes as it takes; a page larger than all of it is written by itself."""
    disk = late(tmp_path, max_waiting=2500)
    for i in range(5):
        disk.write(bytes([i]) * 32, memoryview(PAYLOAD))
        assert disk._waiting_bytes <= 2500
    assert disk.num_files == 3 and len(list(tmp_path.iterdir())) == 3
    disk.write(NAME, memoryview(bytes(5000)))
    assert disk.num_files == 5 and len(disk._jobs) == 1
    disk.drain()
    assert disk.num_files == 6 and disk._waiting_bytes == 0


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), OSError(5, "Input/output error"), MemoryError()]
)
def test_whatever_goes_wrong_there_is_a_loss_to_tell_and_the_next_file_is_written(tmp_path, monkeypatch, error):
    disk = DiskWorker(store(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(error))
        disk.write(NAME, memoryview(PAYLOAD))
        disk.drain()
    assert not disk.has(NAME) and not disk.is_coming(NAME) and len(disk.failures) == 1
    [[(kind_of, reason), pages]] = disk.gone.items()
    assert (kind_of, pages) == ("lost", 1) and reason.startswith("disk: ")
    disk.write(NAME, memoryview(PAYLOAD))
    assert read(disk) == PAYLOAD


def test_files_that_the_store_drops_are_known_to_be_gone(tmp_path):
    one = 96 + 32 + 999
    disk = DiskWorker(store(tmp_path, most=2 * one + 10))
    names = [bytes([i]) * 32 for i in range(3)]
    for name in names[:2]:
        disk.write(name, memoryview(PAYLOAD))
    disk.drain()
    # the order of use reaches the worker with the next job
    disk.touch(names[0])
    disk.write(names[2], memoryview(PAYLOAD))
    disk.drain()
    assert [disk.has(name) for name in names] == [True, False, True] and sum(disk.gone.values()) == 1


def test_closed_means_written_and_whoever_opens_the_directory_again_waits(tmp_path):
    first = DiskWorker(store(tmp_path))
    for i in range(20):
        first.write(bytes([i]) * 32, memoryview(PAYLOAD))
    settled(tmp_path)
    assert DiskWorker(store(tmp_path)).num_files == 20
    first.write(NAME, memoryview(PAYLOAD))
    first.close()
    assert store(tmp_path).num_files == 21 and first.pool is None
    # it may be used again
    assert read(first) == PAYLOAD
    first.close()


# in an engine


def test_no_step_waits_for_a_file(tmp_path, monkeypatch):
    """Every flush hangs. Requests come and go, what they leave is found in host memory; let go, it reaches the disk."""
    model, go_on, hung = kind("full"), threading.Event(), threading.Event()

    def hang(descriptor):
        hung.set()
        assert go_on.wait(60)

    monkeypatch.setattr(os, "fsync", hang)
    engine = engine_of(model, tiers=TierOptions(HOST, tmp_path, 1 << 22))
    prompt = prompt_of(model, 20)
    for _ in range(2):
        request = engine.requests[engine.add_request(prompt, GREEDY)]
        while engine.scheduler.has_work:
            engine.step()
        assert request.output == model.tokens(prompt, GREEDY)
    assert hung.wait(60) and [e.tokens for e in engine.events.of("load")] == [16]
    assert not engine.tiers.saved.disk.num_files and not list(tmp_path.glob("*.page"))
    go_on.set()
    engine.close()
    assert len(list(tmp_path.glob("*.page"))) == engine.tiers.saved.disk.num_files == 6


@pytest.mark.parametrize("then", ["goes on", "is aborted", "is not to be had"])
@pytest.mark.parametrize("name", ["full", "delta"])
def test_others_run_while_a_request_waits_for_its_reads(tmp_path, name, then):
    model, size = kind(name), default_block_size(kind(name).model.spec, 4)
    options = {"tiers": TierOptions(HOST, tmp_path, 1 << 22), "block_size": size}
    prompt = prompt_of(model, 20)
    said, _ = run(engine_of(model, **options), prompt)
    longer = [*prompt, *said, 3]
    if then == "is not to be had":
        for path in tmp_path.iterdir():
            data = bytearray(path.read_bytes())
            data[-100 if len(data) > 1000 else 0] ^= len(data) > 1000
            path.write_bytes(data)
    engine = engine_of(model, **options)
    engine.tiers.saved.disk.pool = late(tmp_path / "unused").pool
    other = engine.requests[engine.add_request([5, 6, 7], SamplingParams(9, ignore_eos=True))]
    engine.step()
    waits = engine.requests[engine.add_request(longer, GREEDY)]
    for _ in range(3):
        engine.step()
    assert len(other.output) == 4 and not waits.output and engine.tiers.in_flight
    assert [e.reason for e in engine.events.of("wait")] == ["its saved pages are being read from disk"]
    held = engine.tiers.slots.held_bytes
    if then == "is aborted":
        engine.abort(waits.request_id)
        assert engine.tiers.slots.held_bytes == held, "a place was given away while it was read into"
    while engine.scheduler.has_work:
        engine.step()
    engine.close()
    assert other.output == model.tokens([5, 6, 7], SamplingParams(9, ignore_eos=True))
    if then != "is aborted":
        assert waits.output == model.tokens(longer, GREEDY)
    loads = sum(e.tokens for e in engine.events.of("load"))
    assert (loads > 0) == (then == "goes on") and bool(engine.events.of("lost")) == (then == "is not to be had")
    pins = [entry.pins for entry in engine.tiers.saved._entries.values()]
    assert not any(pins) and not engine.tiers.lookups._found


def test_what_waits_for_its_reads_may_be_cut_back(tmp_path):
    """What was found was of longer tokens; what is left is looked up anew."""
    model = kind("full")
    options = {"tiers": TierOptions(HOST, tmp_path, 1 << 22)}
    prompt = prompt_of(model, 20)
    said, _ = run(engine_of(model, **options), prompt)
    engine = engine_of(model, **options)
    engine.tiers.saved.disk.pool = late(tmp_path / "unused").pool
    request = engine.requests[engine.add_request(prompt, GREEDY)]
    engine.add_request([5, 6, 7], SamplingParams(40, ignore_eos=True))
    while len(request.output) < 5:
        engine.step()
    engine.scheduler.preempt(request.request_id, 0.0)
    engine.step()
    assert engine.tiers.lookups._found[request.request_id][1].tokens == 24
    engine.truncate(request.request_id, 21)
    while not request.finish_reason:
        engine.step()
    assert request.output == said
