"""What a storage format of the cache does to the model's next-token distribution, measured.

Segments of a text are read by the model one token at a time through a paged cache, all segments side by side; one
cache per format, and one in the dtype the model computes in ("full precision": of the cache, not of the weights).
At every token the formats' distributions are compared with the full-precision one.

    python -m kvlab.lab.quality --in-chunks --formats ALL --out book/results/quality_kv_formats.json
    python -m kvlab.lab.quality --out book/results/quality_one_by_one.json    (three formats, token by token)
    python -m kvlab.lab.quality --join A.json B.json --out C.json             (runs of other formats, made side by side)
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvlab.engine.storage import PagedStorage
from kvlab.lab.paged_run import PagedRun
from kvlab.models.load import LoadedModel, load_model
from kvlab.ops.batch import AttentionBatch
from kvlab.specs.formats import FORMATS
from kvlab.specs.kv_dtypes import with_formats
from kvlab.specs.layout import group_parts

BLOCK_SIZE = 16
LOGIT_ROWS = 128  # tokens whose logits exist at one time


class LockstepCache:
    """A cache of `num_seqs` sequences that all advance one token per step, in storage format `kv_format`.

    Pages are handed out once, in order; windows are kept whole and masked by attention.
    """

    def __init__(self, model: LoadedModel, kv_format: str, num_seqs: int, max_tokens: int) -> None:
        groups = group_parts(with_formats(model.spec, kv_format), BLOCK_SIZE)
        width = -(-max_tokens // BLOCK_SIZE)
        self.model, self.kv_format, self.num_seqs = model, kv_format, num_seqs
        self.storage = PagedStorage(groups, [1 + num_seqs * width] * len(groups), model.device)
        self.views = self.storage.views(with_formats(model.spec, kv_format))
        pages = 1 + torch.arange(num_seqs * width, dtype=torch.int32, device=model.device)
        self.block_table = pages.view(num_seqs, width)
        self.starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=model.device)

    def step(self, input_ids: torch.Tensor, position: int) -> torch.Tensor:
        """Log-probabilities fp32 [num_seqs, vocab] after token `position`, whose ids are `input_ids` [num_seqs]."""
        n, device = self.num_seqs, self.model.device
        page, offset = divmod(position, BLOCK_SIZE)
        batch = AttentionBatch(
            query_start_loc=self.starts,
            seq_lens=torch.full((n,), position + 1, dtype=torch.int32, device=device),
            block_table=self.block_table,
            slot_mapping=self.block_table[:, page].long() * BLOCK_SIZE + offset,
            positions=torch.full((n,), position, dtype=torch.int64, device=device),
            num_seqs=n,
            num_tokens=n,
            max_query_len=1,
            max_seq_len=position + 1,
            num_decodes=n,
        )
        batches = [batch] * len(self.storage.layout.groups)
        return torch.log_softmax(self.model.decoder.forward(input_ids, batches, self.views).float(), dim=-1)


@dataclass(frozen=True)
class SegmentScores:
    """Per segment means over its scored tokens, one number per segment.

    Attributes:
        kl: Kullback-Leibler divergence of the format's distribution from the full-precision one, nats per token.
        nll: negative log-likelihood of the text's next token, nats per token.
        top1: fraction of tokens at which the most likely next token is the same.
    """

    kl: list[float]
    nll: list[float]
    top1: list[float]


def score_formats(
    model: LoadedModel,
    segments: torch.Tensor,
    kv_formats: Sequence[str],
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, SegmentScores]:
    """Scores of each format on `segments` int64 [S, N]; the model's own dtype comes first and scores KL 0.

    Every token but the last of a segment is scored, each with all the tokens before it in the cache.

    Raises:
        ValueError: segments longer than the model, or too short to score.
    """
    count, length = segments.shape
    if not 2 <= length <= model.max_model_len:
        raise ValueError(f"segments of {length} tokens: must be 2 to {model.max_model_len}, the model's length")
    names = list(dict.fromkeys([model.dtype, *kv_formats]))
    caches = {name: LockstepCache(model, name, count, length) for name in names}
    sums = {name: torch.zeros(3, count, dtype=torch.float64) for name in names}
    segments = segments.to(model.device)
    for t in range(length - 1):
        full = caches[model.dtype].step(segments[:, t], t)
        for name, cache in caches.items():
            logp = full if name == model.dtype else cache.step(segments[:, t], t)
            sums[name] += _compare(full, logp, segments[:, t + 1]).cpu()
        progress(t + 1, length - 1)
    return {name: SegmentScores(*(row.tolist() for row in total / (length - 1))) for name, total in sums.items()}


@torch.inference_mode()
def score_in_chunks(
    model: LoadedModel,
    segments: torch.Tensor,
    kv_dtypes: Sequence[str],
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, SegmentScores]:
    """As `score_formats`, each segment read as one chunk: sooner, and the same numbers but for rounding, because every
    format is causal.

    `kv_dtypes` may be rules such as "int4,first=2:bf16".
    """
    count, length = segments.shape
    names = list(dict.fromkeys([model.dtype, *kv_dtypes]))
    sums = {name: torch.zeros(3, count, dtype=torch.float64) for name in names}
    for s, ids in enumerate(segments):
        full: list[torch.Tensor] = []
        for i, name in enumerate(names):
            hidden = PagedRun(model, name, length).read(ids[:-1].tolist())
            for block, rows in enumerate(hidden.split(LOGIT_ROWS)):
                logp = torch.log_softmax(model.decoder.logits(rows).float(), dim=-1)
                full += [logp] if i == 0 else []  # full precision comes first
                target = ids[1:].split(LOGIT_ROWS)[block].to(model.device)
                sums[name][:, s] += _compare(full[block], logp, target).sum(1).cpu()
            progress(s * len(names) + i + 1, count * len(names))
    return {name: SegmentScores(*(row.tolist() for row in total / (length - 1))) for name, total in sums.items()}


def _compare(full: torch.Tensor, logp: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """fp64 [3, S]: KL from `full`, negative log-likelihood of `target`, same first choice (1 or 0)."""
    kl = (full.exp() * (full - logp)).sum(-1)
    nll = -logp.gather(-1, target[:, None])[:, 0]
    return torch.stack((kl, nll, (full.argmax(-1) == logp.argmax(-1)).float())).double()


def mean_and_band(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """(mean, 95% confidence interval of the mean) of per-segment values, by Student's t.

    Raises:
        ValueError: fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"values {list(values)}: a band takes at least two segments")
    mean, df = statistics.fmean(values), len(values) - 1
    half = student_t95(df) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, (mean - half, mean + half)


