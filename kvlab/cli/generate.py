"""kvlab generate: text from a model through the paged engine, streamed; or one JSON object."""

from __future__ import annotations

import argparse
import json
import sys
import time

from kvlab.cli.engine_arguments import add_engine_arguments, engine_changes, make_engine

HELP = "generate text with a real model and show what its cache took"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvlab generate`."""
    parser.add_argument("prompt", nargs="?", help="text; or give --prompt-ids")
    parser.add_argument("--prompt-ids", metavar="1,2,3", help="token ids, separated by commas")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=64, metavar="N", help="new tokens at most (default 64)")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P", help="likeliest tokens up to this sum")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="the K likeliest tokens; 0 is all")
    sampling.add_argument("--seed", type=int, default=0, metavar="N", help="equal seeds give equal text (default 0)")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0 after the text or the JSON is written.

    Raises:
        ValueError: what the arguments ask for cannot be done; the message names the argument.
    """
    prompt = _prompt(args)
    # torch takes a second to import: bad arguments fail before it
    from kvlab.schedule import SamplingParams

    params = SamplingParams(
        args.max_tokens, args.temperature, args.top_k, args.top_p, args.seed, ignore_eos=args.ignore_eos
    )
    options = engine_changes(args) | {"seed": args.seed}
    engine = make_engine(args, options)
    model = engine.model
    if args.chat:
        if model.tokenizer is None or not isinstance(prompt, str):
            raise ValueError("--chat: needs a text prompt and a model with a tokenizer")
        prompt = model.tokenizer.encode_chat([{"role": "user", "content": prompt}])
    started = time.perf_counter()
    request_id = engine.add_request(prompt, params)
    if args.kv_bytes is None and args.num_blocks is None:
        print(f"kvlab: {engine.describe()}", file=sys.stderr)
    result = _generate(engine, request_id, started, echo=not args.json)
    if args.json:
        print(json.dumps(result, ensure_ascii=False, indent=2))
    return 0 if result["finish_reason"] != "error" else 1


def _prompt(args: argparse.Namespace) -> str | list[int]:
    if (args.prompt is None) == (args.prompt_ids is None):
        raise ValueError("prompt: give a text, or --prompt-ids, not both")
    if args.prompt_ids is None:
        return args.prompt
    try:
        return [int(part) for part in args.prompt_ids.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"--prompt-ids {args.prompt_ids!r}: must be whole numbers separated by commas") from None


def _generate(engine, request_id: str, started: float, echo: bool) -> dict:
    """The JSON object of one request; writes its text as it comes when `echo`."""
    request = engine.requests[request_id]
    text, first = [], None
    for piece in engine.follow(request_id):
        first = first or time.perf_counter()
        shown = piece.text if engine.model.tokenizer else f"{piece.token_id} "
        text.append(piece.text)
        if echo and shown:
            print(shown, end="", flush=True)
    ended = time.perf_counter()
    if echo:
        print()
    if request.error:
        print(f"kvlab: {request.error}", file=sys.stderr)
    return _report(engine, request, "".join(text), (started, first or ended, ended))


def _report(engine, request, text: str, times: tuple[float, float, float]) -> dict:
    """What --json prints. `tokens_per_s` counts the tokens after the first, over the time after the first."""
    started, first, ended = times
    count = len(request.output)
    kv = engine.kv
    return {
        "model": engine.model.name,
        "source": engine.model.source,
        "prompt_tokens": request.num_prompt,
        "token_ids": request.output,
        "text": text,
        "finish_reason": request.finish_reason,
        "error": request.error,
        "kv": {
            "dtype": engine.kv_dtype,
            "block_size": engine.options.block_size,
            "num_blocks": {g.name: n for g, n in zip(engine.groups, engine.num_blocks, strict=True)},
            "predicted_bytes": kv.predicted_bytes,
            "allocated_bytes": kv.allocated_bytes,
            # of this request at its longest: entries alone, and the pages that held them
            "used_bytes": kv.peak_used_bytes,
            "held_bytes": kv.peak_held_bytes,
        },
        "speculation": None if engine.speculator is None else _drafts(engine),
        "first_token_s": round(first - started, 4),
        "tokens_per_s": round((count - 1) / (ended - first), 2) if count > 1 else None,
        "device": str(engine.model.decoder.device),
        "dtype": engine.model.dtype,
    }


def _drafts(engine) -> dict:
    """What came of the drafts; tokens of a step with drafts, the one picked after them included."""
    options, seen = engine.options.speculation, engine.speculator.acceptance
    return {
        "method": options.method,
        "k": options.k,
        "draft_steps": seen.steps,
        "draft_tokens": seen.drafted,
        "accepted_tokens": seen.accepted,
        "tokens_per_draft_step": round(seen.mean_length, 3),
        "kv_bytes": engine.speculator.kv_bytes,
    }
