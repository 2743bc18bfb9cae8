"""A draft model in the plan: the guide's example, Llama 3 70B with Llama 3 8B at 32k."""

import json

import pytest

from kvlab.cli import main
from kvlab.plan import make_plan
from kvlab.plan.draft import with_draft


def test_both_caches_are_counted_and_both_weights():
    target, draft = (make_plan(name, context="32k", tp=8).to_json() for name in ("llama-3-70b", "llama-3-8b"))
    both = with_draft(target, draft)
    assert (both["kv_bytes_per_token"], both["kv_bytes"]) == (327_680 + 131_072, 458_752 * 32_768)
    assert both["draft_kv_bytes"] == 131_072 * 32_768 and both["share"] == pytest.approx(0.4)
    left = target["memory"]["free_for_kv_bytes"] - draft["weights_bytes_per_gpu"]
    assert both["max_concurrent"] == left // (both["kv_bytes"] // 8) == 29 < target["max_concurrent"] == 42


def test_the_command_line(capsys):
    assert main(["plan", "llama-3-70b", "--context", "32k", "--tp", "8", "--draft", "llama-3-8b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["with_draft"]["draft"] == "llama-3-8b"
    assert main(["plan", "llama-3-70b", "--context", "32k", "--tp", "8", "--draft", "llama-3-8b"]) == 0
    assert "29 sequences fit" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "llama-3-70b", "--draft", "no-such-model"]) == 2
