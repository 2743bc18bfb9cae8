"""A plan as text that explains itself: one token, one sequence, one GPU, what fits, how fast. 80 columns, no colour."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from kvlab.plan.derivation import kind_counts, sequence_lines, sharding_lines, state_lines, token_lines
from kvlab.plan.output import assumptions
from kvlab.plan.plan import Plan, bytes_per_token_at, two_parameter_fit
from kvlab.plan.policies import POLICIES, WASTE, ideal_bytes
from kvlab.plan.steps import decode_step, mix, prefill
from kvlab.plan.timing import StepTime
from kvlab.specs.pages import cdiv
from kvlab.specs.units import gb, human_bytes

WIDTH = 80


def explain(plan: Plan) -> str:
    """The plan as a derivation in numbered steps, every figure exact and then in a human unit."""
    parts = [_title(plan), _one_token(plan), _one_sequence(plan), _per_gpu(plan)]
    if plan.weights is not None:
        parts += [_fits(plan), _speed(plan), _mix(plan)]
    blocks = ["\n".join(lines) for lines in parts if lines]
    blocks.append("\n".join(["Assumptions", *(_wrapped(f"- {row}", "  ", "    ") for row in assumptions(plan))]))
    return "\n".join(_fitted(line) for line in "\n\n".join(blocks).splitlines())


def exact(n_bytes: int | float) -> str:
    """`n_bytes` with separators and the largest binary unit: "327,680 bytes (320.00 KiB)"."""
    number = f"{n_bytes:,}" if isinstance(n_bytes, int) else f"{n_bytes:,.2f}"
    return f"{number} bytes" + (f" ({human_bytes(int(n_bytes))})" if n_bytes >= 1024 else "")


def tokens_text(tokens: int) -> str:
    """`tokens` exactly, and as k or M where that is whole: "32k = 32,768 tokens"."""
    for unit, size in (("M", 1024**2), ("k", 1024)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit} = {tokens:,} tokens"
    return f"{tokens:,} token" + ("s" if tokens != 1 else "")


def _wrapped(text: str, first: str = "  ", rest: str = "  ") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip


def _fitted(line: str) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return line if len(line) <= WIDTH else _wrapped(line.strip(), indent, indent + "  ")


def _title(plan: Plan) -> list[str]:
    model = plan.model
    kinds = ", ".join(f"{n} {kind}" for kind, n in kind_counts(model))
    line = f"{model.name}: {len(model.layers)} layers ({kinds})"
    if plan.weights is not None:
        line += f", {plan.weights.total:,} parameters"
    return [_wrapped(line, "", "  ")]


def _one_token(plan: Plan) -> list[str]:
    model = plan.model
    lines = ["1. One more token", *token_lines(model)]
    short, long_run = model.bytes_per_token_short, model.bytes_per_token
    here = bytes_per_token_at(model, plan.context)
    if short == long_run:
        lines.append(f"  = {exact(here)} per token")
    else:
        lines.append(f"  = {exact(here)} per token at a length of {plan.context:,}")
        lines.append(f"    {exact(short)} below every window, {exact(long_run)} above")
    states = state_lines(model)
    return lines + (["  Fixed, whatever the length:", *states] if states else [])


def _one_sequence(plan: Plan) -> list[str]:
    model, n, sequence = plan.model, plan.context, plan.sequence()
    lines = [f"2. One sequence of {tokens_text(n)}"]
    ideal = ideal_bytes(model, n)
    lines += sequence_lines(model, n)
    lines.append(f"  = {exact(ideal)}, {gb(ideal)}")
    if model.bytes_per_token != model.bytes_per_token_short or model.state_bytes:
        fit = two_parameter_fit(model)
        start = int(fit["exact_from_tokens"])
        text = f"In two numbers: {fit['fixed_bytes']:,} bytes per request and {fit['bytes_per_token']:,} per token"
        lines.append(_wrapped(text + (f", exact from {tokens_text(start)} on" if start > 1 else "")))
    if model.buffer_bytes:
        lines.append(f"  and {exact(model.buffer_bytes)} of open compression buffers")
    if sequence.policy != "ideal":
        pools = (
            f", pools {plan.options.pools}" if sequence.policy == "paged" and plan.options.pools != "per_kind" else ""
        )
        lines.append(f"  Under policy {sequence.policy}{pools}: {exact(sequence.total)}")
        wasted = [(words, sequence.waste(name)) for name, words in WASTE.items()]
        for label, value in [("carry data", sequence.useful), *wasted]:
            if value:
                lines.append(f"    {value:>18,}  {label} ({_share(value, sequence.total)})")
        lines += _groups(plan)
    return lines


def _groups(plan: Plan) -> list[str]:
    lines = []
    for g in plan.sequence().groups:
        flag = "  over half of it is reserve" if g.total and g.reserve * 2 > g.total else ""
        lines.append(f"    group {g.name}: {g.pages:,} page{'s' * (g.pages != 1)} x {g.block_bytes:,} bytes{flag}")
    return lines


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "0%"


def _per_gpu(plan: Plan) -> list[str]:
    o = plan.options
    if o.sharding.num_gpus == 1:
        return []
    degrees = " x ".join(f"{name} {n}" for name, n in (("tp", o.tp), ("pp", o.pp), ("cp", o.cp)) if n > 1)
    one, whole = plan.per_gpu().total, plan.sequence().total
    lines = [
        f"   On each of {o.sharding.num_gpus} GPUs ({degrees}), the fullest one:",
        *sharding_lines(plan.model, o.tp),
    ]
    lines.append(f"  = {exact(one)} per sequence")
    if (copies := one * o.sharding.num_gpus - whole) > 0:
        lines.append(_wrapped(f"All GPUs together hold {exact(copies)} more than one: copies, or an uneven split."))
    return lines


def _row(sign: str, value: int, label: str) -> str:
    row = f"  {sign} {value:>19,}  {human_bytes(value):>11}  {label}"
    return row if len(row) <= WIDTH else row.partition(":")[0]


def _fits(plan: Plan) -> list[str]:
    o, gpu, memory = plan.options, plan.options.hardware, plan.memory
    one, fits = plan.per_gpu(), plan.max_concurrent()
    lines = [
        f"3. What fits on {'one' if o.sharding.num_gpus == 1 else 'each'} {gpu.name} ({gpu.marketing_memory})",
        _row(" ", memory.memory_bytes, f"memory: {gpu.memory_basis}"),
        _row(" ", memory.usable_bytes, f"x {o.gpu_util:g} usable"),
        _row("-", memory.weights_bytes, f"weights in {o.weight_dtype}"),
        _row("-", memory.reserve_bytes, "activations and runtime"),
        _row("=", memory.free_bytes, "free for the cache"),
    ]
    if memory.free_bytes < 0:
        room = memory.usable_bytes - memory.reserve_bytes
        need = cdiv(plan.weights_bytes or 0, room) if room > 0 else 0
        hint = f"; the weights alone need {need} of them" if need else ""
        return [*lines, _wrapped(f"The weights do not fit{hint} (--tp, --pp, or a smaller --weight-dtype).")]
    if one.pool_overhead:
        lines.append(_row("-", one.pool_overhead, "null pages of the pool"))
    lines.append(_row("/", one.total, f"one sequence, {o.policy}"))
    lines.append(f"  = {fits:,} sequence{'s' if fits != 1 else ''} of {plan.context:,} tokens")
    lines.append("    " + ", ".join(_fits_under(plan, p) for p in POLICIES))
    longest = plan.longest_context
    what = "any length" if longest is None else f"{longest:,} tokens" if longest else "not even one token"
    made = plan.model.max_position
    beyond = f" (the model was made for {made:,})" if made and longest and longest > made else ""
    lines.append(f"  Longest context for a batch of {o.batch:,}: {what}{beyond}")
    return lines


def _fits_under(plan: Plan, policy: str) -> str:
    try:
        return f"{policy} {plan.max_concurrent(policy):,}"
    except ValueError:
        return f"{policy} not modelled"


def _speed(plan: Plan) -> list[str]:
    fits, batch = plan.max_concurrent(), plan.options.batch
    lines = ["4. How fast at best"]
    lines += _decode_lines(plan, decode_step(plan, batch, plan.context), batch)
    if batch > fits and plan.memory.free_bytes >= 0:
        lines.append(f"  A batch of {batch:,} does not fit: {fits:,} do.")
    if fits > 1 and fits != batch:
        lines += _decode_lines(plan, decode_step(plan, fits, plan.context), fits)
    prompt = plan.options.prompt or plan.context
    step = prefill(plan, prompt)
    if step.compute_s is None:
        lines.append(f"  A prompt of {prompt:,}: not timed, no arithmetic rate is published for this GPU")
    else:
        operations = f"{step.operations / 1e12:,.1f} x 10^12 operations per GPU"
        lines.append(f"  A prompt of {prompt:,}: {operations} in {_ms(step.seconds)}, bound by {_bound(step)}")
    return lines


def _decode_lines(plan: Plan, step: StepTime, batch: int) -> Iterator[str]:
    bandwidth = plan.options.hardware.bandwidth_bytes_per_s
    yield f"  A decode step of {batch:,}: {gb(step.weights_read_bytes)} of weights + {gb(step.cache_bytes)} of cache"
    rate = f"{batch / step.seconds:,.1f} tokens/s" + (" together" if batch > 1 else "")
    yield f"    / {bandwidth / 1e9:,.0f} GB/s = {_ms(step.memory_s)}; {rate}, bound by {_bound(step)}"


def _bound(step: StepTime) -> str:
    return {"weights": "reading weights", "cache": "reading the cache", "compute": "arithmetic"}[step.bound_by]


def _ms(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.2f} ms"


def _mix(plan: Plan) -> list[str]:
    found = mix(plan)
    if found is None:
        return []
    lines = [f"5. Requests of {found['prompt']:,} tokens in and {found['output']:,} out"]
    lines.append(f"  room for the longest moment, {exact(found['peak_kv_bytes'])};")
    lines.append(f"  on average over the output {exact(found['mean_kv_bytes'])}")
    if found["requests_per_s"]:
        lines.append(
            f"  {found['concurrent']:,} at a time: {found['requests_per_s']:,.2f} requests/s, "
            f"{found['output_tokens_per_s']:,.0f} tokens/s at best"
        )
    return lines
