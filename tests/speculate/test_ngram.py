"""Prompt lookup against a plain search, token by token."""

import random
from array import array

import pytest

from kvlab.speculate.ngram import NGramProposer


def plain(tokens, longest, count):
    for length in range(min(longest, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                found = tokens[start + length :]
                while len(found) < count:
                    found = [*found, found[len(found) - (len(tokens) - start - length)]]
                return tuple(found[:count])
    return ()


def test_the_newest_place_of_the_longest_run_is_continued():
    lookup = NGramProposer(longest=2).lookup
    assert lookup(array("i", [1, 2, 3, 1, 2, 4, 9, 1, 2]), 3) == (4, 9, 1)
    assert lookup(array("i", [7, 7, 7]), 4) == (7, 7, 7, 7)
    assert lookup(array("i", [1, 2, 3]), 4) == ()
    assert lookup(array("i", [1]), 4) == ()
    # 256 is 0 1 0 0 in bytes: no place may be found between two tokens
    assert lookup(array("i", [256, 65536, 1]), 2) == ()


@pytest.mark.parametrize("seed", range(20))
def test_equals_a_plain_search(seed):
    rng = random.Random(seed)
    ids = rng.choice([[0, 1], [0, 1, 256], list(range(6)), [1, 256, 65536, 1 << 24]])
    for _ in range(40):
        tokens = [rng.choice(ids) for _ in range(rng.randint(1, 30))]
        longest, count = rng.randint(1, 4), rng.randint(1, 6)
        assert NGramProposer(longest).lookup(array("i", tokens), count) == plain(tokens, longest, count), tokens


def test_lengths_are_checked():
    with pytest.raises(ValueError, match="shortest 0"):
        NGramProposer(3, 0)
