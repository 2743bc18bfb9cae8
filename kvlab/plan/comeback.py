"""Having a sequence's cache back: its bytes over a link, or its tokens computed again. Upper speeds on both sides."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.plan.plan import make_plan


@dataclass(frozen=True)
class Link:
    """A way into a GPU's memory.

    Attributes:
        name: for people.
        bytes_per_s: of data, one direction, on paper.
        per_gpu: whether each GPU has one of its own.
        source: who says so.
    """

    name: str
    bytes_per_s: float
    per_gpu: bool
    source: str


_PCIE = "PCI Express Base Specification {}: {} GT/s a lane, 128 of 130 bits are data, 16 lanes"
LINKS = {
    "pcie4": Link("host memory, PCIe 4 x16", 16e9 * 16 * 128 / 130 / 8, True, _PCIE.format("4.0, 2017", 16)),
    "pcie5": Link("host memory, PCIe 5 x16", 32e9 * 16 * 128 / 130 / 8, True, _PCIE.format("5.0, 2019", 32)),
    "nvme4": Link("one NVMe drive, PCIe 4", 7.4e9, False, "data sheet of a Samsung 990 Pro, 2022"),
    "nvme5": Link("one NVMe drive, PCIe 5", 14e9, False, "data sheets of PCIe 5 drives, 2024: 10 to 14.5 GB/s"),
}


@dataclass(frozen=True)
class ComeBack:
    """One sequence of `tokens` tokens, brought back or computed again.

    Attributes:
        num_bytes: of its cache, over all GPUs.
        link_s: seconds on the link. compute_s: seconds of a prefill at the GPUs' full rate.
    """

    tokens: int
    num_bytes: int
    link_s: float
    compute_s: float

    @property
    def ratio(self) -> float:
        """How many times as long computing takes; below 1 the link is slower."""
        return self.compute_s / self.link_s


def come_back(model, tokens: int, link: str = "pcie5", **options) -> ComeBack:
    """What bringing back or computing `tokens` tokens of `model` takes; `options` are those of `make_plan`.

    Raises:
        ValueError: an unknown link, or a plan that cannot be made.
    """
    if link not in LINKS:
        raise ValueError(f"link {link!r}: must be one of {', '.join(LINKS)}")
    plan = make_plan(model, context=tokens, **options).to_json()
    way = LINKS[link]
    moved = plan["kv_bytes_per_gpu"] if way.per_gpu else plan["kv_bytes"]
    return ComeBack(tokens, plan["kv_bytes"], moved / way.bytes_per_s, plan["timing"]["prefill"]["ms"] / 1e3)
