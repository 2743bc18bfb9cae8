"""The options of a simulation besides those of a plan."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from kvlab.schedule import Limits
from kvlab.simulate.summary import Objective
from kvlab.specs.units import parse_bytes, parse_tokens

PREFIX = ("hash", "radix", "off")


@dataclass(frozen=True)
class SimulateOptions:
    """How the simulated engine is set up.

    Attributes:
        max_num_seqs, max_batched_tokens: of a step.
        max_model_len: prompt and output of a request; None is the model's own length.
        prefix: design of the prefix cache, or "off".
        pools: how layers of several kinds share memory: "unified" or "sectors".
        num_blocks: units of the pool, the null one included.
        kv_bytes: of the pool; with neither what the weights leave of the GPU.
        objective: what makes a request good.
    """

    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    max_model_len: int | None = None
    prefix: str = "hash"
    pools: str = "unified"
    num_blocks: int | None = None
    kv_bytes: int | None = None
    objective: Objective = field(default_factory=Objective)

    def __post_init__(self) -> None:
        if self.prefix not in PREFIX:
            raise ValueError(f"prefix {self.prefix!r}: must be one of {', '.join(PREFIX)}")
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ValueError(f"num_blocks {self.num_blocks}: must be at least 2")
        if self.num_blocks is not None and self.kv_bytes is not None:
            raise ValueError("kv_bytes and num_blocks: give one of them")

    def limits(self, max_position: int | None) -> Limits:
        """The scheduler's limits for a model of that length (None: unbounded).

        Raises:
            ValueError: a limit below 1, or sequences longer than the model was made for.
        """
        longest = max_position or 2**20
        length = longest if self.max_model_len is None else self.max_model_len
        if length > longest:
            raise ValueError(f"max_model_len {length}: the model was made for at most {longest} tokens")
        return Limits(self.max_num_seqs, self.max_batched_tokens, length)


def simulate_options(given: dict[str, Any]) -> tuple[SimulateOptions, dict[str, Any]]:
    """(options of the simulation, what is left for the plan); None stands for the default.

    Raises:
        ValueError: a value that cannot be read.
    """
    given = {name: value for name, value in given.items() if value is not None}
    own = {f.name: given.pop(f.name) for f in fields(SimulateOptions) if f.name in given}
    for name in ("max_batched_tokens", "max_model_len"):
        if name in own:
            own[name] = parse_tokens(own[name], name)
    if "kv_bytes" in own:
        own["kv_bytes"] = parse_bytes(own["kv_bytes"], "kv_bytes")
    for name in ("max_num_seqs", "num_blocks"):
        if name in own:
            own[name] = int(own[name])
    return SimulateOptions(**own), given
