"""What having a preempted sequence back costs on this machine: the link to host memory and a prefill, both measured.

The figures that `kvlab.schedule.SwapCosts` compares by, in about a second: the shortest of a few copies, and one step of
a prompt after a first one that warmed up. A prefill's rate is its operations, as `swap_costs` counts them, over its time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from kvlab.engine import Engine, SamplingParams
from kvlab.engine.kv_formats import kv_formats
from kvlab.engine.tiers import swap_costs
from kvlab.lab.transfers import memory_speed
from kvlab.models.load import LoadedModel
from kvlab.plan.policies import default_block_size

COPIED = 2**26
SMALL = 2**12
PROMPT = {"cpu": 128, "cuda": 1024}


@dataclass(frozen=True)
class SwapRates:
    """Measured here.

    Attributes:
        link_bytes_per_s: one way between the model's device and host memory. latency_s: of a copy of a few bytes.
        flops: operations per second of a prefill.
    """

    link_bytes_per_s: float
    latency_s: float
    flops: float


def measure_swap_rates(model: LoadedModel) -> SwapRates:
    """The rates of `model` on its device; takes memory for a copy of 64 MiB and one short sequence."""
    device = model.decoder.device
    tokens = min(PROMPT.get(device.type, 128), model.config.max_position - 1)
    operations = swap_costs(model, 1, 1).operations(tokens)
    rates = SwapRates(
        memory_speed(COPIED, device), SMALL / memory_speed(SMALL, device), operations / _prefill_s(model, tokens)
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what was measured with is free again before a pool is sized
    return rates


def _prefill_s(model: LoadedModel, tokens: int) -> float:
    """Seconds of one step that computes a prompt of so many tokens, the second of its kind."""
    engine = Engine(
        model, block_size=default_block_size(kv_formats(model, None)[1]), max_num_seqs=1, max_batched_tokens=tokens,
        max_model_len=tokens + 1,
    )  # fmt: skip
    seconds = 0.0
    for first in (0, 1):
        # other tokens each time, and none that a small vocabulary lacks
        prompt = [(first + i) % model.config.vocab_size for i in range(tokens)]
        engine.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        start = time.perf_counter()
        while engine.requests:
            engine.step()
        seconds = time.perf_counter() - start
    return seconds
