"""How an engine stores its cache: the rule of formats applied to the model, and what views need besides bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvlab.models.facts import AttentionFacts, LayerFacts, RopeFacts
from kvlab.models.rope import inverse_frequencies, rope_tables, rotate
from kvlab.ops.dispatch import backend
from kvlab.ops.grouped_views import GroupedViews, Turn
from kvlab.ops.views import PageViews, SegmentViews
from kvlab.quant.closed import BEFORE_ROTATION
from kvlab.quant.fixed import FixedScales
from kvlab.specs.kv_dtypes import canonical, with_formats
from kvlab.specs.model import ModelSpec

_FORMAT_OF = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def kv_formats(model, kv_dtype: str | None) -> tuple[str, ModelSpec]:
    """(the rule under its canonical name, what the model's layers then cache); None is the dtype it computes in.

    Raises:
        ValueError: as `kvlab.specs.kv_dtypes.with_formats`; fp64 pages where kernels compute in fp32.
    """
    decoder = model.decoder
    rule = canonical(kv_dtype or _FORMAT_OF[decoder.dtype])
    spec = with_formats(model.spec, rule)
    stored = {part.format.name for _, part in spec.parts() if hasattr(part, "format")}
    if "fp64" in stored and backend(torch.empty(0, dtype=decoder.dtype, device=decoder.device)) == "cpu":
        raise ValueError("kv_dtype 'fp64': needs a model in fp64 (--dtype fp64), the CPU kernels compute in fp32")
    return rule, spec


def finished_views(
    views: Sequence[Sequence[Any]], model, max_len: int, scales: Mapping[int, FixedScales] | None = None
) -> list[tuple[Any, ...]]:
    """`views` [layer][part], with the calibrated scales of each layer and the rotation of keys stored before it.

    Raises:
        ValueError: scales for a layer that is not there or not in fp8, or of another shape; a rotation that is not
            known.
    """
    beyond = sorted(set(scales or ()) - set(range(len(views))))
    if beyond:
        raise ValueError(f"kv_scales: layer {beyond[0]}: the model has layers 0 to {len(views) - 1}")
    found = []
    for layer, parts in enumerate(views):
        finished = tuple(_finished(view, model, layer, max_len) for view in parts)
        if scales and layer in scales:
            finished = (_scaled(finished[0] if finished else None, scales[layer], layer), *finished[1:])
        found.append(finished)
    return found


def _scaled(view: Any, fixed: FixedScales, layer: int) -> PageViews:
    if view is None or isinstance(view, SegmentViews):
        raise ValueError(f"kv_scales: layer {layer} keeps no keys and values, which fixed scales are for")
    if not isinstance(view, PageViews) or view.format not in ("fp8_e4m3", "fp8_e5m2"):
        raise ValueError(f"kv_scales: layer {layer} is not stored in fp8_e4m3 or fp8_e5m2, which have fixed scales")
    for name, scale, width in (("k", fixed.k, view.key_dim), ("v", fixed.v, view.value_dim)):
        if scale.dim() != 2 or scale.shape[0] not in (1, view.k.shape[1]) or scale.shape[1] not in (1, width):
            raise ValueError(
                f"kv_scales: {name} of layer {layer} has shape {tuple(scale.shape)}: must be [1 or "
                f"{view.k.shape[1]} KV heads, 1 or {width} values]"
            )
    return replace(view, fixed=fixed)


def _finished(view: Any, model, layer: int, max_len: int) -> Any:
    if not isinstance(view, GroupedViews) or view.format not in BEFORE_ROTATION:
        return view
    facts = model.config.layers[layer]
    modules = [b.module for b in facts.branches] if isinstance(facts, LayerFacts) else []
    attention = [m for m in modules if isinstance(m, AttentionFacts)]
    if len(attention) != 1:
        raise ValueError(f"kv_dtype {view.format!r}: how layer {layer} rotates its keys is not known; it needs that")
    rope = attention[0].rope
    return view if rope is None else replace(view, turn=key_turn(rope, view.key_dim, model.decoder, max_len))


def key_turn(rope: RopeFacts, head_dim: int, decoder, max_len: int) -> Turn:
    """The rotation of keys by their positions, and back, without the factor that some rules put on the length."""
    frequencies = inverse_frequencies(rope, head_dim, decoder.dtype, max_len).to(decoder.device)

    def turn(keys: torch.Tensor, positions: torch.Tensor, back: bool) -> torch.Tensor:
        cos, sin = rope_tables(positions, frequencies, keys.dtype)
        return rotate(keys, cos, -sin if back else sin, rope.interleaved)

    return turn