def student_t95(df: int) -> float:
    """The 97.5% quantile of Student's t, by Cornish-Fisher expansion: within 0.1% from 7 degrees of freedom on."""
    z = 1.959963984540054
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / df ** (i + 1) for i, term in enumerate(terms))


def summarize(scores: SegmentScores) -> dict[str, dict]:
    """Mean and 95% band of KL, perplexity (of the mean log-likelihood) and top-1 agreement."""
    found: dict[str, dict] = {}
    for name, values in (("kl", scores.kl), ("perplexity", scores.nll), ("top1", scores.top1)):
        mean, band = mean_and_band(values)
        if name == "perplexity":
            mean, band = math.exp(mean), (math.exp(band[0]), math.exp(band[1]))
        found[name] = {"mean": mean, "band95": list(band)}
    return found


def paired_nll(scores: SegmentScores, full: SegmentScores) -> dict:
    """Change of the log-likelihood (nats per token), segment by segment: its band is free of the text's own spread."""
    mean, band = mean_and_band([a - b for a, b in zip(scores.nll, full.nll, strict=True)])
    return {"mean": mean, "band95": list(band)}


def record(args: argparse.Namespace) -> dict:
    """The result of scoring `args.formats` on the default model, with its provenance."""
    from kvlab.lab.quality_text import evaluation_text
    from kvlab.lab.record import provenance

    origin = provenance("python -m kvlab.lab.quality " + " ".join(args.raw))  # the code that is about to run
    text = evaluation_text()
    model = load_model(args.model)
    ids = model.tokenizer.encode(text.text)
    needed = args.segments * args.length
    if len(ids) < needed:
        raise ValueError(f"text of {len(ids):,} tokens: {args.segments} segments of {args.length} take {needed:,}")
    # segments spread evenly over the text, so that they do not all stand at its start
    stride = (len(ids) - args.length) // max(1, args.segments - 1)
    rows = [ids[i * stride : i * stride + args.length] for i in range(args.segments)]
    begun = time.perf_counter()

    def progress(done: int, of: int) -> None:
        if done % 64 == 0 or done == of or args.in_chunks:
            unit = "segments read" if args.in_chunks else "tokens of each segment"
            print(f"{done} of {of} {unit}, {time.perf_counter() - begun:.0f} s", flush=True)

    run = score_in_chunks if args.in_chunks else score_formats
    scores = run(model, torch.tensor(rows), args.formats, progress)
    full = scores[model.dtype]
    formats = {n: {**summarize(s), "nll_change": paired_nll(s, full)} for n, s in scores.items() if n != model.dtype}
    how = (
        "each as one chunk (formats are causal: as token by token, but for rounding)"
        if args.in_chunks
        else "one token at a time"
    )
    conditions = (
        f"{model.name} ({model.source}; the cache is compared with a {model.dtype} cache, the weights stay as they "
        f"are), {needed:,} tokens of {text.source} in {args.segments} segments of {args.length:,}, read {how} "
        "through the cache; mean and 95% band over the segments."
    )
    return {
        "what": "KL divergence, perplexity and top-1 agreement of KV cache formats against a full-precision cache",
        **origin,
        "conditions": conditions,
        "text": {"source": text.source, "licence": text.licence, "sha256": text.sha256, "tokens": needed},
        "seeds": "none: greedy comparison of distributions, nothing is drawn",
        "segments": args.segments,
        "segment_tokens": args.length,
        "seconds": round(time.perf_counter() - begun, 1),
        "baseline": {"format": model.dtype, **summarize(full)},
        "formats": formats,
        "per_segment": {name: {"kl": s.kl, "nll": s.nll, "top1": s.top1} for name, s in scores.items()},
    }


