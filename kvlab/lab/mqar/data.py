"""The task: multi-query associative recall (MQAR). A sequence states pairs of a key and a value, then asks for each key.

    k1 v1 k2 v2 ... kn vn   q1 q2 ... qn        3n tokens for a load of n pairs

The queries are the n keys in another order; at each the model must name the value that stood beside that key. Nothing
but the cache can carry it there, so accuracy measures what the cache holds. Keys are the lower half of the
vocabulary, values the upper half.

Source: Arora et al. 2023, "Zoology" (arXiv 2312.04927). Here the queries follow one another without filler, so that the
length grows with the load, and every key is asked for once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

NUM_KEYS = 32
NUM_VALUES = 32
VOCAB = NUM_KEYS + NUM_VALUES
TRAIN, FRESH = 0, 1  # streams of random numbers that never meet: batches to learn from, batches to be scored on


@dataclass(frozen=True)
class Batch:
    """Sequences of one load.

    Attributes:
        ids: int64 [B, 3n], pairs first, then queries.
        answers: int64 [B, n], the value that each query asks for (a token id).
    """

    ids: torch.Tensor
    answers: torch.Tensor


def tokens_of(pairs: int) -> int:
    """Tokens of a sequence that states and asks for `pairs` pairs."""
    return 3 * pairs


def make_batch(pairs: int, size: int, *, seed: int, index: int, stream: int = TRAIN) -> Batch:
    """Batch number `index` of a stream: a function of its arguments alone, whatever was drawn before it.

    Raises:
        ValueError: pairs not in 1 .. NUM_KEYS (each key stands for one value), or no sequences.
    """
    if not 1 <= pairs <= NUM_KEYS:
        raise ValueError(f"pairs {pairs}: must be 1 to {NUM_KEYS}, the number of keys")
    if size < 1:
        raise ValueError(f"size {size}: must be at least one sequence")
    # Philox counts: the key names (seed, stream), the upper words of the counter name the batch
    rng = np.random.Generator(np.random.Philox(key=[seed, stream], counter=[0, 0, pairs, index]))
    keys = rng.random((size, NUM_KEYS)).argsort(axis=1)[:, :pairs]
    values = rng.integers(NUM_KEYS, VOCAB, (size, pairs))
    order = rng.random((size, pairs)).argsort(axis=1)
    stated = np.stack((keys, values), axis=2).reshape(size, 2 * pairs)
    queries = np.take_along_axis(keys, order, axis=1)
    return Batch(
        torch.from_numpy(np.concatenate((stated, queries), axis=1)),
        torch.from_numpy(np.take_along_axis(values, order, axis=1)),
    )
