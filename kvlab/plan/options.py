"""The options of a plan, checked and with their defaults: what `kvlab plan --help` lists, as one object."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from kvlab.plan.hardware import DEFAULT_GPU, Gpu, get_gpu
from kvlab.plan.policies import POLICIES
from kvlab.plan.sharding import Sharding
from kvlab.specs.formats import StorageFormat, get_format
from kvlab.specs.kv_dtypes import canonical
from kvlab.specs.pools import POOLS
from kvlab.specs.rollback import RollbackPolicy
from kvlab.specs.units import parse_bytes, parse_tokens

DEFAULT_CONTEXT = 8192
DEFAULT_RESERVE = 2 * 2**30


@dataclass(frozen=True)
class PlanOptions:
    """What is asked of a plan.

    Attributes:
        context: tokens of a sequence; None: 8,192, or the model's longest position where that is less.
        batch: sequences decoded together, for timing and for "does it fit".
        kv_dtype, state_dtype, conv_dtype, weight_dtype: storage formats of the cache, recurrent states, convolution
            inputs, weights.
        tp, pp, cp: tensor, pipeline and context parallel degrees.
        gpu: name in the hardware catalogue.
        policy: "ideal", "paged" or "vllm": how the bytes of a sequence are counted.
        pools: how the groups share memory under "paged": "per_kind", "unified" or "sectors".
        checkpoint_tokens: tokens after which a copy of each recurrent state is kept, again and again; 0: never.
        rollback_tokens: how far a sequence can always step back.
        block_size: tokens of a page; None: 16, or the next multiple that a compression ratio needs.
        gpu_util: fraction of the GPU's memory that may be used.
        reserve: bytes per GPU for activations, graphs and the runtime.
        image_tokens: encoder tokens that fill cross-attention caches.
        prompt, output: tokens in and out of a request; together they set the context.
        max_batched_tokens: most tokens computed in one step: what windows hold in flight.
    """

    context: int | None = None
    batch: int = 1
    kv_dtype: str = "bf16"
    weight_dtype: str = "bf16"
    state_dtype: str = "fp32"
    conv_dtype: str = "bf16"
    tp: int = 1
    pp: int = 1
    cp: int = 1
    gpu: str = DEFAULT_GPU
    policy: str = "ideal"
    pools: str = "per_kind"
    checkpoint_tokens: int = 0
    rollback_tokens: int = 0
    block_size: int | None = None
    gpu_util: float = 0.9
    reserve: int = DEFAULT_RESERVE
    image_tokens: int = 0
    prompt: int | None = None
    output: int | None = None
    max_batched_tokens: int = 2048

    @property
    def sharding(self) -> Sharding:
        """The parallel degrees as one value."""
        return Sharding(self.tp, self.pp, self.cp)

    @property
    def rollback(self) -> RollbackPolicy:
        """What sequences keep to step back to."""
        return RollbackPolicy(self.rollback_tokens, self.checkpoint_tokens)

    @property
    def hardware(self) -> Gpu:
        """The accelerator."""
        return get_gpu(self.gpu)

    @property
    def weight_format(self) -> StorageFormat:
        """The storage format of the weights."""
        return get_format(self.weight_dtype)


OPTIONS = tuple(f.name for f in fields(PlanOptions))
_TOKENS = ("context", "prompt", "output", "max_batched_tokens")
_COUNTS = ("batch", "tp", "pp", "cp", "block_size")
_FORMATS = ("weight_dtype", "state_dtype", "conv_dtype")


def plan_options(given: dict[str, Any]) -> PlanOptions:
    """`given` as checked options; lengths may be texts such as "32k", sizes such as "2GiB", None means the default.

    Raises:
        ValueError: names the option, its value and the rule it breaks.
    """
    if unknown := sorted(set(given) - set(OPTIONS)):
        raise ValueError(f"option {unknown[0]!r}: must be one of {', '.join(OPTIONS)}")
    values = {name: _checked(name, value) for name, value in given.items() if value is not None}
    prompt, output = values.get("prompt"), values.get("output")
    if (prompt is None) != (output is None):
        raise ValueError("prompt and output: give both, or neither")
    if prompt is not None:
        total = prompt + output
        if values.get("context", total) != total:
            raise ValueError(f"context {values['context']}: must be left out, or be prompt + output = {total}")
        values["context"] = total
    options = PlanOptions(**values)
    _ = options.sharding, options.hardware  # raise for what they do not know
    if options.policy not in POLICIES:
        raise ValueError(f"policy {options.policy!r}: must be one of {', '.join(POLICIES)}")
    if options.pools not in POOLS:
        raise ValueError(f"pools {options.pools!r}: must be one of {', '.join(POOLS)}")
    return options


def _checked(name: str, value: Any) -> Any:
    if name in _TOKENS:
        return _named(name, parse_tokens, value)
    if name in _COUNTS:
        return _count(name, value, 1)
    if name in ("image_tokens", "rollback_tokens"):
        return _count(name, value, 0)
    if name == "checkpoint_tokens":
        return 0 if value in (0, "0") else _named(name, parse_tokens, value)
    if name == "reserve":
        return 0 if value in (0, "0") else _named(name, parse_bytes, value)
    if name == "kv_dtype":
        return canonical(value)
    if name in _FORMATS:
        try:
            if get_format(value).group_tokens:
                raise ValueError(f"{name}: is for the keys and values of a cache")
            return get_format(value).name
        except ValueError as error:
            raise ValueError(f"{name} {value!r}: {str(error).partition(': ')[2]}") from None
    if name == "gpu_util":
        return _fraction(value)
    return str(value)


def _named(name: str, parse: Any, value: Any) -> int:
    try:
        return parse(value)
    except ValueError as error:
        raise ValueError(f"{name} {value!r}: {str(error).partition(': ')[2]}") from None


def _count(name: str, value: Any, least: int) -> int:
    text = str(value).strip()
    grouped = re.fullmatch(r"\d{1,3}(,\d{3})+|\d+(_\d+)*", text)
    number = int(re.sub("[,_]", "", text)) if grouped else least - 1
    if number < least:
        raise ValueError(f"{name} {value!r}: must be a whole number of at least {least}")
    return number


def _fraction(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number <= 1:
        raise ValueError(f"gpu_util {value!r}: must be above 0 and at most 1, as in 0.9")
    return number
