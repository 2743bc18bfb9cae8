"""Cutting a shape to what a device can hold: the vocabulary, then layers, then width, each by a stated factor.

Only the bytes of the cut shape matter here; nothing is allocated. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvlab.plan.plan import make_plan
from kvlab.specs.families import from_config
from kvlab.specs.families.multimodal import text_part
from kvlab.specs.formats import get_format
from kvlab.specs.weights import count

_PER_LAYER = ("layer_types", "layers_block_type", "compress_ratios", "no_rope_layers", "mlp_layer_types")
"""Fields with one entry per layer."""
_PER_WIDTH = (
    "intermediate_size", "ffn_dim", "ff_intermediate_size", "linear_num_key_heads", "linear_num_value_heads",
    "q_lora_rank", "o_lora_rank", "moe_intermediate_size", "shared_expert_intermediate_size",
)  # fmt: skip
"""Widths besides heads and hidden size that are divided with them, where a config has them."""
_NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")

VOCABULARY = 4096
"""Rows of the embedding that are kept: enough to sample from, too few to hide the layers."""


@dataclass(frozen=True)
class Workload:
    """What a shape is measured under.

    Attributes:
        context: tokens of each sequence at the end of the measurement.
        batch: sequences that decode together.
        kv_dtype, weight_dtype: storage formats; the weights' is what the device computes in.
        in_flight: tokens of one sequence that a step may add.
        block_size: tokens of a page.
    """

    context: int
    batch: int
    kv_dtype: str
    weight_dtype: str
    in_flight: int = 1
    block_size: int = 16


@dataclass(frozen=True)
class CutShape:
    """A shape that fits, and what was cut.

    Attributes:
        config: of the cut shape, as `kvlab.models` reads it.
        layers, of_layers: kept and original.
        width: by what heads, hidden size and feed-forward width were divided; 1 when they were not.
        vocabulary, of_vocabulary: rows kept and original.
        weights_bytes, kv_bytes: of the cut shape; the cache is the whole pool of the workload's batch.
        read_bytes: weights that one decode step reads.
        operations: multiplications and additions of one decode step, attention left out.
    """

    config: dict[str, Any]
    layers: int
    of_layers: int
    width: int
    vocabulary: int
    of_vocabulary: int
    weights_bytes: int
    kv_bytes: int
    read_bytes: int
    operations: int

    def describe(self) -> str:
        """What was cut, in one clause."""
        if self.width == 1 and self.layers == self.of_layers:
            return (
                f"all {self.layers} layers at full width, {self.vocabulary:,} of {self.of_vocabulary:,} embedding rows"
            )
        width = "full width" if self.width == 1 else f"1/{self.width} of the width (heads, hidden size, feed-forward)"
        factor = self.of_layers / self.layers
        return (
            f"{self.layers} of {self.of_layers} layers (factor {factor:.3g}) at {width}, "
            f"{self.vocabulary:,} of {self.of_vocabulary:,} embedding rows"
        )


def cut_shape(config: Mapping[str, Any], work: Workload, budget_bytes: int, max_operations: float) -> CutShape:
    """The largest cut of `config` whose weights and cache fit `budget_bytes` and whose step stays affordable.

    Layers go first, whole periods of the layer pattern where it has one; when one period is too much, the width is
    halved until it fits.

    Raises:
        ValueError: even the narrowest shape is too large for this workload, or a config that cannot be sized or cut.
    """
    config = _to_cut(config)
    period = layer_period(config)
    layers = config["num_hidden_layers"]
    counts = range(layers, 0, -1) if layers < period else [layers, *range((layers - 1) // period * period, 0, -period)]
    smallest = None
    for width in widths(config):
        low, high = 0, len(counts) - 1
        while low < high:  # fewer layers never take more: find the first count that fits
            middle = (low + high) // 2
            if _fits(_sized(config, counts[middle], width, work), budget_bytes, max_operations):
                high = middle
            else:
                low = middle + 1
        smallest = _sized(config, counts[low], width, work)
        if _fits(smallest, budget_bytes, max_operations):
            return smallest
    assert smallest is not None
    raise ValueError(
        f"context {work.context:,} x batch {work.batch:,}: even {smallest.describe()} takes "
        f"{smallest.weights_bytes + smallest.kv_bytes:,} bytes of {budget_bytes:,}; lower one of them"
    )


def _to_cut(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text decoder's config, with every field that cutting changes."""
    part, family = text_part(config)
    found = {"vocab_size": config.get("vocab_size"), **part, "model_type": family}
    missing = [name for name in _NEEDED if not found.get(name)]
    if missing:
        raise ValueError(f"{family} config: has no {missing[0]}, by which its shape would be cut; its plan stands")
    return found


