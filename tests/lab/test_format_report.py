"""What `kvlab formats` counts and measures."""

from __future__ import annotations

import pytest
import torch

from kvlab.lab.format_report import bits_held, bits_per_value, planted, relative_error, report, stored_again
from kvlab.lab.small_model import small_model
from kvlab.specs.fixed_scales import FIXED, SHARES, fixed_scale_bytes
from kvlab.specs.formats import FORMATS
from kvlab.specs.kv_dtypes import with_formats


@pytest.mark.parametrize(
    ("name", "real"),
    [("bf16", 16.0), ("int8", 8.5), ("int4", 4.5), ("int4_g32", 5.0), ("int4_sym_g32", 4.5),
     ("int8_g32", 8.5), ("int8_asym_g32", 9.0), ("nvfp4", 4.5), ("mxfp4", 4.25), ("kivi2", 3.0),
     ("int3_had", 3.5)],
)  # fmt: skip
def test_real_bits_at_64_values_a_head(name: str, real: float) -> None:
    assert bits_per_value(name, 3, 64)[0] == real
    assert bits_per_value(name, 3, 64)[1] >= real


@pytest.mark.parametrize(
    ("name", "tokens", "held"),
    [("int4", 768, 4.5), ("int4", 1, 4.5),
     # the last 160 tokens are kept in bf16 too, and before the first group of 32 is whole they are all there is
     ("kivi4", 31, 16.0), ("kivi4", 32, 21.0), ("kivi4", 768, 5 + 16 * 160 / 768), ("kivi2", 32_768, 3 + 16 * 160 / 32_768)],
)  # fmt: skip
def test_what_a_sequence_holds_counts_the_recent_window(name: str, tokens: int, held: float) -> None:
    assert bits_held(name, 3, 64, tokens) == pytest.approx(held, rel=1e-12)


def test_padding_of_short_rows_is_counted() -> None:
    """Rows of 24 bytes are padded to 32: int3 takes no less room in a page than int4 at 64 values."""
    assert bits_per_value("int3_had", 3, 64)[1] == bits_per_value("int4_had", 3, 64)[1] == 4.5


def test_more_bits_lose_less_and_every_lossy_format_loses_something() -> None:
    rows = planted()
    error = {n: relative_error(rows, stored_again(n, rows, rows)[0]) for n in FORMATS if n != "fp64"}
    assert error["fp32"] == 0.0
    assert all(error[n] > 0 for n in error if n != "fp32")
    assert error["fp16"] < error["bf16"] < error["int8"] < error["int4"]
    assert error["kivi4"] < error["kivi2"] and error["fp8_e4m3"] < error["fp8_e5m2"]


def test_groups_give_back_whole_groups_only() -> None:
    rows = planted(tokens=70)
    key, value = stored_again("kivi4", rows, rows)
    assert key.shape == value.shape == (64, 2, 64)
    assert relative_error(rows, torch.zeros(64, 2, 64)) == pytest.approx(1.0)


def test_fp8_has_a_row_for_each_way_to_share_a_scale_and_every_row_says_what_the_cpu_does(monkeypatch) -> None:
    """A finer share loses no more; its bytes beside the pool are those of a plan."""
    monkeypatch.setenv("KVLAB_OPS", "torch")
    model = small_model()
    rows = {row.name: row for row in report(model, ids=[3 + 7 * i % 61 for i in range(40)])}
    assert set(rows) == {n for n in FORMATS if n != "fp64"} | {f"{n}/{share}" for n in FIXED for share in SHARES}
    for name in FIXED:
        spec = with_formats(model.spec, name)
        for share in SHARES:
            assert f" {fixed_scale_bytes(spec, share):,} bytes beside the pool" in rows[f"{name}/{share}"].note
            assert 0 < rows[f"{name}/{share}"].key <= 1.1 * rows[name].key
    in_place = {
        "fp32",
        "bf16",
        "fp16",
        "fp8_e4m3",
        "fp8_e4m3_row",
        "int8",
    }  # heads of 12 values: no whole words of int4
    assert {name for name, row in rows.items() if row.cpu == "in place"} == in_place
    assert {row.cpu for row in rows.values()} == {"in place", "gathered"}
    assert {name for name, row in rows.items() if row.gpu} == {"int3_had", "kvquant3"}
