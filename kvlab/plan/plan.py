"""`make_plan`: a model, a length and a machine in; bytes, how many fit and how fast out.

spec -> one GPU's share -> bytes of a sequence under the policy -> what is left of the memory -> sequences -> time
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kvlab.plan.capacity import TOKEN_LIMIT, MemoryBudget, tokens_that_fit, usable_bytes
from kvlab.plan.options import DEFAULT_CONTEXT, PlanOptions, plan_options
from kvlab.plan.policies import (
    POLICIES,
    PolicySettings,
    SequenceBytes,
    bytes_function,
    default_block_size,
    ideal_bytes,
    sequence_bytes,
)
from kvlab.plan.sharding import stage_models
from kvlab.specs.families import from_config
from kvlab.specs.formats import StorageFormat
from kvlab.specs.kv_dtypes import with_formats
from kvlab.specs.model import ModelSpec
from kvlab.specs.pages import cdiv
from kvlab.specs.pools import POOLS
from kvlab.specs.weights import WeightCount, count


@dataclass(frozen=True)
class Plan:
    """What one model needs at one length on one kind of GPU. Sizes are exact bytes.

    Attributes:
        model: the whole model's cache.
        stages: what one GPU of each pipeline stage caches.
        options: what was asked, with defaults filled in (`context` and `block_size` are set).
        weights: parameter count, None when it is unknown: a ModelSpec, or a config that leaves out too much.
        mla_dims: (key, value) width per head with which an MLA model computes a prompt, or None.
        source: where the model's facts come from.
        weights_problem: why `weights` is None; what fits and how fast is then of the cache alone.
    """

    model: ModelSpec
    stages: tuple[ModelSpec, ...]
    options: PlanOptions
    weights: WeightCount | None
    mla_dims: tuple[int, int] | None = None
    source: str = ""
    weights_problem: str = ""

    def settings(self, policy: str, cp: int | None = None) -> PolicySettings:
        """The settings of `policy` in this plan. A name of `POOLS` is the paged policy with those pools."""
        o = self.options
        pools = policy if policy in POOLS else o.pools
        policy = "paged" if policy in POOLS else policy
        cp = o.cp if cp is None else cp
        return PolicySettings(policy, o.block_size or 16, o.max_batched_tokens, cp, pools, o.rollback)

    @property
    def context(self) -> int:
        """Tokens of a sequence."""
        assert self.options.context is not None
        return self.options.context

    def sequence(self, policy: str = "") -> SequenceBytes:
        """Bytes of one sequence at `context` under `policy` (the plan's own when empty), the whole model together.

        A name of `kvlab.specs.pools.POOLS` is the paged policy with those pools; so it is for the other figures here.
        """
        return sequence_bytes(self.model, self.context, self.settings(policy or self.options.policy, cp=1))

    def per_gpu(self, policy: str = "", tokens: int | None = None) -> SequenceBytes:
        """The same on the GPU that holds most of it."""
        settings = self.settings(policy or self.options.policy)
        n = self.context if tokens is None else tokens
        return max((sequence_bytes(s, n, settings) for s in self.stages), key=lambda s: s.total)

    @cached_property
    def weights_bytes(self) -> int | None:
        """Bytes of all weights in `weight_dtype`."""
        return None if self.weights is None else weight_bytes(self.weights.total, self.options.weight_format)

    @cached_property
    def memory(self) -> MemoryBudget:
        """The memory of one GPU; weights are split evenly over tensor ranks and stages, held whole by cp ranks."""
        o, gpu = self.options, self.options.hardware
        share = cdiv(self.weights_bytes or 0, o.tp * o.pp)
        return MemoryBudget(gpu.memory_bytes, usable_bytes(gpu.memory_bytes, o.gpu_util), share, o.reserve)

    def max_concurrent(self, policy: str = "") -> int:
        """Whole sequences of `context` tokens that fit beside the weights, on every stage."""
        settings = self.settings(policy or self.options.policy)
        found = []
        for stage in self.stages:
            one = sequence_bytes(stage, self.context, settings)
            if one.total:
                # sequences fill each other's sectors, so their bytes are no multiple of one's
                found.append(tokens_that_fit(one.bytes_of, self.memory.free_bytes - one.pool_overhead))
        return min(found, default=0)

    @cached_property
    def longest_context(self) -> int | None:
        """The longest context at which `batch` sequences fit; 0 when none does, None when any length fits."""
        settings, batch = self.settings(self.options.policy), self.options.batch
        # the pool's own pages do not depend on the length
        stages = [(bytes_function(s, settings), sequence_bytes(s, 1, settings).pool_overhead) for s in self.stages]

        def fullest(tokens: int) -> int:
            return max(one(tokens) * batch + overhead for one, overhead in stages)

        longest = tokens_that_fit(fullest, self.memory.free_bytes)
        return None if longest >= TOKEN_LIMIT else longest

    def to_json(self) -> dict[str, Any]:
        """The dict that `kvlab plan --json` prints."""
        from kvlab.plan.output import plan_json

        return plan_json(self)

    def explain(self) -> str:
        """The derivation in words and numbers, for a terminal of 80 columns."""
        from kvlab.plan.report import explain

        return explain(self)


def make_plan(target: str | Mapping[str, Any] | ModelSpec, **options: Any) -> Plan:
    """The plan for `target`: a name or path that `kvlab.specs.resolve` knows, a config (dict or JSON), a ModelSpec.

    Options are the fields of `PlanOptions`; None stands for the default. A ModelSpec has its formats set already
    and no weights.

    Raises:
        ValueError: an unknown model, option or value; degrees that do not fit the model; a mechanism that the
            policy does not model.
    """
    asked = plan_options(options)
    config, name, source = _config(target)
    if isinstance(target, ModelSpec):
        model, weights, problem = target, None, "a ModelSpec has none"
    else:
        assert config is not None
        model = from_config(
            config, name=name, state_format=asked.state_dtype, conv_format=asked.conv_dtype,
            image_tokens=asked.image_tokens,
        )  # fmt: skip
        model = with_formats(model, asked.kv_dtype)
        model = replace(model, notes=model.notes + _published_format(config, asked))
        weights, problem = _weights(config)
    asked = _filled(asked, model)
    asked.rollback.check([f"layer {layer}" for layer, part in model.parts() if part.retention.rule == "state"])
    plan = Plan(model, stage_models(model, asked.sharding), asked, weights, _mla_dims(config), source, problem)
    plan.sequence()  # raises for what the policy does not model
    return plan


def _config(target: str | Mapping[str, Any] | ModelSpec) -> tuple[Mapping[str, Any] | None, str, str]:
    if isinstance(target, ModelSpec):
        return None, target.name, "a ModelSpec"
    if isinstance(target, Mapping):
        return target, "", "a config given as a dict"
    if target.lstrip().startswith("{"):
        return _parsed(target), "", "a config given as text"
    from kvlab.specs.resolve import resolve

    found = resolve(target)
    return found.config, found.name, found.source


def _weights(config: Mapping[str, Any]) -> tuple[WeightCount | None, str]:
    """(count, "") or (None, why not): a config may say enough for the cache and too little for the weights."""
    try:
        return count(dict(config)), ""
    except ValueError as error:
        return None, str(error)


def _published_format(config: Mapping[str, Any], options: PlanOptions) -> tuple[str, ...]:
    """A note when the checkpoint itself is quantized: the planner counts weights in the format it is asked for."""
    method = (config.get("quantization_config") or {}).get("quant_method")
    if not method:
        return ()
    return (f"the checkpoint is published quantized ({method}); weights are counted in {options.weight_dtype}",)


def _parsed(text: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"config given as text: not JSON ({error})") from None


def _filled(options: PlanOptions, model: ModelSpec) -> PlanOptions:
    """`options` with the defaults that depend on the model."""
    context = options.context or min(DEFAULT_CONTEXT, model.max_position or DEFAULT_CONTEXT)
    return replace(options, context=context, block_size=options.block_size or default_block_size(model))


def _mla_dims(config: Mapping[str, Any] | None) -> tuple[int, int] | None:
    if config is None:
        return None
    wrapped = (config.get(key) for key in ("text_config", "llm_config", "language_config"))
    text = next((part for part in wrapped if isinstance(part, Mapping)), config)
    found = [text.get(k) for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    return (found[0] + found[1], found[2]) if all(isinstance(x, int) for x in found) else None  # type: ignore[operator]


def weight_bytes(parameters: int, fmt: StorageFormat) -> int:
    """Bytes of `parameters` weights in `fmt`, with the scales of groups; one scale per row is not counted."""
    scales = cdiv(parameters, fmt.group_values) * fmt.scale_bytes if fmt.group_values else 0
    return fmt.code_bytes(parameters) + scales


def compression_period(model: ModelSpec) -> int:
    """Tokens after which every compression ratio has completed an entry: their least common multiple, or 1."""
    return math.lcm(*(p.retention.size for _, p in model.parts() if p.retention.rule == "stride"))


def bytes_per_token_at(model: ModelSpec, tokens: int) -> int | float:
    """Bytes the last tokens of a sequence of `tokens` added each, averaged over one compression period."""
    period = min(compression_period(model), tokens)
    return whole((ideal_bytes(model, tokens) - ideal_bytes(model, tokens - period)) / period)


def two_parameter_fit(model: ModelSpec) -> dict[str, int | float]:
    """fixed_bytes + bytes_per_token x n, exact at whole compression periods from `exact_from_tokens` on."""
    period = compression_period(model)
    rules = [part.retention for _, part in model.parts()]
    windows = [rule.size + rule.sinks for rule in rules if rule.rule in ("window", "chunk")]
    start = cdiv(max(windows, default=period), period) * period
    slope = model.bytes_per_token
    fixed = ideal_bytes(model, start) - whole(slope * start)
    return {"fixed_bytes": int(fixed), "bytes_per_token": slope, "exact_from_tokens": start if windows else period}


def whole(value: int | float) -> int | float:
    """`value` as an int when it is one."""
    return int(value) if value == int(value) else value


__all__ = ["POLICIES", "Plan", "bytes_per_token_at", "make_plan", "two_parameter_fit", "weight_bytes"]
