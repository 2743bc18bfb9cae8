"""The project's own table of sizes: pinned numbers, each with the arithmetic that gives it written out.

A derivation is a sum of products in plain integers, so that the table checks itself without kvlab:
layers x (K and V) x KV heads x head width x bytes. BF16 throughout, states in FP32, k - 1 convolution columns in BF16.
"""

from __future__ import annotations

from math import prod

import pytest

from kvlab.specs import catalogue
from kvlab.specs.families import from_config

# name | bytes per token for ever | bytes per token of windows, below them | state bytes
GOLDEN = """
llama-1-65b          | 80x2x64x128x2 = 2621440     |                        |
llama-2-7b           | 32x2x32x128x2 = 524288      |                        |
llama-2-70b          | 80x2x8x128x2 = 327680       |                        |
llama-3-8b           | 32x2x8x128x2 = 131072       |                        |
llama-3-70b          | 80x2x8x128x2 = 327680       |                        |
llama-3.1-405b       | 126x2x8x128x2 = 516096      |                        |
llama-3.2-1b         | 16x2x8x64x2 = 32768         |                        |
llama-3.2-90b-vision | 80x2x8x128x2 = 327680       |                        |
llama-4-scout        | 12x2x8x128x2 = 49152        | 36x2x8x128x2 = 147456  |
smollm2-135m         | 30x2x3x64x2 = 23040         |                        |
mistral-7b-v0.1      | 0                           | 32x2x8x128x2 = 131072  |
mistral-7b-v0.3      | 32x2x8x128x2 = 131072       |                        |
mixtral-8x7b         | 32x2x8x128x2 = 131072       |                        |
mixtral-8x22b        | 56x2x8x128x2 = 229376       |                        |
qwen2.5-0.5b         | 24x2x2x64x2 = 12288         |                        |
qwen2.5-7b           | 28x2x4x128x2 = 57344        |                        |
qwen2.5-72b          | 80x2x8x128x2 = 327680       |                        |
qwen3-0.6b           | 28x2x8x128x2 = 114688       |                        |
qwen3-4b             | 36x2x8x128x2 = 147456       |                        |
deepseek-v2          | 60x576x2 = 69120            |                        |
deepseek-v3          | 61x576x2 = 70272            |                        |
deepseek-v3.2        | 61x704x2 = 85888            |                        |
deepseek-v4-pro      | 30x320 + 31x8 = 9848        | 61x512x2 = 62464       |
glm-5.2              | 78x576x2 + 21x128x2 = 95232 |                        |
gemma-2-27b          | 23x2x16x128x2 = 188416      | 23x2x16x128x2 = 188416 |
gemma-3-270m         | 3x2x1x256x2 = 3072          | 15x2x1x256x2 = 15360   |
gemma-3-27b          | 10x2x16x128x2 = 81920       | 52x2x16x128x2 = 425984 |
gemma-3n-e2b         | 4x2x2x256x2 = 8192          | 16x2x2x256x2 = 32768   |
gemma-4-26b-a4b      | 5x2x2x512x2 = 20480         | 25x2x8x256x2 = 204800  |
gpt-oss-20b          | 12x2x8x64x2 = 24576         | 12x2x8x64x2 = 24576    |
gpt-oss-120b         | 18x2x8x64x2 = 36864         | 18x2x8x64x2 = 36864    |
phi-2                | 32x2x32x80x2 = 327680       |                        |
phi-3-medium-4k      | 0                           | 40x2x10x128x2 = 204800 |
falcon-7b            | 32x2x1x64x2 = 8192          |                        |
falcon-180b          | 80x2x8x64x2 = 163840        |                        |
bloom-176b           | 70x2x112x128x2 = 4014080    |                        |
starcoder-15b        | 40x2x1x128x2 = 20480        |                        |
glm-4-9b             | 40x2x2x128x2 = 40960        |                        |
minicpm3-4b          | 62x288x2 = 35712            |                        |
command-r-plus       | 64x2x8x128x2 = 262144       |                        |
qwen3-next-80b-a3b   | 12x2x2x256x2 = 24576        |                        | 36x8192x3x2 + 36x524288x4 = 77266944
kimi-linear-48b-a3b  | 7x576x2 = 8064              |                        | 20x12288x3x2 + 20x524288x4 = 43417600
jamba-1.5-mini       | 4x2x8x128x2 = 16384         |                        | 28x8192x3x2 + 28x131072x4 = 16056320
zamba2-7b            | 13x2x32x224x2 = 372736      |                        | 81x7424x3x2 + 81x458752x4 = 152243712
falcon-h1-7b         | 44x2x2x128x2 = 45056        |                        | 44x3584x3x2 + 44x786432x4 = 139358208
nemotron-h-8b        | 4x2x8x128x2 = 16384         |                        | 24x10240x3x2 + 24x1048576x4 = 102137856
falcon-mamba-7b      | 0                           |                        | 64x8192x3x2 + 64x131072x4 = 36700160
lfm2-2.6b            | 8x2x8x64x2 = 16384          |                        | 22x2048x2x2 = 180224
minimax-m1           | 10x2x8x128x2 = 40960        |                        | 70x64x128x128x4 = 293601280
"""


