"""The bit moves of CPU kernels against torch's casts: every code of every narrow format."""

from __future__ import annotations

import numpy as np
import pytest
import torch

numba = pytest.importorskip("numba", reason="Numba is not installed")

from kvlab.ops.numba_support import kernel  # noqa: E402
from kvlab.quant.rows import row_floats  # noqa: E402


@kernel()
def _decode(codes, is_bf16, bits, out):
    row = row_floats(codes, is_bf16, bits)
    for d in range(codes.shape[0]):
        out[d] = row[d]


def decoded(codes: np.ndarray, is_bf16: bool = False) -> torch.Tensor:
    out = np.empty(codes.shape[0], np.float32)
    _decode(codes, is_bf16, np.empty(codes.shape[0], np.uint32), out)
    return torch.from_numpy(out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_16_bit_codes(dtype: torch.dtype) -> None:
    codes = np.arange(2**16, dtype=np.uint16)
    want = torch.from_numpy(codes.view(np.int16)).view(dtype).float()
    torch.testing.assert_close(decoded(codes, dtype == torch.bfloat16), want, rtol=0, atol=0, equal_nan=True)


def test_all_fp8_codes() -> None:
    codes = np.arange(256, dtype=np.uint8)
    want = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(decoded(codes), want, rtol=0, atol=0, equal_nan=True)


def test_int8_and_fp32() -> None:
    codes = np.arange(-128, 128, dtype=np.int8)
    assert torch.equal(decoded(codes), torch.from_numpy(codes).float())
    row = np.random.default_rng(0).standard_normal(111, dtype=np.float32)
    assert torch.equal(decoded(row), torch.from_numpy(row))
