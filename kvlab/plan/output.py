"""A plan as the dict that `kvlab plan --json` prints. Sizes are exact bytes, times milliseconds, lengths tokens."""

from __future__ import annotations

from typing import Any

from kvlab.plan.addresses import Reach, reaches
from kvlab.plan.addresses import words as address_words
from kvlab.plan.plan import Plan, bytes_per_token_at, two_parameter_fit, whole
from kvlab.plan.policies import POLICIES, WASTE, SequenceBytes, ideal_bytes
from kvlab.plan.steps import decode_step, mix, prefill
from kvlab.plan.timing import StepTime
from kvlab.specs.fixed_scales import SHARES, fixed_scale_bytes
from kvlab.specs.model import ModelSpec
from kvlab.specs.parts import CacheSpec
from kvlab.specs.pools import POOLS


def plan_json(plan: Plan) -> dict[str, Any]:
    """Everything a plan says, ready for `json.dumps`. What needs the weights is None where their number is unknown."""
    o = plan.options
    return {
        "model": plan.model.name,
        "model_type": plan.model.model_type,
        "source": plan.source,
        "context": plan.context,
        "batch": o.batch,
        "policy": o.policy,
        "block_size": o.block_size,
        "pool_policy": o.pools,
        "checkpoint_tokens": o.checkpoint_tokens,
        "rollback_tokens": o.rollback_tokens,
        "kv_dtype": o.kv_dtype,
        "state_dtype": o.state_dtype,
        "conv_dtype": o.conv_dtype,
        "weight_dtype": o.weight_dtype,
        "tp": o.tp, "pp": o.pp, "cp": o.cp,
        "num_gpus": o.sharding.num_gpus,
        "num_layers": len(plan.model.layers),
        "layers": layer_kinds(plan.model),
        **_cache(plan),
        **_capacity(plan),
        "timing": timing(plan) if plan.weights else None,
        "mix": mix(plan) if plan.weights else None,
        "assumptions": assumptions(plan),
    }  # fmt: skip


def _cache(plan: Plan) -> dict[str, Any]:
    model, n, sequence = plan.model, plan.context, plan.sequence()
    return {
        "kv_bytes_per_token": model.bytes_per_token,
        "kv_bytes_per_token_short": model.bytes_per_token_short,
        "kv_bytes_per_token_at_context": bytes_per_token_at(model, n),
        "kv_state_bytes": model.state_bytes,
        "kv_encoder_bytes": sum(p.fixed_bytes for _, p in model.parts() if p.kind == "cross"),
        "kv_buffer_bytes": model.buffer_bytes,
        "kv_bytes": sequence.total,
        "kv_bytes_ideal": ideal_bytes(model, n),
        "kv_bytes_per_gpu": plan.per_gpu().total,
        "kv_bytes_batch": sequence.total * plan.options.batch,
        "fit": two_parameter_fit(model),
        "policies": {policy: _policy(plan, policy) for policy in POLICIES},
        "pools": {pools: _policy(plan, pools) for pools in POOLS},
    }


def _policy(plan: Plan, policy: str) -> dict[str, Any]:
    try:
        sequence, per_gpu, fits = plan.sequence(policy), plan.per_gpu(policy), plan.max_concurrent(policy)
    except ValueError as error:
        return {"error": str(error)}
    return {
        "kv_bytes": sequence.total,
        "kv_bytes_per_gpu": per_gpu.total,
        "max_concurrent": fits if plan.weights else None,
        "pool_overhead_bytes_per_gpu": per_gpu.pool_overhead,
        **_split(sequence),
        "groups": [
            {
                "name": g.name, "parts": g.parts, "block_size": g.block_size, "pages": g.pages,
                "block_bytes": g.block_bytes, "pages_per_unit": g.pages_per_unit, "kv_bytes": g.total,
                "useful_bytes": g.useful, **{f"{name}_bytes": getattr(g, name) for name in WASTE},
                "reserve_fraction": g.reserve / g.total if g.total else 0.0,
            }
            for g in sequence.groups
        ],
    }  # fmt: skip


def _split(sequence: SequenceBytes) -> dict[str, int]:
    return {"useful_bytes": sequence.useful} | {f"{name}_bytes": sequence.waste(name) for name in WASTE}


