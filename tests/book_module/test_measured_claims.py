"""The relations behind the claims that were measured, and the library facts that the ledger quotes."""

from __future__ import annotations

import inspect
from collections import deque

import pytest


class ConcatenatingCache:
    """Keeps keys by concatenation, as the guide's sketch does."""

    def __init__(self) -> None:
        self.k = None

    def append(self, torch, k):
        self.k = k if self.k is None else torch.cat([self.k, k], dim=2)
        return self.k


def test_a_concatenated_cache_grows_by_one_along_the_sequence() -> None:
    torch = pytest.importorskip("torch")
    cache, tokens = ConcatenatingCache(), [torch.randn(1, 3, 1, 7) for _ in range(5)]
    for i, token in enumerate(tokens):
        grown = cache.append(torch, token)
        assert grown.shape == (1, 3, i + 1, 7)
    assert torch.equal(grown, torch.cat(tokens, dim=2))


def test_concatenation_moves_what_was_there() -> None:
    torch = pytest.importorskip("torch")
    cache = ConcatenatingCache()
    before = cache.append(torch, torch.randn(1, 3, 4, 7))
    after = cache.append(torch, torch.randn(1, 3, 1, 7))
    assert after.data_ptr() != before.data_ptr() and torch.equal(after[:, :, :4], before)


def test_transformers_caches_unless_told_not_to() -> None:
    transformers = pytest.importorskip("transformers")
    assert transformers.LlamaConfig().use_cache is True
    defaults = transformers.GenerationConfig._get_default_generation_params()
    assert defaults["use_cache"] is True


def test_transformers_does_not_speculate_by_default_and_has_learned_sparse_attention() -> None:
    transformers = pytest.importorskip("transformers")
    assert inspect.signature(transformers.GenerationMixin.generate).parameters["assistant_model"].default is None
    from transformers.models.deepseek_v32 import modeling_deepseek_v32

    assert inspect.isclass(modeling_deepseek_v32.DeepseekV32Indexer)


def rounding_error(torch, kind: str, x):
    """Root of the mean squared relative error of a round trip through an 8-bit float."""
    back = x.to(getattr(torch, kind)).float()
    return float(((back - x) / x).square().mean().sqrt())


def test_e4m3_rounds_twice_as_finely_as_e5m2_and_reaches_less_far() -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    x = x[x.abs() > 2**-6]  # where both formats are normal
    fine, coarse = (rounding_error(torch, kind, x) for kind in ("float8_e4m3fn", "float8_e5m2"))
    assert 1.9 < coarse / fine < 2.1
    assert (torch.finfo(torch.float8_e4m3fn).max, torch.finfo(torch.float8_e5m2).max) == (448, 57344)


def test_the_snippets_six_values_in_four_bits() -> None:
    torch = pytest.importorskip("torch")
    values = torch.tensor([-1.0, -0.55, -0.1, 0.25, 0.6, 1.0], dtype=torch.float64)
    codes = (values / (values.abs().max() / 7)).round()
    assert codes.tolist() == [-7, -4, -1, 2, 4, 7]
    assert (codes / 7).round(decimals=3).tolist() == [-1.0, -0.571, -0.143, 0.286, 0.571, 1.0]
    assert (len(values) * 16, len(values) * 4) == (96, 24)


def test_an_extreme_value_costs_its_row_the_precision_of_the_others() -> None:
    torch = pytest.importorskip("torch")
    from kvlab.quant import get_codec

    codec = get_codec("int8")
    row = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    extreme = row.clone()
    extreme[0, 5] = 100.0
    errors = [(codec.decode(*codec.encode(x)) - x)[:, 6:].abs().mean() for x in (row, extreme)]
    assert errors[1] > 20 * errors[0]


def test_the_error_of_a_score_does_not_depend_on_its_position() -> None:
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    keys, query = torch.randn(8192, 64, generator=generator), torch.randn(64, generator=generator)
    scale = keys.abs().amax(-1, keepdim=True) / 7
    error = ((keys / scale).round() * scale - keys) @ query
    early, late = error[:4096].std(), error[4096:].std()
    assert abs(early / late - 1) < 0.1


def test_pages_of_two_that_left_serve_one_that_is_longer_than_either() -> None:
    from kvlab.cache.pool import BlockPool

    pool = BlockPool(7)
    first, stays, second = pool.allocate(2), pool.allocate(2), pool.allocate(2)
    pool.free(first)
    pool.free(second)
    longer = pool.allocate(4)
    assert sorted(longer) == sorted(first + second) and not set(longer) & set(stays)


def test_two_places_and_three_caches_first_in_first_out() -> None:
    gpu, host = deque(["a", "b"]), []

    def needs_room(cache: str) -> None:
        if cache in host:
            host.remove(cache)
        host.append(gpu.popleft())
        gpu.append(cache)

    needs_room("c")
    assert (list(gpu), host) == (["b", "c"], ["a"])
    needs_room("a")
    assert (list(gpu), host) == (["c", "a"], ["b"])


def test_the_snippets_six_of_ten_tokens() -> None:
    attended = {0: 9.0, 1: 0.2, 2: 4.0, 3: 0.1, 4: 0.3, 5: 6.0, 6: 0.2, 7: 0.4, 8: 0.1, 9: 0.2}
    recent = set(attended) - set(range(8))
    heavy = set(sorted(set(attended) - recent, key=attended.__getitem__)[-4:])
    assert (heavy, recent) == ({0, 2, 5, 7}, {8, 9}) and len(heavy | recent) == 6


def test_what_a_cast_makes_of_what_is_too_large_depends_on_the_format() -> None:
    torch = pytest.importorskip("torch")
    large = torch.tensor([1000.0, 1e6])
    assert large.to(torch.float8_e4m3fn).float().tolist() == [448, 448]
    wide = large.to(torch.float8_e5m2).float()
    assert wide[0] == 1024 and wide[1].isinf()
    assert (wide[1] - wide[1]).isnan()


def test_fp8_moves_the_recorded_distributions_a_little_and_not_by_nothing() -> None:
    from kvlab.book import load_result

    divergence = load_result("quality_kv_formats")["formats"]["fp8_e4m3"]["kl"]
    assert 0 < divergence["band95"][0] < divergence["band95"][1] < 0.02


def test_of_the_two_8_bit_floats_e4m3_moves_the_recorded_distributions_less() -> None:
    from kvlab.book import load_result

    recorded = load_result("quality_kv_formats")
    formats = recorded["formats"]
    for fine, coarse in (("fp8_e4m3", "fp8_e5m2"), ("fp8_e4m3_row", "fp8_e5m2_row")):
        assert formats[fine]["kl"]["band95"][1] < formats[coarse]["kl"]["band95"][0]
