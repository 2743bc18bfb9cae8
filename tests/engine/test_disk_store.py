"""The disk tier's files: whole or absent, and a miss whatever is wrong with them."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvlab.cache.tiers.files import HEADER, SUFFIX, SUM_BYTES
from kvlab.engine import tiers_disk, tiers_disk_worker
from kvlab.engine.tiers_disk import DiskStore

MARK, OTHER = bytes(range(32)), bytes(range(1, 33))
NAME, NEXT = b"n" * 32, b"m" * 32
PAYLOAD = random.Random(0).randbytes(999)


def store(path, mark=MARK, most=10**6):
    return DiskStore(path, mark, most)


def read(disk, name=NAME, length=999):
    """The payload, None for a miss."""
    into = bytearray(length)
    return bytes(into) if disk.read(name, memoryview(into)) else None


def test_what_was_written_is_read_by_the_next_process(tmp_path):
    assert store(tmp_path).write(NAME, memoryview(PAYLOAD), "a note")
    again = store(tmp_path)
    assert again.has(NAME) and not again.has(NEXT)
    assert read(again) == PAYLOAD
    assert again.notes() == [(NAME, "a note")]
    assert again.known.used_bytes == sum(p.stat().st_size for p in tmp_path.iterdir()) == 96 + 6 + 999 + 32


def test_files_of_another_model_are_not_seen_and_stay(tmp_path):
    store(tmp_path).write(NAME, memoryview(PAYLOAD))
    other = store(tmp_path, OTHER)
    assert not other.has(NAME) and other.known.used_bytes == 0
    assert read(other) is None
    assert read(store(tmp_path)) == PAYLOAD


@pytest.mark.parametrize("part", ["magic", "fingerprint", "name", "lengths", "note", "payload", "sum"])
def test_a_flipped_bit_in_any_part_is_a_miss(tmp_path, part):
    store(tmp_path).write(NAME, memoryview(PAYLOAD), "a note")
    [path] = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    starts = {"magic": 0, "fingerprint": 16, "name": 48, "lengths": 80, "note": HEADER.size,
              "payload": HEADER.size + 6, "sum": len(data) - SUM_BYTES}  # fmt: skip
    ends = [*sorted(starts.values())[1:], len(data)]
    start = starts[part]
    end = min(e for e in ends if e > start)
    rng = random.Random(part)
    for _ in range(12):
        byte, bit = rng.randrange(start, end), rng.randrange(8)
        damaged = bytearray(data)
        damaged[byte] ^= 1 << bit
        path.write_bytes(damaged)
        # found again by a new process, and by one that knew it before
        assert read(store(tmp_path)) is None
        path.write_bytes(data)
        knows = store(tmp_path)
        path.write_bytes(damaged)
        assert read(knows) is None and knows.failures
        assert not knows.has(NAME) and not path.exists()
        path.write_bytes(data)
        assert read(store(tmp_path)) == PAYLOAD


@pytest.mark.parametrize("cut", [0, 1, 79, HEADER.size, HEADER.size + 500, -SUM_BYTES, -1])
def test_a_file_cut_short_is_a_miss(tmp_path, cut):
    store(tmp_path).write(NAME, memoryview(PAYLOAD))
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:cut])
    assert read(store(tmp_path)) is None


def test_a_payload_of_another_length_is_a_miss(tmp_path):
    disk = store(tmp_path)
    disk.write(NAME, memoryview(PAYLOAD))
    assert read(disk, length=998) is None


def test_a_full_disk_leaves_no_trace(tmp_path, monkeypatch):
    disk = store(tmp_path)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert not disk.write(NAME, memoryview(PAYLOAD))
    assert (list(tmp_path.iterdir()), disk.known.used_bytes, disk.has(NAME)) == ([], 0, False)
    assert list(disk.failures) == ["write: No space left on device"]
    monkeypatch.undo()
    assert disk.write(NAME, memoryview(PAYLOAD)) and read(disk) == PAYLOAD


def test_a_directory_that_was_removed_comes_back_with_the_next_file(tmp_path):
    disk = store(tmp_path / "below")
    assert disk.write(NEXT, memoryview(PAYLOAD))
    shutil.rmtree(tmp_path / "below")
    assert read(disk, NEXT) is None and not disk.has(NEXT) and disk.known.used_bytes == 0
    assert disk.write(NAME, memoryview(PAYLOAD)) and read(store(tmp_path / "below")) == PAYLOAD


def test_the_cap_drops_the_least_recently_used(tmp_path):
    one = HEADER.size + 999 + SUM_BYTES
    disk = store(tmp_path, most=2 * one + 10)
    names = [bytes([i]) * 32 for i in range(4)]
    for name in names[:2]:
        assert disk.write(name, memoryview(PAYLOAD))
    assert read(disk, names[0])
    assert disk.write(names[2], memoryview(PAYLOAD))
    assert [disk.has(name) for name in names] == [True, False, True, False]
    assert not disk.write(names[3], memoryview(bytes(3 * one))), "larger than the cap"
    assert [disk.has(name) for name in names] == [True, False, True, False]
    # the order survives a restart
    again = store(tmp_path, most=2 * one + 10)
    again.write(names[3], memoryview(PAYLOAD))
    assert [again.has(name) for name in names] == [False, False, True, True]


ONE = HEADER.size + 999 + SUM_BYTES


def bytes_in(path):
    return sum(p.stat().st_size for p in path.glob("*.page"))


@pytest.mark.parametrize("marks", [(MARK, OTHER), (MARK, MARK)], ids=["two models", "two processes"])
def test_the_cap_holds_for_the_directory_whoever_writes_there(tmp_path, marks):
    """At every moment, for stores that were open before the other one wrote anything."""
    most = 4 * ONE + 10
    stores = [store(tmp_path, mark, most) for mark in marks]
    for i in range(16):
        assert stores[i % 2].write(bytes([i]) * 32, memoryview(PAYLOAD))
        assert bytes_in(tmp_path) <= most
    assert len(list(tmp_path.iterdir())) == 4
    # what one has lost to the other it neither counts nor finds
    for disk in stores:
        disk.write(NAME, memoryview(PAYLOAD))
        assert disk.num_bytes == bytes_in(tmp_path)
        assert all((tmp_path / f"{name.hex()}.page").exists() for name in disk.known)


def test_files_of_other_models_go_first_the_longest_unused_in_front(tmp_path):
    old, own = store(tmp_path, OTHER), store(tmp_path)
    names = [bytes([i]) * 32 for i in range(6)]
    own.write(names[0], memoryview(PAYLOAD))
    for name in names[1:4]:
        old.write(name, memoryview(PAYLOAD))
    for seconds, name in zip((3, 1, 2), names[1:4], strict=True):
        os.utime(tmp_path / f"{name.hex()}.page", (seconds, seconds))
    (tmp_path / "somebody's.page").write_bytes(bytes(9999))
    now = store(tmp_path, most=3 * ONE + 10)
    left = lambda: sorted(int(p.name[:2], 16) for p in tmp_path.glob("0*.page"))  # noqa: E731
    assert left() == [0, 1, 3], "a cap that was lowered holds from the start"
    assert now.gone == {("evict", f"disk: of no use to this model, disk_bytes {3 * ONE + 10}"): 1}
    now.write(names[4], memoryview(PAYLOAD))
    assert left() == [0, 1, 4]
    now.write(names[5], memoryview(PAYLOAD))
    assert left() == [0, 4, 5]
    store(tmp_path, most=ONE)
    assert left() == [5] and (tmp_path / "somebody's.page").exists()


@pytest.mark.parametrize("moment", ["stat", "open", "unlink"])
def test_files_that_another_process_takes_away_meanwhile_are_not_there(tmp_path, monkeypatch, moment):
    for name in (NAME, NEXT):
        store(tmp_path).write(name, memoryview(PAYLOAD))
    (tmp_path / f"{'00' * 32}.0{tiers_disk.UNFINISHED}").write_bytes(b"half")
    os.utime(tmp_path / f"{'00' * 32}.0{tiers_disk.UNFINISHED}", (1, 1))
    own = getattr(Path, moment)

    def late(path, *arguments, **options):
        if path.parent == tmp_path and NEXT.hex() not in path.name:
            os.path.exists(path) and os.remove(path)
        return own(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, moment, late)
        disk = store(tmp_path)
    assert (disk.has(NAME), disk.has(NEXT)) == (moment == "unlink", True)
    assert read(disk, NEXT) == PAYLOAD


def test_a_file_of_which_nothing_can_be_read_counts_and_stops_nobody(tmp_path, monkeypatch):
    store(tmp_path).write(NAME, memoryview(PAYLOAD))
    monkeypatch.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    disk = store(tmp_path)
    assert (disk.has(NAME), disk.known.used_bytes, disk.known.foreign_bytes) == (False, 0, ONE)


def test_unfinished_files_stay_only_while_somebody_writes_them(tmp_path):
    """A process id says little: a container starts again with the same ones."""
    names = {owner: tmp_path / f"{'00' * 32}.{owner}.writing" for owner in (os.getpid(), os.getppid(), 2**22 + 1, "x")}
    for path in names.values():
        path.write_bytes(b"half")
    store(tmp_path)
    assert [owner for owner, path in names.items() if path.exists()] == [os.getppid()]
    os.utime(names[os.getppid()], (1, 1))
    store(tmp_path)
    assert not list(tmp_path.iterdir())
    # a second store of this process leaves alone what the first is writing
    disk, seen = store(tmp_path), []
    disk.on_stage = lambda stage: stage == "synced" and seen.append(store(tmp_path))
    assert disk.write(NAME, memoryview(PAYLOAD)) and seen and read(disk) == PAYLOAD


def test_paths_that_cannot_be_used_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"disk_dir .*file: cannot be used"):
        store(tmp_path / "file")
    with pytest.raises(ValueError, match="fingerprint of 3 bytes: must have 32"):
        store(tmp_path, b"abc")


def refusing(monkeypatch, *names):
    """Files of these names can be neither deleted nor emptied, as in a directory of another user."""
    own = Path.unlink

    def unlink(path, **options):
        if path.name.split(".")[0] in {name.hex() for name in names}:
            raise PermissionError(errno.EACCES, "Permission denied")
        return own(path, **options)

    monkeypatch.setattr(Path, "unlink", unlink)
    monkeypatch.setattr(os, "truncate", lambda path, length: unlink(Path(path)))


@pytest.mark.parametrize(
    "marks", [(MARK, MARK), (OTHER, MARK), (OTHER, OTHER)], ids=["own", "first foreign", "foreign"]
)
def test_a_file_that_cannot_be_deleted_counts_and_the_next_one_goes(tmp_path, monkeypatch, marks):
    for i, (name, mark) in enumerate(zip((NAME, NEXT), marks, strict=True)):
        store(tmp_path, mark).write(name, memoryview(PAYLOAD))
        os.utime(tmp_path / f"{name.hex()}.page", (i, i))
    most = 2 * ONE + 10
    disk = store(tmp_path, most=most)
    refusing(monkeypatch, NAME)
    assert disk.write(b"3" * 32, memoryview(PAYLOAD)) and not disk.has(NEXT) and read(disk, b"3" * 32)
    assert disk.num_bytes == bytes_in(tmp_path) == 2 * ONE
    assert sum(disk.gone.values()) == 1 and list(disk.failures) == ["evict: Permission denied"]
    # none of them goes: nothing is told to have gone, and nothing is written
    refusing(monkeypatch, NAME, b"3" * 32)
    disk.gone.clear()
    assert not disk.write(b"4" * 32, memoryview(PAYLOAD))
    assert disk.num_bytes == bytes_in(tmp_path) == 2 * ONE and read(disk, b"3" * 32) == PAYLOAD
    assert disk.gone == {("lost", f"disk: write: no room for {ONE} bytes under a cap of {most}"): 1}


@pytest.mark.parametrize("how", ["forgotten", "expelled", "damaged"])
def test_what_cannot_be_deleted_is_found_no_more_and_counts(tmp_path, monkeypatch, how):
    disk = store(tmp_path)
    disk.write(NAME, memoryview(PAYLOAD))
    refusing(monkeypatch, NAME)
    if how == "forgotten":
        disk.forget(NAME)
    elif how == "expelled":
        disk.expel([NAME])
    else:
        path = tmp_path / f"{NAME.hex()}.page"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert read(disk) is None
    for _ in range(2):
        assert (disk.has(NAME), disk.known.used_bytes, disk.known.foreign_bytes) == (False, 0, ONE)
        disk.known.look()
    # a new file may take its place
    assert disk.write(NAME, memoryview(PAYLOAD)) and read(disk) == PAYLOAD
    assert (disk.known.used_bytes, disk.known.foreign_bytes) == (ONE, 0)


@pytest.mark.parametrize("suffix", [SUFFIX, tiers_disk.UNFINISHED])
def test_whatever_else_lies_in_the_directory_a_store_starts_and_writes(tmp_path, monkeypatch, suffix):
    """Directories, links in a circle, other users' files, ids that no process can have."""
    for i, owner in enumerate(["", ".x", ".-1", ".0", ".99999999999999", f".{2**63}", f".{2**22 + 1}"]):
        (tmp_path / f"{i:064x}{owner}{suffix}").mkdir()
        (tmp_path / f"{16 + i:064x}{owner}{suffix}").write_bytes(b"another user's")
        loop = tmp_path / f"{32 + i:064x}{owner}{suffix}"
        loop.symlink_to(loop.name)
    refusing(monkeypatch, *((16 + i).to_bytes(32, "big") for i in range(7)))
    disk = store(tmp_path)
    assert disk.write(NAME, memoryview(PAYLOAD)) and read(store(tmp_path)) == PAYLOAD


