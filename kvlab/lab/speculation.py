"""What speculation brings on the default model: tokens a step and time, against K, greedy and sampled.

    python -m kvlab.lab.speculation --fresh    records every method and K in book/results/speculation.json
    python -m kvlab.lab.speculation --held-out 16    adds what the heads bring on questions kept out of their training

Both sides of a ratio run in one process, one after the other for each prompt, and are compared by the processor time of
one thread: what a step costs, whatever else the machine does. Every greedy text must be the same with and without.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from kvlab.engine import Engine, SamplingParams
from kvlab.lab.quality import mean_and_band
from kvlab.lab.quality_text import evaluation_text
from kvlab.lab.record import provenance
from kvlab.speculate import SpeculationOptions
from kvlab.speculate.adapt import best_count, fit_cost, rate_of
from kvlab.speculate.skip import skip_layers, spread

RESULT = Path(__file__).resolve().parents[2] / "book" / "results" / "speculation.json"
QUESTION = "Tell me a story about a lighthouse keeper and a storm."


@dataclass(frozen=True)
class Setting:
    """One run: a method at a K on one kind of text.

    Attributes:
        accepted, right: the share that was right of the drafts made, and of those that were looked at.
        time_ratio: plain time over time with drafts: above 1 is faster.
    """

    method: str
    k: int
    text: str
    temperature: float
    tokens_per_step: float
    accepted: float
    time_ratio: float
    same_tokens: bool
    right: float = 0.0


@dataclass(frozen=True)
class Fitted:
    """What the best K depends on, from the settings of one method on one kind of text that were recorded.

    Attributes:
        ks: the K that were run. rates: the rate that explains the tokens a step of each; costs: of a step, in plain steps.
        rate: their mean. cost, fixed: of one more draft and of having drafts, fitted to `costs`.
        best: the K, up to the largest run, that `rate`, `cost` and `fixed` name; 0 is no drafts.
        fastest: the K whose recorded speed was highest; 0 when none was faster than no drafts.
    """

    ks: tuple[int, ...]
    rates: tuple[float, ...]
    costs: tuple[float, ...]
    rate: float
    cost: float
    fixed: float
    best: int
    fastest: int


def fitted(settings: Sequence[dict[str, Any]], method: str, text: str) -> Fitted:
    """The two numbers that K depends on, and the K that they name, of a method's recorded `settings` on a kind of text.

    Raises:
        ValueError: fewer than two K are recorded of it.
    """
    own = sorted((s for s in settings if (s["method"], s["text"]) == (method, text)), key=lambda s: s["k"])
    ks = tuple(s["k"] for s in own)
    rates = tuple(rate_of(s["tokens_per_step"], s["k"]) for s in own)
    # a step's tokens over the speed is the time of a step
    costs = tuple(s["tokens_per_step"] / s["time_ratio"] for s in own)
    cost, fixed = fit_cost(ks, costs)
    rate = fmean(rates)
    fast = max(own, key=lambda s: s["time_ratio"])
    fastest = fast["k"] if fast["time_ratio"] > 1 else 0
    return Fitted(ks, rates, costs, rate, cost, fixed, best_count(rate, max(ks), cost, fixed), fastest)


def product_costs(model: Any, rows: Sequence[int], repeats: int = 3) -> dict[int, float]:
    """Processor time of every weight times n rows, for each n in `rows`, over that of one row: the least of `repeats`."""
    import torch

    from kvlab.ops.linear import linear

    weights = [w for w in model.decoder.weights.named.values() if w.ndim == 2]
    least: dict[int, float] = {}
    for n in [1, *rows] * repeats:
        inputs = {w.shape[1]: torch.ones(n, w.shape[1], dtype=w.dtype) for w in weights}
        began = time.process_time()
        for w in weights:
            linear(inputs[w.shape[1]], w)
        least[n] = min(time.process_time() - began, least.get(n, float("inf")))
    return {n: least[n] / least[1] for n in rows}


def texts(model: Any) -> dict[str, tuple[list[list[int]], float]]:
    """Prompts and the temperature of each kind of text.

    "predictable": a paragraph that stands there and begins once more. "questions": an open question, greedy;
    "unpredictable": the same, sampled at temperature 0.8.
    """
    asked = [model.tokenizer.encode(model.tokenizer.chat_text([{"role": "user", "content": QUESTION}]))]
    return {"predictable": (repeated(model, 1), 0.0), "questions": (asked, 0.0), "unpredictable": (asked, 0.8)}


def repeated(model: Any, count: int) -> list[list[int]]:
    """The first `count` paragraphs of medium length as prompts: each stands there and begins once more."""
    paragraphs = [p for p in evaluation_text().text.split("\n\n") if 300 < len(p) < 400][:count]
    encode = model.tokenizer.encode
    return [[*encode(f"{p}\n\n"), *encode(p)[:12]] for p in paragraphs]


def options_of(model: Any, method: str, k: int) -> SpeculationOptions:
    """The options that a name of this experiment stands for: a method, or a draft of some layers, or a tree."""
    if method.startswith("draft"):
        kept = spread(len(model.spec.layers), int(method.split()[1]))
        return SpeculationOptions("draft", k=k, draft=skip_layers(model, kept))
    name, _, tree = method.partition(" ")
    return SpeculationOptions(name, k=k, branches=(3, 2, 2, 1) if tree else ())


def run(
    model: Any, prompts: Sequence[list[int]], params: SamplingParams, speculation: SpeculationOptions | None
) -> tuple:
    """(processor seconds without the prompts' steps, tokens of each prompt, what was accepted), one after the other."""
    engine = Engine(model, num_blocks=60, max_model_len=512, max_num_seqs=1, speculation=speculation)
    seconds, found = 0.0, []
    for i, prompt in enumerate(prompts):
        request_id = engine.add_request(prompt, replace(params, seed=i))
        request = engine.requests[request_id]
        engine.step()
        began = time.process_time()
        while not request.finish_reason:
            engine.step()
        seconds += time.process_time() - began
        found.append(request.output)
    return seconds, found, engine.speculator.acceptance if engine.speculator else None


def compare(model: Any, method: str, k: int, text: str, tokens: int = 40, plain: tuple | None = None) -> Setting:
    """One setting, with and without drafts; `plain` is a run without from just before."""
    prompts, temperature = texts(model)[text]
    params = SamplingParams(tokens, temperature, ignore_eos=True)
    without = plain or run(model, prompts, params, None)
    seconds, found, seen = run(model, prompts, params, options_of(model, method, k))
    made = sum(len(out) - 1 for out in found)
    # each prompt's first token came from its own step
    steps = made - seen.accepted
    share = seen.accepted / seen.drafted if seen.drafted else 0.0
    return Setting(method, k, text, temperature, round(made / steps, 3), round(share, 3),
                   round(without[0] / seconds, 3), found == without[1], round(seen.right, 3))  # fmt: skip


def pages_by_step(engine: Engine, prompt: list[int], params: SamplingParams) -> list[tuple[int, int, int]]:
    """(tokens known before the step, pages held within it, pages held after it) of each step behind the prompt's.

    One request alone, whose first step computes its whole prompt.
    """
    fill, pools = engine.runner.fill, engine.cache.unit_pools
    request = engine.requests[engine.add_request(prompt, params)]
    engine.step()
    within: list[tuple[int, int]] = []

    def watched(step: Any) -> Any:
        within.append((len(request.tokens), sum(pool.num_held for pool in pools)))
        return fill(step)

    engine.runner.fill, found = watched, []
    try:
        while not request.finish_reason:
            engine.step()
            found.append((*within[-1], sum(pool.num_held for pool in pools)))
    finally:
        engine.runner.fill = fill
    return found


METHODS = ("ngram", "lookahead", "draft 24", "medusa", "eagle", "eagle tree")
LEAST = {"eagle tree": 4}
"""The smallest K of a method, where a smaller one makes another method of it: such a tree is a chain."""


def record(model: Any, wanted: Sequence[tuple[str, str, int]], tokens: int, command: str) -> None:
    """Measures (text, method, K) one after the other; each is written down at once, beside what is there."""
    plain: dict[str, tuple] = {}
    for text, method, k in wanted:
        if k < LEAST.get(method, 1):
            continue
        prompts, temperature = texts(model)[text]
        if text not in plain:
            params = SamplingParams(tokens, temperature, ignore_eos=True)
            run(model, prompts, replace(params, max_tokens=4), None)
            plain[text] = run(model, prompts, params, None)
        keep(asdict(compare(model, method, k, text, tokens, plain[text])) | {"tokens": tokens}, model, command)


def keep(new: dict[str, Any], model: Any, command: str) -> None:
    """Writes a setting into the record in place of an older one of the same name."""
    import torch

    old = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else {}
    before = old.get("settings", [])
    name = (new["method"], new["text"], new["k"])
    training = RESULT.parent / "heads" / "training.json"
    result = {
        "what": "tokens a step and processor time with drafts against none, batch 1, by method, K and kind of text",
        **provenance(command),
        "model": model.name, "source": model.source, "threads": torch.get_num_threads(),
        "settings": [s for s in before if (s["method"], s["text"], s["k"]) != name] + [new],
        "heads": json.loads(training.read_text(encoding="utf-8")) if training.is_file() else None,
    } | {k: old[k] for k in ("held_out",) if k in old}  # fmt: skip
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(new, flush=True)


HELD_OUT = (("medusa", 4), ("eagle", 4), ("eagle tree", 8))


def held_out(model: Any, count: int, tokens: int, command: str) -> dict[str, Any]:
    """What the heads bring on `count` questions of the kind that they learned from and never saw, greedy, by method:
    tokens of a step and share of accepted drafts, each the mean over the questions with its 95% band."""
    from kvlab.lab.train_heads import unseen

    encode = model.tokenizer.encode
    asked = [encode(model.tokenizer.chat_text([{"role": "user", "content": q}])) for q in unseen(count)]
    params, rows = SamplingParams(tokens, ignore_eos=True), []
    for method, k in HELD_OUT:
        per_step, shares = [], []
        for prompt in asked:
            _, [out], seen = run(model, [prompt], params, options_of(model, method, k))
            per_step.append((len(out) - 1) / (len(out) - 1 - seen.accepted))
            shares.append(seen.accepted / seen.drafted)
        found = {"tokens_per_step": mean_and_band(per_step), "accepted": mean_and_band(shares)}
        rows.append({"method": method, "k": k} | {n: {"mean": m, "band95": list(b)} for n, (m, b) in found.items()})
        print(rows[-1], flush=True)
    return {**provenance(command), "questions": count, "tokens": tokens, "rows": rows}


def main() -> None:
    """Records the experiment, beside what is recorded of other methods, texts and K."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--texts", nargs="*", default=["predictable", "questions", "unpredictable"])
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--ks", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--fresh", action="store_true", help="forget what is recorded")
    parser.add_argument(
        "--held-out", type=int, metavar="N", help="only the heads, on N questions they did not learn from"
    )
    args = parser.parse_args()
    from kvlab.models.load import load_model

    command = "OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 python -m kvlab.lab.speculation " + " ".join(sys.argv[1:])
    if args.held_out:
        result = json.loads(RESULT.read_text(encoding="utf-8"))
        result["held_out"] = held_out(load_model(), args.held_out, args.tokens, command)
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        return
    if args.fresh:
        RESULT.unlink(missing_ok=True)
    record(load_model(), list(itertools.product(args.texts, args.methods, args.ks)), args.tokens, command)


if __name__ == "__main__":
    main()
