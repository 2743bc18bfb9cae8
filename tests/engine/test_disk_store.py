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

from kvlab.engine import tiers_disk
from kvlab.engine.tiers_disk import HEADER, SUM_BYTES, DiskStore

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
    assert again.used_bytes == sum(p.stat().st_size for p in tmp_path.iterdir()) == 96 + 6 + 999 + 32


def test_files_of_another_model_are_not_seen_and_stay(tmp_path):
    store(tmp_path).write(NAME, memoryview(PAYLOAD))
    other = store(tmp_path, OTHER)
    assert not other.has(NAME) and other.used_bytes == 0
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
    assert (list(tmp_path.iterdir()), disk.used_bytes, disk.has(NAME)) == ([], 0, False)
    assert list(disk.failures) == ["write: No space left on device"]
    monkeypatch.undo()
    assert disk.write(NAME, memoryview(PAYLOAD)) and read(disk) == PAYLOAD


def test_a_directory_that_was_removed_comes_back_with_the_next_file(tmp_path):
    disk = store(tmp_path / "below")
    assert disk.write(NEXT, memoryview(PAYLOAD))
    shutil.rmtree(tmp_path / "below")
    assert read(disk, NEXT) is None and not disk.has(NEXT) and disk.used_bytes == 0
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


def test_paths_that_cannot_be_used_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"disk_dir .*file: cannot be used"):
        store(tmp_path / "file")
    with pytest.raises(ValueError, match="fingerprint of 3 bytes: must have 32"):
        store(tmp_path, b"abc")


STAGES = ["piece", "written", "synced", "renamed"]
# the module alone: importing its package takes seconds
LOAD = f"""
import importlib.util, random, sys
spec = importlib.util.spec_from_file_location("tiers_disk", {tiers_disk.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
DiskStore = module.DiskStore
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
disk = DiskStore(sys.argv[1], bytes(range(32)), 3 * 10**6)
rng = random.Random(int(sys.argv[2]))
print("ready", flush=True)
while True:
    i = rng.randrange(40)
    disk.write(bytes([i]) * 32, memoryview(bytes([i]) * 200_000))
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_fifty_kills_at_random_moments(tmp_path, seed):
    """Whatever is found afterwards is what was written under that name."""
    process = subprocess.Popen([sys.executable, "-c", RUNNING, str(tmp_path), str(seed)], stdout=subprocess.PIPE)
    assert process.stdout.readline().strip() == b"ready"
    time.sleep(random.Random(seed).uniform(0, 0.2))
    process.send_signal(signal.SIGKILL)
    process.wait()
    disk = store(tmp_path, most=3 * 10**6)
    assert disk.used_bytes <= 3 * 10**6
    assert not [p for p in Path(tmp_path).iterdir() if p.suffix != ".page"]
    for i in range(40):
        name = bytes([i]) * 32
        assert not disk.has(name) or read(disk, name, 200_000) == name[:1] * 200_000
