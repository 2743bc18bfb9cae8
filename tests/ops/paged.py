"""A pool full of NaN with some sequences in it, and attention written as a loop over queries: the oracle."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import torch

from kvlab.ops.batch import AttentionBatch, make_batch
from kvlab.ops.views import PageViews, page_views
from kvlab.quant import get_codec
from kvlab.specs.formats import get_format
from kvlab.specs.layout import page_layout
from kvlab.specs.parts import Attention


@dataclass
class Paged:
    """Sequences in pages, and the same keys and values as plain tensors.

    Attributes:
        views, batch: what operations get.
        keys, values: per sequence, [seq_len, Hkv, D], as they come back from the storage format, fp64.
    """

    views: PageViews
    batch: AttentionBatch
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def poisoned_views(fmt: str, heads: int, head_dim: int, block_size: int, pages: int, value_dim: int = 0) -> PageViews:
    """Views of a pool in which every byte is 255: NaN in every float format, and in the scales of int8."""
    layout = page_layout(Attention(heads, head_dim, value_dim or head_dim, get_format(fmt)), block_size)
    return page_views(torch.full((pages, layout.page_bytes), 255, dtype=torch.uint8), layout)


def shuffled_table(seq_lens: list[int], block_size: int, generator: torch.Generator) -> torch.Tensor:
    """int32 [B, width]: pages in random order, none twice, none the null page, null pages behind the end."""
    counts = [-(-n // block_size) for n in seq_lens]
    order = (torch.randperm(sum(counts) + 3, generator=generator) + 1).tolist()
    table = torch.zeros(len(seq_lens), max(counts) + 2, dtype=torch.int32)
    for row, count in zip(table, counts, strict=True):
        row[:count] = torch.tensor(order[:count], dtype=torch.int32)
        del order[:count]
    return table


def fill(
    fmt: str,
    shape: tuple[int, int, int],
    lens: tuple[list[int], list[int]],
    padded_rows: int = 0,
    seed: int = 0,
    value_dim: int = 0,
) -> Paged:
    """Sequences stored one value at a time, without the operation under test.

    Args:
        shape: (Hkv, D, block_size).
        lens: (query_lens, seq_lens).
        value_dim: values of a value row, where not D.
    """
    heads, head_dim, block_size = shape
    query_lens, seq_lens = lens
    generator = torch.Generator().manual_seed(seed)
    table = shuffled_table(seq_lens, block_size, generator)
    pages = sum(-(-n // block_size) for n in seq_lens) + 4
    views = poisoned_views(fmt, heads, head_dim, block_size, pages, value_dim)
    keys, values = [], []
    for b, n in enumerate(seq_lens):
        stored = []
        halves = ((views.k, views.k_scale, views.key_dim), (views.v, views.v_scale, views.value_dim))
        for codes, scales, width in halves:
            rows = torch.randn(n, heads, width, generator=generator, dtype=torch.float64)
            encoded, scale = get_codec(fmt).encode(rows)
            stored.append(get_codec(fmt).decode(encoded, scale, width).double())
            for t in range(n):
                page, offset = int(table[b, t // block_size]), t % block_size
                codes[page, :, offset] = encoded[t]
                if scales is not None:
                    scales[page, :, offset] = scale[t]
        keys.append(stored[0])
        values.append(stored[1])
    batch = make_batch(query_lens, seq_lens, table, block_size, padded_rows)
    return Paged(views, batch, keys, values)


def oracle(
    query: torch.Tensor,
    paged: Paged,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    chunk: int = 0,
    sinks: torch.Tensor | None = None,
    alibi: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention [T, Hq, Dv] in fp64, one query and head after the other; rows of no sequence are 0."""
    out = torch.zeros(*query.shape[:2], paged.views.value_dim, dtype=torch.float64)
    starts = paged.batch.query_start_loc.tolist()
    share = query.shape[1] // paged.views.k.shape[1]
    for b, (key, value) in enumerate(zip(paged.keys, paged.values, strict=True)):
        for row in range(starts[b], starts[b + 1]):
            position = len(key) - (starts[b + 1] - row)
            if position < 0:  # a padded sequence
                continue
            low = max(0, position - window + 1) if window else 0
            low = max(low, position - position % chunk) if chunk else low
            for h in range(query.shape[1]):
                scores = key[low : position + 1, h // share] @ query[row, h].double() * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                if alibi is not None:
                    scores += alibi[h].double() * (torch.arange(low, position + 1) - position)
                powers = (scores - scores.max()).exp()
                total = powers.sum() + (0 if sinks is None else (sinks[h].double() - scores.max()).exp())
                out[row, h] = powers / total @ value[low : position + 1, h // share]
    return out


def pairwise(options: dict[str, list], seed: int = 0) -> list[dict]:
    """Cases in which every two values of different options meet at least once, found greedily.

    Each begins with two values that have not met; every other option then adds the value that meets most of those picked so
    far for the first time, drawn where several do, so that no value is in more cases than it has to be.
    """
    names, sizes = list(options), [len(values) for values in options.values()]
    places = list(itertools.combinations(range(len(names)), 2))
    wanted = {(a, i, b, j) for a, b in places for i in range(sizes[a]) for j in range(sizes[b])}
    rng = random.Random(seed)

    def gain(picks: dict[int, int], place: int, value: int) -> int:
        return sum(((place, value, b, j) if place < b else (b, j, place, value)) in wanted for b, j in picks.items())

    cases = []
    while wanted:
        a, i, b, j = min(wanted)  # always covers something that is missing
        picks = {a: i, b: j}
        for place in rng.sample(sorted(set(range(len(names))) - {a, b}), len(names) - 2):
            gains = [gain(picks, place, value) for value in range(sizes[place])]
            picks[place] = rng.choice([value for value, found in enumerate(gains) if found == max(gains)])
        wanted -= {(a, picks[a], b, picks[b]) for a, b in places}
        cases.append({name: options[name][picks[place]] for place, name in enumerate(names)})
    return cases


def drawn(options: dict[str, list], every: tuple[str, ...]) -> list[dict]:
    """A sample of the full product, always the same: a case for each combination of the options in `every`, the rest of it
    drawn by a generator seeded with the case's number. For `make slow`, where all of the product would take weeks."""
    cases = []
    for number, picks in enumerate(itertools.product(*(options[name] for name in every))):
        generator = torch.Generator().manual_seed(number)
        case = {
            name: values[int(torch.randint(len(values), (1,), generator=generator))] for name, values in options.items()
        }
        cases.append(case | dict(zip(every, picks, strict=True)))
    for name, values in options.items():
        assert all(any(case[name] == value for case in cases) for value in values), f"{name}: a value was never drawn"
    return cases
