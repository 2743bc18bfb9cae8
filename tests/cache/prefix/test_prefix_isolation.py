"""What must not be shared is not: adapters, tenants, media; and what hashing alone would get wrong is caught."""

import subprocess
import sys
from array import array
from zlib import crc32

import pytest
from prefix_driver import Driver

from kvlab.cache.prefix import DESIGNS, History, PrefixOptions
from kvlab.cache.prefix.chain import ROOT_DIGEST, HashChain
from kvlab.cache.prefix.index import Column
from kvlab.cache.prefix.keys import tagged

TEXT = list(range(10, 23))


@pytest.fixture(params=DESIGNS)
def design(request):
    return request.param


def first_digest(tokens=(1, 2, 3, 4), unit=0, **fields):
    history = History(array("i", tokens), 4, **fields)
    index = HashChain([Column(0, 0, 0)], PrefixOptions(), 9)
    index.walk(history, len(tokens) // 4)
    return history.digests[unit]


def test_no_kind_of_extra_key_passes_for_another():
    """vllm#44701: an adapter named x and a salt x gave one hash."""
    same = ("x", 0, 4)
    keys = [first_digest(adapter="x"), first_digest(salt="x"), first_digest(media=[same]), first_digest()]
    assert len(set(keys)) == 4
    namespaces = {History(array("i"), 4, adapter=a, salt=s).namespace for a, s in [("x", ""), ("", "x"), ("", "")]}
    assert len(namespaces) == 3
    # lengths go before parts: nothing can be moved from one to the next
    assert tagged(b"salt", b"ab", b"c") != tagged(b"salt", b"a", b"bc") != tagged(b"salta", b"b", b"c")
    assert first_digest(adapter="ab", salt="c") != first_digest(adapter="a", salt="bc")


@pytest.mark.parametrize("other", [{"adapter": "b"}, {"adapter": "a-v2"}, {"salt": "t"}, {}])
def test_another_adapter_version_or_tenant_finds_nothing(design, other):
    """vllm#30931: an adapter's name is not enough, its weights' digest is part of it. CVE-2025-46570: nor is the text."""
    driver = Driver(design=design)
    assert driver.run("a", TEXT, adapter="a-v1") == 0
    assert driver.run("b", TEXT, **other) == 0
    assert driver.prefix.counters.hits == 0
    assert driver.run("c", TEXT, adapter="a-v1") == 12


def test_a_salt_in_the_first_unit_isolates_every_later_one():
    tokens = tuple(range(24))
    salted, plain = (first_digest(tokens, 5, **fields) for fields in ({"salt": "t"}, {}))
    assert salted != plain
    history = History(array("i", tokens), 4, salt="t")
    assert history.extra(0) and not history.extra(5)


def test_a_hit_ends_before_the_first_unit_that_another_image_overlaps(design):
    """vllm#20261: the placeholder tokens of two images are the same."""
    driver = Driver(design=design)
    text = [1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 0, 0, 7, 8, 9, 10, 11]
    assert driver.run("a", text, media=[("cat", 6, 6)]) == 0
    assert driver.run("b", text, media=[("dog", 6, 6)]) == 4
    assert driver.run("c", text, media=[("cat", 6, 6)]) == 16
    assert driver.run("d", text) == 4
    assert driver.run("e", text, media=["cat"]) == 0  # where it lies is not known


def test_the_same_image_elsewhere_in_its_placeholders_is_another_key(design):
    """vllm#36708: four placeholders each, the image's first token before or at the unit's first."""
    driver = Driver(design=design)
    text = [0] * 12 + [1]
    assert driver.run("a", text, media=[("cat", 3, 6)]) == 0
    assert driver.run("b", text, media=[("cat", 4, 6)]) == 0
    assert driver.run("c", text, media=[("cat", 3, 6)]) == 12
    one, other = (History(array("i", text), 4, media=[("cat", at, 6)]).media_of(1) for at in (3, 4))
    assert one != other


def test_a_hash_that_collides_costs_hits_and_nothing_else(design):
    """openvino.genai#3722: every digest is the same; tokens and what came before them are compared."""
    driver = Driver(design=design, digest=lambda data: b"\0" * 32)
    same = [1, 2, 3, 4] * 3
    assert driver.run("a", [*same, 1]) == 0
    for name, text in (("b", [5, 6, 7, 8, 1]), ("c", [*same, 2]), ("d", [1, 2, 3, 4, 1, 2, 3, 4, 9])):
        hit = driver.start(name, text)
        assert hit <= (4 if design == "hash" else 12)
        driver.end(name)
    if design == "hash":
        assert driver.prefix.index.collisions and driver.histories() == {(1, 2, 3, 4)}


def test_every_process_has_the_same_root_of_sha256_and_one_of_its_own_of_any_other_function():
    """vllm#12621: a root that all processes share lets collisions of a weak function be worked out beforehand. Those of
    sha256 cannot be found; so there all digests are equal, and caches of several processes can be compared."""
    code = (
        "import sys; from array import array; from zlib import crc32; from kvlab.cache.prefix import History, PrefixOptions;"
        "from kvlab.cache.prefix.chain import HashChain; from kvlab.cache.prefix.index import Column;"
        "weak = lambda data: crc32(data).to_bytes(32, 'little');"
        "digests = [PrefixOptions().digest, lambda data: PrefixOptions().digest(data), weak];"
        "histories = [History(array('i', range(8)), 4) for _ in digests];"
        "[HashChain([Column(0, 0, 0)], PrefixOptions(digest=d), 9).walk(h, 2) for d, h in zip(digests, histories)];"
        "print(*(h.digests[1].hex() for h in histories))"
    )
    found = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in "ab"]
    (strong, wrapped, weak), other = (f.stdout.split() for f in found)
    assert strong == other[0] == first_digest(range(8), 1).hex() and first_digest() != ROOT_DIGEST
    assert wrapped != other[1] and weak != other[2]
    # within one process a weak function finds again what it put in
    driver = Driver(digest=lambda data: crc32(data).to_bytes(32, "little"))
    assert [driver.run(name, TEXT) for name in "ab"] == [0, 12]


@pytest.mark.parametrize("item", [("cat", -1, 3), ("cat", 0, 0)])
def test_media_out_of_range(item):
    with pytest.raises(ValueError, match="media"):
        History(array("i", [1]), 4, media=[item])
    with pytest.raises(ValueError, match="4"):
        History(array("q", [1]), 4)
