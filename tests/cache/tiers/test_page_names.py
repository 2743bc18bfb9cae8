"""Names of saved pages: whatever sets two requests apart sets the names of their pages apart."""

from array import array
from itertools import combinations

from kvlab.cache.tiers.keys import page_name, prefix_digests, root_digest
from kvlab.schedule import Request, SamplingParams

SETTINGS = [
    {},
    {"adapter": "x"},
    {"salt": "x"},
    {"media": ("x",)},
    {"media": (("x", 0, 4),)},
    {"media": (("x", 1, 4),)},
    {"media": ("('x', 0, 4)",)},
    {"adapter": "x", "salt": "x"},
]


def request_of(setting: dict) -> Request:
    return Request("a", [1, 2, 3], SamplingParams(), **setting)


def test_adapter_salt_and_media_each_name_pages_of_their_own():
    roots = [root_digest(b"model", request_of(setting)) for setting in SETTINGS]
    assert all(one != other for one, other in combinations(roots, 2))
    assert root_digest(b"model", request_of({"salt": "x"})) == roots[2]
    assert root_digest(b"other model", request_of({})) != roots[0]


def test_a_name_is_of_the_whole_history_the_group_and_the_place():
    tokens = array("i", [7, 8, 9, 10])
    ends = prefix_digests(b"root", tokens, [4, 2])
    assert ends == prefix_digests(b"root", tokens, [2]) | prefix_digests(b"root", tokens, [4])
    assert ends[2] == prefix_digests(b"root", array("i", [7, 8, 1]), [2])[2]
    names = {page_name(digest, group, index) for digest in ends.values() for group in (0, 1) for index in (-1, 0)}
    assert len(names) == 8