@pytest.mark.parametrize("moment, most", [("before", 10**6), ("before", 2 * ONE), ("piece", 10**6), ("synced", 10**6)])
def test_a_write_that_fails_leaves_what_another_process_wrote(tmp_path, moment, most):
    store(tmp_path / "other").write(NAME, memoryview(PAYLOAD))
    [path] = (tmp_path / "other").iterdir()
    disk, place = store(tmp_path / "here", most=most), tmp_path / "here" / path.name

    def stage(now):
        if now == moment:
            place.write_bytes(path.read_bytes())
        if now == "synced":
            raise OSError(errno.ENOSPC, "No space left on device")

    stage("before")
    disk.on_stage = stage
    # one that looked through the directory first knows the other's file, and has nothing to write
    assert disk.write(NAME, memoryview(PAYLOAD)) == (most < 10**6)
    assert list(place.parent.iterdir()) == [place] and read(store(place.parent)) == PAYLOAD


STAGES = ["piece", "written", "synced", "renamed"]
# the modules alone: importing their package takes seconds
LOAD = f"""
import importlib.util, random, sys
def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
DiskStore = load("tiers_disk", {tiers_disk.__file__!r}).DiskStore
DiskWorker = load("tiers_disk_worker", {tiers_disk_worker.__file__!r}).DiskWorker
"""
WRITER = (
    LOAD
    + """
disk = DiskStore(sys.argv[1], bytes(range(32)), 10**8)
stop = sys.argv[2]
def stage(name):
    if name == stop:
        print(name, flush=True)
        sys.stdin.read()
disk.on_stage = stage
disk.write(b"n" * 32, memoryview(b"payload" * 1000))
"""
)


