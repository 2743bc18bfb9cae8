"""How a chapter meets an architecture: a shrunken model of its family runs in the engine, and against transformers.

The small model has the real one's pattern of layers and random weights; see `kvlab.lab.parity`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvlab.book.session import say, table
from kvlab.specs.families import from_config
from kvlab.specs.families.multimodal import text_part
from kvlab.specs.model import ModelSpec
from kvlab.specs.resolve import resolve

BLOCK = 4  # tokens a page and tokens a step: small, so that short runs fill several pages


def config_of(name: str, **changed: Any) -> dict[str, Any]:
    """The config of a named model's text decoder, fields replaced by `changed`."""
    text, model_type = text_part(resolve(name).config)
    return {**text, "model_type": model_type, **changed}


def spec_of(name: str, **changed: Any) -> ModelSpec:
    """The cache of a named model, fields of its config replaced by `changed`."""
    return from_config(config_of(name, **changed), name=name)


@cache
def tiny(name: str, **changed: Any) -> Any:
    """The shrunken, randomly filled model of a named one's family, as the engine loads it.

    Raises:
        ValueError: the engine does not run this family.
    """
    from kvlab.lab.parity import compare
    from kvlab.lab.parity.oracle import Oracle
    from kvlab.lab.parity.shrink import shrink
    from kvlab.lab.parity.weights import first_eps, randomize
    from kvlab.models.facts import ModelConfig
    from kvlab.models.load import from_state_dict

    small = shrink(config_of(name)).config | changed
    oracle = Oracle(small)
    randomize(oracle, first_eps(ModelConfig.from_hf(small)), 0, compare.prompts(0)[0])
    return from_state_dict(small, oracle.state())


@dataclass(frozen=True)
class Run:
    """Bytes of one run: entries as the spec has them and as the engine held them, pages as planned and as torch has."""

    tokens: int
    predicted: int
    held: int
    planned: int
    allocated: int


def run_once(model: Any, tokens: int, seed: int = 0) -> Run:
    """A prompt of `tokens` tokens, a few at a step, through an engine whose pool is planned for just that.

    Raises:
        ValueError: the planned pool does not hold it.
    """
    from kvlab.engine import Engine, SamplingParams
    from kvlab.plan.policies import PolicySettings, default_block_size, sequence_bytes
    from kvlab.specs.kv_dtypes import with_formats

    spec = with_formats(model.spec, "fp32")
    block = default_block_size(spec, BLOCK)
    paged = sequence_bytes(spec, tokens, PolicySettings("paged", block, BLOCK))
    planned = paged.total + paged.pool_overhead
    blocks = tuple(group.pages + 1 for group in paged.groups)
    engine = Engine(
        model, kv_dtype="fp32", block_size=block, num_blocks=blocks, max_model_len=tokens + 1, max_num_seqs=1,
        max_batched_tokens=BLOCK,
    )  # fmt: skip
    prompt = random.Random(seed).choices(range(3, model.config.vocab_size), k=tokens)
    done = engine.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))[0]
    if done.error:
        raise ValueError(done.error)
    held, allocated = engine.kv.peak_used_bytes, engine.kv.allocated_bytes
    return Run(tokens, spec.bytes_at(tokens, buffers=True), held, planned, allocated)


def meet(name: str, lengths: Sequence[int], model: Any = None) -> list[Run]:
    """The runs of the small model at `lengths` (of `model` if given), as a table: bytes predicted beside bytes measured.

    Raises:
        ValueError: predicted and measured differ, or the engine does not run this family.
    """
    from kvlab.plan.policies import default_block_size

    model = model or tiny(name)
    runs = [run_once(model, n) for n in lengths]
    table(
        [(r.tokens, r.predicted, r.held, r.planned, r.allocated) for r in runs],
        ("tokens", "spec: entries", "engine: held", "plan: pages", "torch: allocated"),
        caption=f"Bytes of one sequence in fp32, a small {name}: {len(model.spec.layers)} layers, pages of "
        f"{default_block_size(model.spec, BLOCK)} tokens and a null page in each pool.",
    )
    for r in runs:
        if (r.predicted, r.planned) != (r.held, r.allocated):
            raise ValueError(f"{name}, {r.tokens} tokens: predicted {r.predicted}, {r.planned}, measured {r}")
    return runs


@cache
def _report(name: str) -> Any:
    from transformers.utils import logging

    from kvlab.lab.parity import run_parity

    logging.set_verbosity_error()
    return run_parity(config_of(name))


def parity(name: str) -> float:
    """The largest error of a small model of that family against transformers, over all ways to fill the cache.

    Raises:
        ValueError: an error beyond the tolerance, or the engine does not run this family.
    """
    report = _report(name)
    worst = max(report.modes, key=lambda m: m.error / m.tolerance)
    if not report.passed:
        raise ValueError(f"{name}: {worst.mode} differs by {worst.error:.1e}, tolerance {worst.tolerance:g}")
    ways = ", ".join(m.mode.replace("_", " ") for m in report.modes)
    say(
        f"**Parity** of a small {name} with transformers, {ways}: largest difference {worst.error:.0e} of the "
        f"logits' spread, tolerance {worst.tolerance:g}."
    )
    return worst.error
