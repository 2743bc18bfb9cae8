"""Upper bounds of the histograms: vLLM's own, so that one dashboard reads both.

Source: vLLM 0.33 v1/metrics/loggers.py.
"""

from __future__ import annotations

TTFT_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20)
PREEMPTIONS = (0, 1, 2, 3, 5, 10, 20, 50)
CONTEXTS = (128, 512, 2048, 8192, 32768, 131072)
"""Prompt tokens up to which a request belongs to a context bucket; longer ones are in the last."""


def tokens_up_to(longest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `longest`."""
    found, unit = [], 1
    while unit <= longest:
        found += [unit * step for step in (1, 2, 5) if unit * step <= longest]
        unit *= 10
    return tuple(found)


def context_label(prompt_tokens: int) -> str:
    """The context bucket of a prompt: "0-128", "129-512", ..., "131073+"."""
    low = 0
    for high in CONTEXTS:
        if prompt_tokens <= high:
            return f"{low}-{high}"
        low = high + 1
    return f"{low}+"