def _capacity(plan: Plan) -> dict[str, Any]:
    memory, gpu, known = plan.memory, plan.options.hardware, plan.weights is not None
    fits = plan.max_concurrent()
    return {
        "parameters": plan.weights.total if plan.weights else None,
        "weights_bytes": plan.weights_bytes,
        "weights_bytes_per_gpu": memory.weights_bytes if known else None,
        "hardware": {
            "gpu": gpu.name, "vendor": gpu.vendor, "marketing_memory": gpu.marketing_memory,
            "memory_bytes": gpu.memory_bytes, "memory_basis": gpu.memory_basis,
            "bandwidth_bytes_per_s": gpu.bandwidth_bytes_per_s, "bf16_flops": gpu.bf16_flops,
            "fp8_flops": gpu.fp8_flops, "source": gpu.source, "note": gpu.note,
        },
        "memory": {
            "gpu_util": plan.options.gpu_util,
            "memory_bytes": memory.memory_bytes,
            "usable_bytes": memory.usable_bytes,
            "weights_bytes": memory.weights_bytes if known else None,
            "reserve_bytes": memory.reserve_bytes,
            "free_for_kv_bytes": memory.free_bytes if known else None,
        },
        "addresses": [
            {"group": one.group, "page_elements": one.page_elements, "int32_pages": one.int32_pages,
             "pool_pages": one.pool_pages if known else None, "needs_int64": one.needs_int64 if known else None}
            for one in _reaches(plan)
        ],
        "max_concurrent": fits if known else None,
        "batch_fits": fits >= plan.options.batch if known else None,
        "longest_context": plan.longest_context if known else None,
    }  # fmt: skip


def _reaches(plan: Plan) -> tuple[Reach, ...]:
    """What 32-bit offsets reach in the `paged` policy's pools; nothing where its blocks cannot be of that size."""
    try:
        return reaches(plan.stages, plan.options.block_size or 16, plan.memory.free_bytes)
    except ValueError:
        return ()


def timing(plan: Plan) -> dict[str, Any]:
    """Decode at the plan's batch and at the most that fits, and the prompt of `context` (or `prompt`) tokens."""
    fits = plan.max_concurrent()
    prompt = plan.options.prompt or plan.context
    return {
        "decode": _step(decode_step(plan, plan.options.batch, plan.context), plan.options.batch),
        "decode_full": _step(decode_step(plan, fits, plan.context), fits) if fits else None,
        "prefill": {"tokens": prompt, **_step(prefill(plan, prompt), None)},
    }