SAME = ("what", "commit", "device", "versions", "conditions", "text", "seeds", "segments", "segment_tokens", "baseline")


def joined(parts: Sequence[dict]) -> dict:
    """One record of runs of different formats over the same segments; `runs` keeps each one's command and seconds.

    Raises:
        ValueError: runs that differ in code, machine, text or full-precision numbers, or share a format.
    """
    first, names = parts[0], [name for part in parts for name in part["formats"]]
    for part in parts[1:]:
        if differs := [key for key in SAME if part[key] != first[key]]:
            raise ValueError(f"runs differ in {', '.join(differs)}: only runs of the same measurement can be joined")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"formats {', '.join(twice)}: each must stand in one run only")
    order = sorted(names, key=lambda name: (list(FORMATS).index(name) if name in FORMATS else len(FORMATS), name))
    rows = {key: {n: row for part in parts for n, row in part[key].items()} for key in ("formats", "per_segment")}
    return first | {
        "date": max(part["date"] for part in parts),
        "command": f"{len(parts)} runs of python -m kvlab.lab.quality, joined",
        "runs": [{key: part[key] for key in ("command", "date", "seconds")} for part in parts],
        "seconds": round(sum(part["seconds"] for part in parts), 1),
        "formats": {name: rows["formats"][name] for name in order},
        "per_segment": {name: rows["per_segment"][name] for name in (first["baseline"]["format"], *order)},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    import sys

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--formats", nargs="+", default=["bf16", "int8", "fp8_e4m3"], help="formats to score")
    parser.add_argument("--segments", type=int, default=40, help="segments of the text, at least 8 for a band")
    parser.add_argument("--length", type=int, default=768, help="tokens of a segment")
    parser.add_argument(
        "--in-chunks", action="store_true", help="read each segment as one chunk: sooner, same but for rounding"
    )
    parser.add_argument("--join", nargs="+", metavar="FILE", help="measure nothing: one record of the runs in FILES")
    parser.add_argument("--out", help="file for the JSON; standard output when absent")
    args = parser.parse_args(argv)
    if args.formats == ["ALL"]:
        args.formats = [name for name in FORMATS if name not in ("fp64", "fp32")]
    args.raw = list(sys.argv[1:] if argv is None else argv)
    parts = [json.loads(Path(file).read_text(encoding="utf-8")) for file in args.join or ()]
    found = joined(parts) if parts else record(args)
    text = json.dumps(found, indent=1)
    if args.out:
        Path(args.out).write_text(text + "\n", encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
