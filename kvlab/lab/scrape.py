"""What a /metrics endpoint says, kvlab's or a vLLM's: values, rates between two looks, quantiles of histograms."""

from __future__ import annotations

import contextlib
import time
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Scrape:
    """One look at an endpoint.

    Attributes:
        at: seconds of a clock that only moves forward.
        samples: value by (name as written out, labels).
    """

    at: float
    samples: dict[tuple[str, Labels], float] = field(repr=False)

    @classmethod
    def of(cls, text: str, at: float | None = None) -> Scrape:
        """The look at an exposition in Prometheus' text format. Lines that cannot be read are left out.

        Raises:
            ValueError: there is no line that can.
        """
        try:
            found = _samples(text)
        except ValueError as error:
            found = {}
            for line in text.splitlines():
                with contextlib.suppress(ValueError):
                    found |= _samples(line)
            if not found:
                raise ValueError(f"the answer is no exposition of metrics ({error})") from None
        return cls(time.monotonic() if at is None else at, found)

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of the series of that name with these labels (other labels summed over); None when there is none."""
        found = [value for (n, own), value in self.samples.items() if n == name and labels.items() <= set(own)]
        return sum(found) if found else None

    def mean(self, name: str) -> float | None:
        """The mean of the series of that name, of a share that each engine tells of itself; None when there is none."""
        found = [value for (n, _), value in self.samples.items() if n == name]
        return sum(found) / len(found) if found else None

    def values(self, name: str, label: str) -> dict[str, float]:
        """Sums by the value of one label."""
        found: dict[str, float] = {}
        for (n, own), value in self.samples.items():
            key = dict(own).get(label)
            if n == name and key is not None:
                found[key] = found.get(key, 0.0) + value
        return found

    def buckets(self, name: str, **labels: str) -> list[tuple[float, float]]:
        """(upper bound, observations up to it) of a histogram, cumulated, over all series with these labels."""
        found: dict[float, float] = {}
        for (n, own), value in self.samples.items():
            if n == f"{name}_bucket" and labels.items() <= set(own) and "le" in dict(own):
                bound = float(dict(own)["le"])
                found[bound] = found.get(bound, 0.0) + value
        return sorted(found.items())


def _samples(text: str) -> dict[tuple[str, Labels], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(url: str, timeout: float = 5.0) -> Scrape:
    """A look at the endpoint at `url` (an address ending in /metrics, or a server's).

    Raises:
        OSError: nobody answers there. ValueError: what answers is no exposition, or `url` is not http.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"url {url!r}: must begin with http:// or https://")
    address = url if url.endswith("/metrics") else f"{url.rstrip('/').removesuffix('/v1')}/metrics"
    with urllib.request.urlopen(address, timeout=timeout) as answer:
        return Scrape.of(answer.read().decode("utf-8"))


def grown(before: Scrape | None, after: Scrape, name: str, **labels: str) -> float | None:
    """How much a counter grew between two looks; None when the later one lacks it. A restarted one counts from 0."""
    now = after.total(name, **labels)
    if now is None:
        return None
    then = before.total(name, **labels) if before else None
    return now - then if then is not None and then <= now else now


def quantile(buckets: Iterable[tuple[float, float]], q: float) -> float | None:
    """The `q`-quantile of a cumulated histogram, linear within its bucket, as Prometheus' histogram_quantile.

    None without observations; the last finite bound when it lies beyond all bounds.
    """
    ordered = list(buckets)
    if not ordered or not ordered[-1][1]:
        return None
    rank, low, below = q * ordered[-1][1], 0.0, 0.0
    for bound, count in ordered:
        if count >= rank and count > below:
            return low if bound == float("inf") else low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return low


def difference(before: Scrape | None, after: Scrape, name: str, **labels: str) -> list[tuple[float, float]]:
    """The buckets of what a histogram observed between two looks."""
    then = dict(before.buckets(name, **labels)) if before else {}
    return [(bound, count - then.get(bound, 0.0)) for bound, count in after.buckets(name, **labels)]
