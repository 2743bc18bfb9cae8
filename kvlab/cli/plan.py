"""`kvlab plan`: bytes, capacity and speed of any model's cache, without loading it."""

from __future__ import annotations

import argparse
import json
import sys

HELP = "size a model's cache: bytes, how many sequences fit, how fast"

EPILOG = """\
TARGET is a name from the catalogue (llama-3-70b), a config.json or the folder it is in, or a hub id.
k is 1,024 and M is 1,048,576 tokens; GB is 10^9 and GiB is 2^30 bytes.
What cannot be sized ends with code 2 and one line on stderr."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvlab plan`. Values are checked by `kvlab.plan.options`, which words the errors."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("target", metavar="TARGET", help="catalogue name, config.json or its folder, or hub id")
    add("--context", metavar="N", help="tokens of a sequence, as in 32k (default 8k, or the model's longest if less)")
    add("--batch", metavar="N", help="sequences decoded together (default 1)")
    add("--prompt", metavar="N", help="plan for requests of N tokens in ...")
    add("--output", metavar="N", help="... and N tokens out; sets the context to their sum")
    add(
        "--kv-dtype",
        metavar="F",
        help="bf16 (default), a format of `kvlab formats`, or a rule such as int4,sliding=bf16",
    )
    add("--weight-dtype", metavar="F", help="storage format of the weights (default bf16)")
    add("--state-dtype", metavar="F", help="of recurrent states (default fp32)")
    add("--conv-dtype", metavar="F", help="of convolution inputs (default bf16)")
    add("--tp", metavar="N", help="tensor parallel GPUs (default 1)")
    add("--pp", metavar="N", help="pipeline stages (default 1)")
    add("--cp", metavar="N", help="context parallel GPUs (default 1)")
    add("--gpu", metavar="NAME", help="h100 (default), h200, b200, a100, l40s, rtx-4090, mi300x, m4-max, ...")
    add("--policy", metavar="P", help="how a sequence is counted: ideal (default), paged, vllm")
    add("--pools", metavar="P", help="how layers share memory when paged: per_kind (default), unified, sectors")
    add(
        "--checkpoint-tokens", metavar="N", help="keep a copy of recurrent states every N tokens when paged (default 0)"
    )
    add("--rollback-tokens", metavar="N", help="keep what a step back of N tokens needs when paged (default 0)")
    add("--block-size", metavar="N", help="tokens of a page (default 16)")
    add("--gpu-util", metavar="X", help="fraction of the GPU's memory to use (default 0.9)")
    add("--reserve", metavar="BYTES", help="per GPU for activations and the runtime (default 2GiB)")
    add("--max-batched-tokens", metavar="N", help="most tokens of a step: what windows hold in flight (default 2048)")
    add("--image-tokens", metavar="N", help="encoder tokens that fill cross-attention caches (default 0)")
    add("--draft", metavar="MODEL", help="a model that drafts on the same GPUs: its weights and its own cache")
    add("--json", action="store_true", help="everything as JSON, sizes in exact bytes")


def run(args: argparse.Namespace) -> int:
    """Prints the plan; 0, or raises ValueError with the reason it cannot be made."""
    from kvlab.plan.options import OPTIONS
    from kvlab.plan.plan import make_plan

    plan = make_plan(args.target, **{name: getattr(args, name) for name in OPTIONS})
    found, both = plan.to_json(), {}
    if args.draft is not None:
        from kvlab.plan.draft import explain_draft, with_draft

        draft = make_plan(args.draft, **{name: getattr(args, name) for name in OPTIONS})
        both = {"with_draft": with_draft(found, draft.to_json())}
    text = json.dumps(found | both, indent=1, allow_nan=False) if args.json else plan.explain()
    if both and not args.json:
        text += "\n" + explain_draft(both["with_draft"], found)
    sys.stdout.write(text + "\n")
    return 0