def _pinned(cell: str) -> int:
    """The number of a cell, after checking that its derivation gives it."""
    derivation, _, value = cell.strip().rpartition("= ")
    if derivation:
        terms = [prod(int(x) for x in term.split("x")) for term in derivation.split("+")]
        assert sum(terms) == int(value), cell
    return int(value or 0)


ROWS = [[cell.strip() for cell in line.split("|")] for line in GOLDEN.strip().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_golden(row: list[str]) -> None:
    growing, windowed, state = (_pinned(cell) for cell in (*row[1:], "", "", "")[:3])
    model = from_config(catalogue.get(row[0]))
    assert (model.bytes_per_token, model.bytes_per_token_short) == (growing, growing + windowed)
    assert model.state_bytes == state


def test_the_table_covers_what_the_style_guide_pins() -> None:
    assert len(ROWS) >= 25
    assert {"llama-3-70b", "qwen3-0.6b", "qwen3-4b", "deepseek-v3", "gpt-oss-120b", "gemma-3-27b"} <= {
        r[0] for r in ROWS
    }


def test_gpt_oss_120b_would_take_73728_bytes_per_token_if_all_layers_kept_everything() -> None:
    assert from_config(catalogue.get("gpt-oss-120b")).bytes_per_token_short == 73_728


def test_gemma_3_27b_at_131072_tokens_takes_10_406_gib() -> None:
    model = from_config(catalogue.get("gemma-3-27b"))
    assert model.bytes_at(131_072) == 10 * 2**30 + 52 * 1024 * 8192 == 11_173_625_856
    assert f"{model.bytes_at(131_072) / 2**30:.3f}" == "10.406"


def test_a_window_binds_from_its_own_length_on() -> None:
    model = from_config(catalogue.get("mistral-7b-v0.1"))
    assert [model.bytes_at(n) for n in (0, 1, 4095, 4096, 4097, 32_768)] == [
        0, 131_072, 4095 * 131_072, 2**29, 2**29, 2**29,
    ]  # fmt: skip


def test_deepseek_v4_open_buffers_are_counted_apart() -> None:
    # HCA: 127 waiting tokens of kv and gate, 512 wide. CSA: 3 of 2 x 512 and 4 of 512, the same at 128 for the index
    hca = 2 * 127 * 512 * 2
    csa = 2 * (3 * 1024 + 4 * 512) * 2 + 2 * (3 * 256 + 4 * 128) * 2
    model = from_config(catalogue.get("deepseek-v4-pro"))
    assert model.buffer_bytes == 31 * hca + 30 * csa == 8_830_976
    assert model.bytes_at(4096, buffers=True) - model.bytes_at(4096) == model.buffer_bytes
