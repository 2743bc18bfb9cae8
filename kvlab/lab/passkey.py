"""Passkey retrieval by storage format: a number said once in a long text, asked for at its end.

A prompt is filler with one sentence that names a five-digit number; the model is then asked for it. Filler before the
sentence is read once per format and the cache taken back to where the sentence goes; the rest and the answer are read in
one chunk. The number counts as retrieved when each of its tokens was the most likely one: what greedy decoding would
have written. Lengths start where full precision still retrieves it.

    python -m kvlab.lab.passkey --formats ALL --out book/results/passkey_kv_formats.json
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvlab.lab.paged_run import PagedRun
from kvlab.models.load import LoadedModel, load_model
from kvlab.specs.formats import FORMATS

OPENING = "There is an important piece of information hidden in a long text. Find it and remember it."
FILLER = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = " The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = " What is the pass key? The pass key is"


@dataclass(frozen=True)
class Trial:
    """One prompt: token ids, how many of the last ones are the answer, how many of the first are opening and filler,
    and how deep the number stands (0 to 1)."""

    ids: list[int]
    answer: int
    shared: int
    depth: float


def make_trial(model: LoadedModel, tokens: int, depth: float, seed: int) -> Trial:
    """A prompt of about `tokens` tokens, answer included, with the number at `depth` of the filler.

    Raises:
        ValueError: no room for any filler.
    """
    key = random.Random(seed).randrange(10_000, 100_000)
    opening = model.tokenizer.encode(OPENING)  # with the model's start token, if it has one
    parts = (FILLER, f" {key}", NEEDLE.format(key=key), QUESTION)
    filler, answer, needle, question = (model.tokenizer.encode(text, special=False) for text in parts)
    fixed = len(opening) + len(needle) + len(question) + len(answer)
    count = (tokens - fixed) // len(filler)
    if count < 1:
        raise ValueError(f"tokens {tokens}: must leave room for filler, the rest takes {fixed}")
    before = round(depth * count)
    first = opening + filler * before
    ids = [*first, *needle, *(filler * (count - before)), *question, *answer]
    return Trial(ids, len(answer), len(first), depth)


@torch.inference_mode()
def retrieved(model: LoadedModel, trial: Trial, run: PagedRun) -> tuple[bool, float]:
    """(whether greedy decoding writes the number, mean log-probability of its tokens in nats) with the cache of `run`,
    which holds at least the trial's shared tokens, or nothing."""
    run.tokens = min(run.tokens, trial.shared)
    hidden = run.read(trial.ids[run.tokens : -1])[-trial.answer :]
    logp = torch.log_softmax(model.decoder.logits(hidden).float(), dim=-1)
    wanted = torch.tensor(trial.ids[-trial.answer :], device=logp.device)
    return bool((logp.argmax(-1) == wanted).all()), float(logp.gather(-1, wanted[:, None]).mean())


def score(
    model: LoadedModel,
    kv_dtypes: Sequence[str],
    lengths: Sequence[int],
    trials: int,
    keep: Callable[[dict], None] = lambda found: None,
) -> dict[str, dict[str, dict]]:
    """Per format and length: how many of how many were retrieved, and the mean log-probability of each number.

    Depths are spread evenly; the same prompts for every format. `keep` gets what is there after each format.
    """
    found: dict[str, dict[str, dict]] = {}
    plan = [(n, (i + 0.5) / trials, 1000 * n + i) for n in lengths for i in range(trials)]
    every = sorted((make_trial(model, *one) for one in plan), key=lambda trial: -trial.shared)
    size = {len(trial.ids): n for n in lengths for trial in every if len(trial.ids) <= n and len(trial.ids) > n / 2}
    for name in kv_dtypes:
        run = PagedRun(model, name, max(len(trial.ids) for trial in every))
        run.read(every[0].ids[: every[0].shared])
        rows: dict[str, dict] = {str(n): {"retrieved": 0, "of": 0, "depth": [], "logp": []} for n in lengths}
        for trial in every:  # the deepest first: what is taken back is never needed again
            right, logp = retrieved(model, trial, run)
            row = rows[str(size[len(trial.ids)])]
            row["retrieved"] += int(right)
            row["of"] += 1
            row["depth"].append(trial.depth)
            row["logp"].append(round(logp, 4))
        found[name] = rows
        keep(found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    import sys

    from kvlab.lab.record import provenance

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--formats", nargs="+", default=["fp32", "int8", "fp8_e4m3", "int4", "int4_had", "kivi2"],
                        help="formats to ask with, or ALL")  # fmt: skip
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048], help="tokens of a prompt")
    parser.add_argument("--trials", type=int, default=6, help="prompts of each length, at depths spread evenly")
    parser.add_argument("--out", required=True, help="file for the JSON, written after every format")
    args = parser.parse_args(argv)
    if args.formats == ["ALL"]:
        args.formats = [name for name in FORMATS if name != "fp64"]  # fp32 is full precision
    raw = list(sys.argv[1:] if argv is None else argv)
    origin, begun = provenance("python -m kvlab.lab.passkey " + " ".join(raw)), time.perf_counter()
    model = load_model(args.model)

    def keep(found: dict) -> None:
        result = {
            "what": "passkey retrieval by storage format of the cache and length of the prompt",
            **origin,
            "conditions": f"{model.name} ({model.source}; the weights stay as they are), {args.trials} prompts of each "
            "length at depths spread evenly over the text, the same for every format; retrieved: every token of the "
            "five-digit number was the most likely one.",
            "seeds": "1000 x length + number of the prompt",
            "lengths": args.lengths,
            "seconds": round(time.perf_counter() - begun, 1),
            "formats": found,
        }
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"{len(found)} of {len(args.formats)} formats, {time.perf_counter() - begun:.0f} s", flush=True)

    score(model, args.formats, args.lengths, args.trials, keep)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
