"""A target model and the model that drafts for it, on the same GPUs: two weights, two caches, one budget."""

from __future__ import annotations

from typing import Any

from kvlab.specs.units import human_bytes


def with_draft(target: dict[str, Any], draft: dict[str, Any]) -> dict[str, Any]:
    """What both need together, from the two plans as JSON, made with the same options.

    Returns:
        kv_bytes_per_token, kv_bytes and weights_bytes of both; share: of the draft's cache in the target's;
        max_concurrent: sequences that fit with both weights and both caches, by the target's budget.
    """
    both = {name: target[name] + draft[name] for name in ("kv_bytes_per_token", "kv_bytes", "weights_bytes")}
    budget = target["memory"]["free_for_kv_bytes"] - draft["weights_bytes_per_gpu"]
    per_gpu = target["kv_bytes_per_gpu"] + draft["kv_bytes_per_gpu"]
    return both | {
        "draft": draft["model"],
        "draft_kv_bytes": draft["kv_bytes"],
        "share": draft["kv_bytes"] / target["kv_bytes"] if target["kv_bytes"] else 0.0,
        "max_concurrent": max(0, budget // per_gpu) if per_gpu else 0,
    }


def explain_draft(both: dict[str, Any], target: dict[str, Any]) -> str:
    """The lines that a plan's text gains with a draft."""
    return (
        f"\nWith {both['draft']} drafting: {human_bytes(both['draft_kv_bytes'])} more cache a sequence, {both['share']:.0%} of the\n"
        f"target's; both take {human_bytes(both['kv_bytes'])} at this context ({both['kv_bytes_per_token']:,} bytes a token), and\n"
        f"{both['max_concurrent']:,} sequences fit with both models' weights, not {target['max_concurrent']:,}."
    )
