"""The roofline clock: how long a step of the scheduler takes on a machine that is not here.

A step reads the weights once, and each sequence's cache; it computes every token's products and attention. The longer
of bytes over bandwidth and operations over the arithmetic rate is its time (`kvlab.plan.timing`), plus a fixed cost that
`--calibrate` measures. Links between GPUs are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvlab.plan.plan import Plan
from kvlab.plan.timing import attention_operations, cache_read_bytes, step_time
from kvlab.schedule import Chunk
from kvlab.specs.model import LayerSpec, ModelSpec
from kvlab.specs.parts import CacheSpec


@dataclass(frozen=True)
class Machine:
    """What a step costs besides the model.

    Attributes:
        bandwidth: bytes per second. flops: operations per second.
        overhead_s: of every step. token_s: of every token of a step. sequence_s: of every sequence of a step.
        source: whose figures these are.
        name: of the machine where it is not the plan's GPU.
    """

    bandwidth: float
    flops: float
    overhead_s: float = 0.0
    token_s: float = 0.0
    sequence_s: float = 0.0
    source: str = ""
    name: str = ""


def machine_of(plan: Plan) -> Machine:
    """The plan's GPU at its vendor's rates.

    Raises:
        ValueError: its arithmetic rate is not published.
    """
    gpu = plan.options.hardware
    flops = gpu.flops(plan.options.weight_format.bits)
    if flops is None:
        raise ValueError(f"gpu {gpu.name!r}: its arithmetic rate is not published, and a prompt's time needs it")
    return Machine(gpu.bandwidth_bytes_per_s, flops, source=f"{gpu.name}, vendor's rates: {gpu.source}")


class StepClock:
    """Seconds of a step.

    Args:
        plan: of one GPU, or of several that split every layer (tp).
        machine: its rates; the plan's GPU when None.

    Raises:
        ValueError: pipeline or context parallel GPUs, or weights of unknown size.
    """

    def __init__(self, plan: Plan, machine: Machine | None = None) -> None:
        o = plan.options
        if o.pp > 1 or o.cp > 1:
            raise ValueError(f"pp {o.pp}, cp {o.cp}: must be 1, only tensor parallel GPUs are simulated")
        if plan.weights is None:
            raise ValueError(f"model {plan.model.name}: its weights cannot be counted ({plan.weights_problem})")
        self.plan, self.machine = plan, machine or machine_of(plan)
        w = plan.weights
        self._per_token = (w.read_always + w.moe_layers * w.per_expert * w.experts_per_token - w.lm_head) / o.tp
        self._per_sample = w.lm_head / o.tp
        self._read: dict[int, float] = {}
        stage, mla = plan.stages[0], plan.mla_dims
        self.cache_bytes = _summed(stage, cache_read_bytes)
        self.decode_operations = _summed(plan.model, lambda m, n: attention_operations(m, n, prompt=False))
        self.prompt_operations = _summed(plan.model, lambda m, n: attention_operations(m, n, prompt=True, mla_dims=mla))

    def weights_bytes(self, tokens: int) -> float:
        """Bytes of weights per GPU that a step of so many tokens reads: with experts, the expected distinct ones."""
        if tokens not in self._read:
            w, whole = self.plan.weights, self.plan.weights_bytes
            assert w is not None and whole is not None
            share = min(w.read_per_step(tokens), w.total + w.reread) / w.total
            self._read[tokens] = whole * share / self.plan.options.tp
        return self._read[tokens]

    def work(self, chunks: Sequence[Chunk]) -> tuple[float, int, float]:
        """(bytes of weights, bytes of cache, operations) per GPU of a step of these chunks."""
        ends, samples = [chunk.start + chunk.count for chunk in chunks], sum(chunk.samples for chunk in chunks)
        longer = [chunk for chunk in chunks if chunk.count != 1]
        single = ends if not longer else [chunk.start + 1 for chunk in chunks if chunk.count == 1]
        tokens = len(single) + sum(chunk.count for chunk in longer)
        cache, attention = sum(map(self.cache_bytes, ends)), sum(map(self.decode_operations, single))
        for chunk in longer:
            attention += self.prompt_operations(chunk.start + chunk.count) - self.prompt_operations(chunk.start)
        products = self._per_token * tokens + self._per_sample * samples
        return self.weights_bytes(tokens), cache, 2 * products + attention / self.plan.options.tp

    def seconds(self, chunks: Sequence[Chunk]) -> float:
        """Seconds of a step of these chunks; a machine may have infinite speed in one respect."""
        return self._seconds(self.work(chunks), sum(chunk.count for chunk in chunks), len(chunks))

    def timed(self, chunks: Sequence[Chunk]) -> tuple[float, str]:
        """Seconds of a step of these chunks, and what bounds it: "weights", "cache" or "compute"."""
        work, m = self.work(chunks), self.machine
        bound_by = step_time(*work, round(m.bandwidth), round(m.flops)).bound_by
        return self._seconds(work, sum(chunk.count for chunk in chunks), len(chunks)), bound_by

    def decode_seconds(self, lengths: Sequence[int]) -> float:
        """Seconds of a step in which sequences of these lengths, the new token included, decode."""
        count = len(lengths)
        cache, attention = sum(map(self.cache_bytes, lengths)), sum(map(self.decode_operations, lengths))
        products = self._per_token * count + self._per_sample * count
        operations = 2 * products + attention / self.plan.options.tp
        return self._seconds((self.weights_bytes(count), cache, operations), count, count)

    def _seconds(self, work: tuple[float, int, float], tokens: int, sequences: int) -> float:
        m = self.machine
        weights, cache, operations = work
        roofline = max((weights + cache) / m.bandwidth, operations / m.flops)
        return roofline + m.overhead_s + tokens * m.token_s + sequences * m.sequence_s


def _summed(model: ModelSpec, function: Callable[[ModelSpec, int], int]) -> Callable[[int], int]:
    """`function(model, tokens)` as a function of the tokens: each distinct part is asked once, each length once."""
    found = [(_alone(model, part), count) for part, count in _parts(model).items()]
    known = _Known(lambda tokens: sum(count * function(one, tokens) for one, count in found))
    known[0] = 0
    return known.__getitem__


class _Known(dict[int, int]):
    """What a function was found to be, asked for by the dict itself: most answers are known."""

    def __init__(self, function: Callable[[int], int]) -> None:
        super().__init__()
        self._function = function

    def __missing__(self, tokens: int) -> int:
        value = self[tokens] = self._function(tokens)
        return value


def _parts(model: ModelSpec) -> Counter[CacheSpec]:
    """How often each distinct part occurs; a layer that shares another's cache reads that layer's part again."""
    sources = {
        index: part for index, part in reversed(tuple(model.parts())) if part.kind not in ("shared", "recurrent")
    }
    parts = Counter()
    for _, part in model.parts():
        if part.kind == "shared":
            part = sources.get(part.source)  # type: ignore[attr-defined]
        if part is not None:
            parts[part] += 1
    return parts


def _alone(model: ModelSpec, part: CacheSpec) -> ModelSpec:
    return replace(model, layers=(LayerSpec(0, (part,)),))