def _step(step: StepTime, batch: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {} if batch is None else {"batch": batch}
    found |= {
        "ms": step.seconds * 1e3,
        "memory_ms": step.memory_s * 1e3,
        "compute_ms": None if step.compute_s is None else step.compute_s * 1e3,
        "weights_read_bytes": step.weights_read_bytes,
        "cache_bytes": step.cache_bytes,
        "operations": step.operations,
        "bound_by": step.bound_by,
    }
    if batch:
        found["tokens_per_s"] = batch / step.seconds
    return found


def layer_kinds(model: ModelSpec) -> list[dict[str, Any]]:
    """The kinds of parts with how many layers have them, in order of first appearance; figures are of one layer.

    `window` is the window, the chunk or the compression ratio's tokens; null where there is none. `bytes_per_token`
    is what a token adds below the window. A layer with two parts is in two kinds; "none" counts layers without.
    """
    found: dict[Any, int] = {}
    for layer in model.layers:
        for part in layer.parts or (None,):
            key = part if part is None or part.kind != "shared" else "shared"
            found[key] = found.get(key, 0) + 1
    return [_kind(part, count) for part, count in found.items()]


def _kind(part: CacheSpec | str | None, count: int) -> dict[str, Any]:
    if part is None or isinstance(part, str):
        return {"kind": part or "none", "count": count, "window": None, "bytes_per_token": 0, "state_bytes": 0}
    rule = part.retention
    found = {
        "kind": part.kind, "count": count, "window": rule.size if rule.rule in ("window", "chunk") else None,
        "bytes_per_token": whole(part.slope(0)), "state_bytes": part.fixed_bytes,
    }  # fmt: skip
    if rule.rule == "stride":
        found["ratio"] = rule.size
    if part.kind == "recurrent":
        found["mechanism"] = part.mechanism  # type: ignore[attr-defined]
    return found


_POLICY_WORDS = {
    "ideal": "policy ideal: only bytes that carry data; windows hold min(n, W) tokens; no pages, no reserve",
    "paged": "policy paged: whole pages of {bs} tokens, {pools}, windows with {flight:,} tokens in flight, rows padded "
    "to 16 bytes, a null page per pool; open compression buffers included",
    "vllm": "policy vllm: one pool with one page size for all kinds of layers, base block {bs} tokens, windows with "
    "{flight:,} tokens in flight, one state per sequence (prefix caching of states off), a null block",
}


_POOL_WORDS = {
    "per_kind": "one pool per kind of retention",
    "unified": "one pool with one page size (blocks of narrow layers take more tokens)",
    "sectors": "one pool of sectors that each kind cuts into pages of its own",
}


def assumptions(plan: Plan) -> list[str]:
    """What a reader must know to use the figures, one sentence each."""
    o, gpu, model = plan.options, plan.options.hardware, plan.model
    rows = [
        f"context {plan.context:,} tokens (k is 1,024 tokens)",
        _POLICY_WORDS[o.policy].format(bs=o.block_size, flight=o.max_batched_tokens, pools=_POOL_WORDS[o.pools]),
        f"cache in {o.kv_dtype}" + _state_words(plan),
        _weight_words(plan),
        f"{gpu.name}: {gpu.memory_bytes:,} bytes ({gpu.memory_basis}); {o.gpu_util:g} of it used; "
        f"{o.reserve:,} bytes per GPU kept for activations and the runtime",
        "times are lower bounds: bandwidth and dense arithmetic rate of the datasheet, no time on links or launches",
    ]
    if any(fixed := [fixed_scale_bytes(model, share) for share in SHARES]):
        each = ", ".join(f"{n:,} bytes per {share}" for share, n in zip(SHARES, fixed, strict=True))
        rows.append(f"fp8 with scale 1; calibrated scales lie beside the pool and are not counted: {each}, in all")
    if model.max_position and plan.context > model.max_position:
        rows.append(f"the model was made for {model.max_position:,} positions; {plan.context:,} is beyond them")
    if any(p.kind == "index" for _, p in model.parts()):
        rows.append(
            "sparse attention is timed as if it read every entry of the cache; the indexer's own scoring is not counted"
        )
    if plan.weights:
        rows += address_words(_reaches(plan))
    if o.policy == "paged" and o.checkpoint_tokens and plan.model.state_bytes + plan.model.buffer_bytes:
        rows.append(f"a copy of each state is kept every {o.checkpoint_tokens:,} tokens")
    if o.policy == "paged" and o.rollback_tokens:
        rows.append(f"windows keep what a step back of {o.rollback_tokens:,} tokens needs")
    if o.pp > 1:
        rows.append("pipeline stages work one after another on a token: they add room, not speed for one sequence")
    if o.cp > 1:
        rows.append("context parallel ranks split what keeps every token and hold windows, states and weights whole")
    if any(p.kind == "cross" for _, p in model.parts()):
        rows.append(f"cross-attention layers hold {o.image_tokens:,} image tokens; the image encoder is apart")
    if plan.weights and plan.weights.reread:
        rows.append("weights that several layers share are read once for each of them")
    if gpu.note:
        rows.append(f"{gpu.name}: {gpu.note}")
    rows += model.notes
    rows += plan.weights.notes if plan.weights else ()
    return list(dict.fromkeys(rows))


def _state_words(plan: Plan) -> str:
    if not plan.model.state_bytes:
        return ""
    o = plan.options
    return f", recurrent state in {o.state_dtype}, convolution inputs (k - 1 columns) in {o.conv_dtype}"


def _weight_words(plan: Plan) -> str:
    if plan.weights is None:
        return f"number of weights unknown ({plan.weights_problem}): what fits and how fast is not said"
    o = plan.options
    shares = o.tp * o.pp
    return f"weights in {o.weight_dtype}" + (f", split evenly over {shares} GPUs" if shares > 1 else "")


__all__ = ["assumptions", "layer_kinds", "plan_json", "timing"]
