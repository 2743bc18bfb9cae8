"""Products, norms and the fused halves of a layer against plain torch in fp64."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_close

from kvlab.ops import numba_support
from kvlab.ops.linear import linear
from kvlab.ops.mlp import MLPWeights, mlp
from kvlab.ops.norm import rms_norm
from kvlab.ops.qkv import QKVWeights, qkv
from kvlab.ops.rope import rope
from kvlab.ops.silu_mul import silu_mul

ROWS = [1, 2, 3, 4, 5, 15, 17, 63, 193, 301]


@pytest.fixture(params=["reference", "cpu"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu" and not numba_support.available():
        pytest.skip("Numba is not installed")
    monkeypatch.setenv("KVLAB_OPS", request.param)
    return request.param


def norm64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", [(1, 1), (63, 111), (16, 576), (17, 80), (6, 15)], ids=str)
def test_linear(rows: int, shape: tuple[int, int]) -> None:
    # one value of an unlucky draw may cancel to nearly nothing
    torch.manual_seed(1000 * rows + shape[1])
    x, weight, bias = torch.randn(rows, shape[1]), torch.randn(shape), torch.randn(shape[0])
    residual = torch.randn(rows, shape[0])
    product = x.double() @ weight.double().T
    assert_close("plain", product, linear(x, weight), "fp32")
    assert_close("bias", product + bias, linear(x, weight, bias), "fp32")
    kept = residual.clone()
    assert_close("residual", product + bias + residual, linear(x, weight, bias, residual), "fp32")
    assert torch.equal(residual, kept), "the residual is the caller's"


def test_linear_of_a_strided_row_and_of_none() -> None:
    x, weight = torch.randn(3, 40)[:, ::2], torch.randn(7, 20)
    assert_close("strided", x.double() @ weight.double().T, linear(x, weight), "fp32")
    assert linear(torch.randn(0, 20), weight).shape == (0, 7)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_linear_does_not_hide_nan_or_infinity(rows: int, bad: float) -> None:
    x = torch.randn(rows, 20)
    x[0, 3] = bad
    y = linear(x, torch.randn(7, 20))
    assert not torch.isfinite(y[0]).any() and torch.isfinite(y[1:]).all()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "bias-qk_norm-partial_rotation"])
def test_qkv(rows: int, extras: bool) -> None:
    hidden, heads, kv_heads, dim, eps = 75, 5, 1, 16, 1e-5
    total = heads + 2 * kv_heads
    bias, q_norm, k_norm = torch.randn(total * dim), torch.randn(dim), torch.randn(dim)
    optional = (bias, q_norm, k_norm) if extras else (None, None, None)
    w = QKVWeights(torch.randn(hidden), torch.randn(total * dim, hidden), *optional, eps, heads, kv_heads, dim)
    angles = torch.randn(50, 4 if extras else 8)
    positions = torch.randint(0, 50, (rows,))
    x = torch.randn(rows, hidden)
    q, k, v = qkv(x, w, angles.cos(), angles.sin(), positions)
    want = norm64(x, w.norm, eps) @ w.weight.double().T + (bias.double() if extras else 0)
    want = want.view(rows, total, dim)
    if extras:
        want[:, :heads] = norm64(want[:, :heads], q_norm, eps)
        want[:, heads : heads + 1] = norm64(want[:, heads : heads + 1], k_norm, eps)
    rotated = rotate64(want[:, : heads + 1], angles[positions])
    assert_close("q", rotated[:, :heads], q, "fp32")
    assert_close("k", rotated[:, heads:], k, "fp32")
    assert_close("v", want[:, heads + 1 :], v, "fp32")


def rotate64(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Each pair (i, i + R / 2) as a complex number times e^(i angle)."""
    half = angles.shape[1]
    pairs = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
    turned = pairs * torch.polar(torch.ones_like(angles, dtype=torch.float64), angles.double())[:, None]
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :].double()), -1)


def test_rope_turns_pairs_and_leaves_the_rest() -> None:
    x, angles = torch.randn(6, 3, 20), torch.randn(9, 7)
    positions = torch.tensor([8, 0, 3, 3, 1, 7])
    out = rope(x, angles.cos(), angles.sin(), positions)
    assert_close("rope", rotate64(x, angles[positions]), out, "fp32")
    assert torch.equal(out[..., 14:], x[..., 14:])


def test_rope_of_interleaved_pairs_turns_neighbours() -> None:
    x, angles, positions = torch.randn(6, 3, 20), torch.randn(9, 7), torch.tensor([8, 0, 3, 3, 1, 7])
    out = rope(x, angles.cos(), angles.sin(), positions, interleaved=True)
    pairs = torch.view_as_complex(x[..., :14].double().unflatten(-1, (7, 2)))
    turned = pairs * torch.polar(torch.ones_like(angles, dtype=torch.float64), angles.double())[positions][:, None]
    assert_close("rope", torch.cat((torch.view_as_real(turned).flatten(-2), x[..., 14:].double()), -1), out, "fp32")


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("biases", [False, True])
def test_mlp(rows: int, biases: bool) -> None:
    hidden, width, eps = 75, 53, 1e-6
    extra = (torch.randn(2 * width), torch.randn(hidden)) if biases else (None, None)
    w = MLPWeights(torch.randn(hidden), torch.randn(2 * width, hidden) / 8, torch.randn(hidden, width), eps, *extra)
    x = torch.randn(rows, hidden)
    kept = x.clone()
    gate, up = (norm64(x, w.norm, eps) @ w.gate_up.double().T + (extra[0].double() if biases else 0)).chunk(2, -1)
    want = x.double() + gate / (1 + (-gate).exp()) * up @ w.down.double().T + (extra[1].double() if biases else 0)
    assert_close("mlp", want, mlp(x, w), "fp32")
    assert torch.equal(x, kept), "the residual stream is the caller's"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rms_norm_keeps_the_dtype(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 2, 64).to(dtype), torch.randn(64).to(dtype)
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    name = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16"}[dtype]
    assert_close("norm", norm64(x, weight, 1e-5), out, name)


def test_silu_mul() -> None:
    gate, up = torch.randn(2, 5, 33)
    assert_close("silu", gate.double() / (1 + (-gate.double()).exp()) * up, silu_mul(torch.cat((gate, up), 1)), "fp32")
    extreme = silu_mul(torch.tensor([[-1e4, 1e4, 1.0, 1.0]]))
    assert torch.equal(extreme, torch.tensor([[0.0, 1e4]]))


def test_rows_of_the_cores_are_whole_groups_and_no_row_is_alone() -> None:
    if not numba_support.available():
        pytest.skip("Numba is not installed")
    from kvlab.ops.linear.cpu import CHUNK, GROUP, chunk_rows

    for threads in (1, 2, 3, 16, 64):
        for rows in range(192, 1500):
            size = chunk_rows.py_func(rows, threads)
            assert size % GROUP == 0 and size <= CHUNK + 3 * GROUP and rows % size != 1, (rows, threads)


@pytest.mark.parametrize("rows", [191, 193, 301])
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(rows: int, backend: str) -> None:
    if backend != "cpu":
        pytest.skip("torch's product promises no such thing")
    x, weight = torch.randn(rows, 80), torch.randn(36, 80)
    whole = linear(x, weight)
    assert torch.equal(whole[-5:], linear(x[-5:], weight)) and torch.equal(whole[:40], linear(x[:40], weight))
