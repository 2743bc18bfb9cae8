"""What reading the cache costs a decode step of whole models, layer by layer: what the explorer can only count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from kvlab.lab import bench_gpu_time as clock
from kvlab.lab.kernels import more_configs
from kvlab.lab.kernels.configs import decode
from kvlab.lab.kernels.cost import attention_cost
from kvlab.lab.kernels.shapes import Shape
from kvlab.plan import make_plan
from kvlab.plan.explore import DEFAULTS
from kvlab.specs.model import ModelSpec
from kvlab.specs.parts import Attention, MLALatent, SlidingWindow

Row = Callable[[], dict[str, Any]]
# the explorer's default, and one model for each kind of cache that a kernel here reads
MODELS = (DEFAULTS["model"], "mistral-7b-v0.1", "gemma-3-4b", "gpt-oss-20b", "llama-3-70b", "deepseek-v3")
CONTEXT, BATCH = DEFAULTS["context"], 8


def model_rows(device: torch.device) -> dict[str, Row]:
    """A row for each model."""
    return {f"{name} x {BATCH}": lambda name=name: model_row(name, device) for name in MODELS}


def model_row(name: str, device: torch.device) -> dict[str, Any]:
    """Milliseconds of all layers' decode attention, its bytes, and a part for each kind of layer."""
    spec = make_plan(name, context=CONTEXT, batch=BATCH, kv_dtype="bf16").model
    parts = Counter(part for _, part in spec.parts())
    kinds = [{"kind": part.kind, "layers": n} | _measured(part, spec, device) for part, n in parts.items()]
    known = [k for k in kinds if "us" in k]
    found = {"context": CONTEXT, "batch": BATCH, "kinds": kinds}
    if len(known) < len(kinds):
        return found | {"not measured": "layers without a decode kernel"}
    total = sum(k["layers"] * k["us"] for k in known)
    n_bytes = sum(k["layers"] * k["bytes"] for k in known)
    return found | {"ms": total / 1e3, "bytes": n_bytes, "gb_per_s": n_bytes / total / 1e3}


def _measured(part: Any, spec: ModelSpec, device: torch.device) -> dict[str, Any]:
    keep = ("us", "bytes", "gb_per_s")
    if isinstance(part, MLALatent):
        if (spec.num_query_heads, part.latent_dim, part.rope_dim) != more_configs.MLA:
            return {"not measured": "the configuration is that of DeepSeek-V3"}
        cost = more_configs.mla_cost("bf16")
        found = clock.launched(lambda: more_configs.mla_decode("bf16"), cost, device)
        return {k: found[k] for k in keep}
    if type(part) not in (Attention, SlidingWindow):
        return {"not measured": "no decode kernel for the kind"}
    window = part.window if isinstance(part, SlidingWindow) else 0
    heads = spec.num_query_heads
    shape = Shape(heads, part.num_kv_heads, part.key_dim, part.value_dim, window=window, batch=BATCH, context=CONTEXT)
    found = clock.launched(lambda: decode(shape), attention_cost(shape), device)
    return {k: found[k] for k in keep}
