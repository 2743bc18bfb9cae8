"""What a decode step reads of a cache, beside what the cache keeps."""

import pytest

from kvlab.specs.formats import get_format
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import (
    Attention,
    CompressedEntries,
    IndexKeys,
    MLALatent,
    RecurrentState,
    SharedKV,
    SlidingWindow,
    StateArray,
)
from kvlab.specs.reads import decode_reads

BF16 = get_format("bf16")
LATENT, INDEX = MLALatent(512, 64, BF16), IndexKeys(128, BF16)


def model(*layers) -> ModelSpec:
    return ModelSpec("test", "llama", tuple(LayerSpec(i, tuple(parts)) for i, parts in enumerate(layers)), 8, 2, 100)


def test_without_an_indexer_all_that_is_kept_is_read():
    state = RecurrentState("mamba2", (StateArray("ssm", ((2, 3),), 4, BF16),))
    spec = model([Attention(2, 8, 8, BF16)], [SlidingWindow(2, 8, 8, BF16, window=5)], [state], [LATENT])
    for n in (1, 4, 5, 6, 300):
        reads = decode_reads(spec, n)
        assert reads.read == reads.resident == n * 64 + min(n, 5) * 64 + 48 + n * 1152


def test_an_indexer_reads_every_key_and_few_latents():
    spec = model([LATENT, INDEX], [LATENT], [LATENT, INDEX])
    for n in (1, 7, 8, 9, 1000):
        reads = decode_reads(spec, n, top_k=8)
        assert reads.resident == n * (3 * 1152 + 2 * 256)
        # the second layer reads what the first chose
        assert reads.read == min(n, 8) * 3 * 1152 + n * 2 * 256


def test_deepseek_v32_at_128k_reads_a_fifth():
    reads = decode_reads(model(*[[LATENT, INDEX]] * 61), 131_072, top_k=2048)
    assert 0.19 < reads.read / reads.resident < 0.2


def test_compressed_entries_are_chosen_or_all_read():
    window, entries = SharedKV(16, 6, BF16), CompressedEntries(4, 16, BF16)
    spec = model([window, entries, IndexKeys(8, BF16, ratio=4)], [window, CompressedEntries(10, 16, BF16)])
    reads = decode_reads(spec, 103, top_k=3)
    assert reads.resident == (6 + 25 + 6 + 10) * 32 + 25 * 16
    assert reads.read == (6 + 3 + 6 + 10) * 32 + 25 * 16


@pytest.mark.parametrize("top_k", [None, 0])
def test_an_indexer_without_its_number_is_refused(top_k):
    with pytest.raises(ValueError, match="layer 1 has an indexer"):
        decode_reads(model([LATENT], [LATENT, INDEX]), 10, top_k)
    with pytest.raises(ValueError, match="tokens 0: must be positive"):
        decode_reads(model([LATENT]), 0)