def _fits(shape: CutShape, budget_bytes: int, max_operations: float) -> bool:
    return shape.weights_bytes + shape.kv_bytes <= budget_bytes and shape.operations <= max_operations


def page_tokens(config: Mapping[str, Any]) -> int:
    """Tokens of a page: 16, or the least multiple of it that every compression ratio of the model divides."""
    rules = {part.retention for _, part in from_config(config).parts()}
    return math.lcm(16, *(rule.size for rule in rules if rule.rule == "stride"))


def layer_period(config: Mapping[str, Any]) -> int:
    """Layers after which the kinds of layer repeat: what `layer_types` lists, or else what each layer caches."""
    kinds = config.get("layer_types") or [layer.parts for layer in from_config(config).layers]
    return next(n for n in range(1, len(kinds) + 1) if all(k == kinds[i % n] for i, k in enumerate(kinds)))


def widths(config: Mapping[str, Any]) -> list[int]:
    """The factors by which heads can be divided: powers of two, KV heads down to one, then query heads alone."""
    heads = config["num_attention_heads"]
    found = [1]
    while heads % (2 * found[-1]) == 0:
        found.append(2 * found[-1])
    return [f for f in found if (heads // f) % max(1, _kv_heads(config) // f) == 0]


def _kv_heads(config: Mapping[str, Any]) -> int:
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def _sized(config: Mapping[str, Any], layers: int, width: int, work: Workload) -> CutShape:
    heads, of_layers, of_vocabulary = (
        config[k] for k in ("num_attention_heads", "num_hidden_layers", "vocab_size")
    )  # fmt: skip
    cut = dict(config)
    cut |= {
        "num_hidden_layers": layers,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "num_attention_heads": heads // width,
        "num_key_value_heads": max(1, _kv_heads(config) // width),
        "hidden_size": config["hidden_size"] // width,
        "vocab_size": min(VOCABULARY, of_vocabulary),
        "max_position_embeddings": max(work.context, config.get("max_position_embeddings") or 0),
    }
    cut |= {name: _divided(config[name], width, layers) for name in _PER_WIDTH if config.get(name)}
    cut |= {name: list(config[name][:layers]) for name in _PER_LAYER if config.get(name)}
    # ids beyond the vocabulary that was kept
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        cut.pop(name, None)
    plan = make_plan(
        cut, context=work.context, kv_dtype=work.kv_dtype, policy="paged", block_size=work.block_size,
        max_batched_tokens=work.in_flight, conv_dtype=work.weight_dtype,
    )  # fmt: skip
    sequence, parameters = plan.per_gpu(), count(cut)
    element = get_format(work.weight_dtype).bits // 8
    return CutShape(
        cut, layers, of_layers, width, cut["vocab_size"], of_vocabulary,
        weights_bytes=parameters.total * element,
        kv_bytes=work.batch * sequence.total + sequence.pool_overhead,
        read_bytes=round(parameters.read_per_step(work.batch) * element),
        operations=2 * work.batch * parameters.read_always,
    )  # fmt: skip


def _divided(width: int | list[int], factor: int, layers: int) -> int | list[int]:
    return width // factor if isinstance(width, int) else [w // factor for w in width[:layers]]