def killed_writer(path, stop):
    """A process that writes a file and is killed at that stage."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path), stop],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert process.stdout.readline().strip().decode() == stop
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("stop", ["piece", "synced", "renamed"])
def test_a_killed_writer_leaves_the_whole_file_or_none(tmp_path, stop):
    killed_writer(tmp_path, stop)
    disk = store(tmp_path)
    whole = read(disk, length=7000)
    assert whole == (b"payload" * 1000 if stop == "renamed" else None)
    # what was left unfinished is gone
    assert len(list(tmp_path.iterdir())) == (1 if stop == "renamed" else 0)


RUNNING = (
    LOAD
    + """
disk = DiskWorker(DiskStore(sys.argv[1], bytes(range(32)), 3 * 10**6), max_waiting=2 * 10**6)
rng = random.Random(int(sys.argv[2]))
print("ready", flush=True)
while True:
    i = rng.randrange(40)
    disk.write(bytes([i]) * 32, memoryview(bytes([i]) * 200_000))
    disk.poll()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_fifty_kills_at_random_moments(tmp_path, seed):
    """Whatever is found afterwards is what was written under that name. The disk's own thread writes, others ask."""
    process = subprocess.Popen([sys.executable, "-c", RUNNING, str(tmp_path), str(seed)], stdout=subprocess.PIPE)
    assert process.stdout.readline().strip() == b"ready"
    time.sleep(random.Random(seed).uniform(0, 0.2))
    process.send_signal(signal.SIGKILL)
    process.wait()
    disk = store(tmp_path, most=3 * 10**6)
    assert disk.known.used_bytes <= 3 * 10**6
    assert not [p for p in Path(tmp_path).iterdir() if p.suffix != ".page"]
    for i in range(40):
        name = bytes([i]) * 32
        assert not disk.has(name) or read(disk, name, 200_000) == name[:1] * 200_000
