"""How far an operation may be from its oracle, in one table, and the one function that compares."""

from __future__ import annotations

import torch

# largest root-mean-square error as a fraction of the oracle's root mean square, and why so much
TOLERANCES: dict[str, tuple[float, str]] = {
    "exact": (0.0, "the same bits: only copies, or the same arithmetic in the same order"),
    "fp64": (1e-14, "rounding of fp64 sums of up to a few hundred terms"),
    "fp32": (2e-6, "fp32 sums in another order: a few units of 6e-8, growing with the square root of the terms"),
    "bf16": (6e-3, "the result is rounded to 8 bits of mantissa: half a unit is 2e-3, plus rounded inputs"),
    "bf16 cut": (1.2e-2, "Triton's interpreter cuts fp32 to bf16 where a device rounds it: a whole unit of 8 bits"),
    "bf16 state cut": (3e-2, "a state is cut to 8 bits after each token, over a few tokens"),
    "fp16": (8e-4, "the result is rounded to 11 bits of mantissa"),
    "fp16 products": (2e-3, "weights and decoded values are rounded to 11 bits before the product, the result again"),
}


def assert_close(name: str, reference: torch.Tensor, out: torch.Tensor, tolerance: str) -> None:
    """Fails where `out` is not finite, has another shape, or is further from `reference` than the table allows."""
    assert out.shape == reference.shape, f"{name}: shape {tuple(out.shape)}, expected {tuple(reference.shape)}"
    assert torch.isfinite(out).all(), f"{name}: {int((~torch.isfinite(out)).sum())} values are not finite"
    limit, reason = TOLERANCES[tolerance]
    wide, want = out.double(), reference.double()
    error = (wide - want).square().mean().sqrt() / want.square().mean().sqrt().clamp_min(1e-30)
    assert error <= limit, f"{name}: error {error:.2e} of the oracle's size, allowed {limit:.0e} ({reason})"
    # a single value far off must not hide in the mean
    worst = (wide - want).abs().max() / want.abs().max().clamp_min(1e-30)
    assert worst <= 20 * limit, f"{name}: worst value off by {worst:.2e} of the largest, allowed {20 * limit:.0e}"
