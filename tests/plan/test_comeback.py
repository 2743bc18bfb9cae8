"""Bringing a cache back against computing it again: both from exact bytes and operations."""

import pytest

from kvlab.plan.comeback import LINKS, come_back


def test_links_carry_the_data_bits_of_sixteen_lanes():
    assert round(LINKS["pcie4"].bytes_per_s) == 31_507_692_308
    assert LINKS["pcie5"].bytes_per_s == 2 * LINKS["pcie4"].bytes_per_s


def test_ten_gigabytes_of_a_70b_model():
    found = come_back("llama-3-70b", 61_035, "nvme5", kv_dtype="fp8", tp=2, gpu="h100")
    assert found.num_bytes == 9_999_974_400
    assert found.link_s == pytest.approx(10 / 14, rel=1e-4)
    # 6.6e15 operations on two GPUs of 989e12 each, as the plan has them
    assert found.compute_s == pytest.approx(6.69, rel=0.01) and found.ratio == pytest.approx(9.37, rel=0.01)
    # each GPU has its own link to the host, the drive is one for both
    assert come_back("llama-3-70b", 61_035, "pcie5", kv_dtype="fp8", tp=2, gpu="h100").link_s == pytest.approx(
        5e9 / 63.015e9, rel=1e-3
    )


def test_an_unknown_link_is_refused():
    with pytest.raises(ValueError, match="link 'pcie9': must be one of pcie4, pcie5, nvme4, nvme5"):
        come_back("llama-3-70b", 100, "pcie9")
