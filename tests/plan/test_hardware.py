"""The hardware catalogue: complete, plausible, and honest about where its figures come from."""

import pytest

from kvlab.plan.hardware import GPUS, get_gpu


@pytest.mark.parametrize(
    "name",
    [
        "a100",
        "h100",
        "h200",
        "b200",
        "l40s",
        "rtx4090",
        "rtx5090",
        "RTX 4090",
        "mi300x",
        "mi325x",
        "mi355x",
        "m2-ultra",
    ],
)
def test_the_usual_names_are_understood(name):
    assert get_gpu(name).memory_bytes > 20 * 10**9


def test_an_h200_has_what_its_driver_reports():
    gpu = get_gpu("h200")
    assert gpu.memory_bytes == 143_771 * 2**20 == 150_754_820_096
    assert (gpu.marketing_memory, gpu.memory_basis) == ("141 GB", "driver, 143,771 MiB")
    assert gpu.bandwidth_bytes_per_s == 4_800 * 10**9


def test_every_row_is_complete_and_in_range():
    aliases = [a for gpu in GPUS.values() for a in (gpu.name, *gpu.aliases)]
    assert len(aliases) == len(set(aliases))
    for gpu in GPUS.values():
        marketing = int(gpu.marketing_memory.split()[0])
        # the driver's figure lies between the GB and the GiB that the name may mean, but for ECC and firmware
        assert 0.93 * marketing * 10**9 < gpu.memory_bytes <= 1.004 * marketing * 2**30, gpu.name
        assert gpu.memory_basis.split(",")[0].startswith(("driver", "marketing figure", f"{marketing} GiB")), gpu.name
        assert 100 * 10**9 <= gpu.bandwidth_bytes_per_s <= 10 * 10**12
        assert gpu.source
        if gpu.fp8_flops:
            assert 1.9 < gpu.fp8_flops / gpu.bf16_flops < 2.1, gpu.name


def test_eight_bit_weights_use_eight_bit_units_where_there_are_any():
    h100, a100 = get_gpu("h100"), get_gpu("a100")
    assert h100.flops(8) == h100.fp8_flops
    assert h100.flops(16) == h100.bf16_flops
    assert a100.flops(8) == a100.bf16_flops
    assert get_gpu("m4").flops(16) is None


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"gpu 'h1000': must be one of a100-40gb, .*h200"):
        get_gpu("h1000")
