"""The times of a plan: a decode step at a batch, a prompt, and a mix of both."""

from __future__ import annotations

from typing import Any

from kvlab.plan.plan import Plan
from kvlab.plan.policies import ideal_bytes
from kvlab.plan.timing import StepTime, attention_operations, cache_read_bytes, step_time

SLICES = 64
"""Equal slices of an output over which a mix takes means; lengths are taken at their middles."""


def decode_step(plan: Plan, batch: int, tokens: int) -> StepTime:
    """The time in which `batch` sequences of `tokens` tokens each get one more token."""
    o, gpu = plan.options, plan.options.hardware
    weights_read, multiplied = 0.0, 0
    if plan.weights is not None:
        w = plan.weights
        assert plan.weights_bytes is not None
        weights_read = plan.weights_bytes * (w.read_per_step(batch) / w.total) / o.tp
        multiplied = w.read_always + w.moe_layers * w.per_expert * w.experts_per_token
    cache_bytes = batch * sum(cache_read_bytes(stage, tokens, o.cp) for stage in plan.stages)
    attention = attention_operations(plan.model, tokens, prompt=False)
    operations = batch * (2 * multiplied / o.tp + attention / (o.tp * o.cp))
    return step_time(weights_read, cache_bytes, operations, gpu.bandwidth_bytes_per_s, gpu.flops(_bits(plan)))


def prefill(plan: Plan, tokens: int) -> StepTime:
    """The time to compute a prompt of `tokens` tokens at once; logits for its last token only."""
    o, gpu = plan.options, plan.options.hardware
    weights_read, multiplied = 0.0, 0
    if plan.weights is not None:
        w = plan.weights
        assert plan.weights_bytes is not None
        # a table's rows are read once each at most
        weights_read = plan.weights_bytes * (min(w.read_per_step(tokens), w.total + w.reread) / w.total) / o.tp
        per_token = w.read_always + w.moe_layers * w.per_expert * w.experts_per_token - w.lm_head
        multiplied = per_token * tokens + w.lm_head
    written = sum(ideal_bytes(stage, tokens, o.cp) for stage in plan.stages)
    attention = attention_operations(plan.model, tokens, prompt=True, mla_dims=plan.mla_dims)
    operations = (2 * multiplied + attention) / (o.tp * o.cp)
    return step_time(weights_read, written, operations, gpu.bandwidth_bytes_per_s, gpu.flops(_bits(plan)))


def mix(plan: Plan) -> dict[str, Any] | None:
    """The life of a request of `prompt` tokens in and `output` out, and the rate at which a full GPU serves them.

    None when no mix was asked for. Room is planned for the longest moment; means are over the output. The rates are
    None when not one request fits, or when the GPU's arithmetic rate, which a prompt needs, is not published.
    """
    prompt, output = plan.options.prompt, plan.options.output
    if prompt is None or output is None:
        return None
    slices = min(output, SLICES)
    lengths = [prompt + (2 * i + 1) * output // (2 * slices) for i in range(slices)]
    fits = plan.max_concurrent()
    batch, prompt_step = max(1, fits), prefill(plan, prompt)
    prefill_s = prompt_step.seconds
    decode_s = output * sum(decode_step(plan, batch, n).seconds for n in lengths) / slices
    # each request of the batch takes the device alone for its prompt, and shares every decode step
    requests = batch / (batch * prefill_s + decode_s) if fits and prompt_step.compute_s is not None else None
    return {
        "prompt": prompt,
        "output": output,
        "peak_kv_bytes": plan.sequence().total,
        "mean_kv_bytes": round(sum(ideal_bytes(plan.model, n) for n in lengths) / slices),
        "concurrent": fits,
        "prefill_ms": None if prompt_step.compute_s is None else prefill_s * 1e3,
        "decode_ms": decode_s * 1e3,
        "requests_per_s": requests,
        "output_tokens_per_s": None if requests is None else requests * output,
    }


def _bits(plan: Plan) -> int:
    return plan.options.weight_format.bits
