"""How an engine is set up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from kvlab.cache import PrefixOptions
from kvlab.engine.speculation import Speculation
from kvlab.engine.tiers import TierOptions
from kvlab.quant.fixed import FixedScales
from kvlab.schedule import Limits, SchedulingPolicy
from kvlab.schedule.policy import FIRST_COME
from kvlab.specs.rollback import NOTHING_KEPT, RollbackPolicy


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is set up.

    Attributes:
        kv_dtype: storage format of keys and values, or a rule such as "int4,sliding=bf16,first=2:bf16" (see
            `kvlab.specs.kv_dtypes`); None is the model's dtype.
        kv_scales: calibrated scales of layers in fp8, by layer (`kvlab.quant.calibrate`); None: scale 1.
        block_size: tokens per page.
        pools: how groups share memory: "per_kind", "unified" or "sectors" (see `kvlab.specs.pools`).
        num_blocks: units of each pool (pages; sectors where those are shared), the null one included; a tuple gives
            one number per pool.
        kv_bytes: bytes of all pools; with neither this nor num_blocks a share of the free memory.
        split_tokens: pools of their own share kv_bytes as one sequence of this length needs them; None: the longest.
        rollback: how far sequences can be taken back, and which states are kept; by default nothing is.
        prefix: what requests computed stays findable for others (see `kvlab.cache.prefix`); None: it does not.
        scheduling: who goes first, who gives way when pages run out, and what becomes of its pages.
        tiers: memory below the pool, for preempted requests and saved prefixes; None: none.
        max_model_len: prompt and output of a request; None is the model's own length.
        max_num_seqs: requests that run at once.
        max_batched_tokens: tokens of one step.
        seed: of requests that name none.
        check: invariants after every step, and NaN in every page that nobody holds.
        pad_to: rows of a step are padded to multiples of this.
        page_seed: shuffles the order in which pages are handed out at first; for tests and experiments.
        log_events: events that the log keeps.
        speculation: how tokens are drafted (`kvlab.speculate.SpeculationOptions`); None: not at all.
    """

    kv_dtype: str | None = None
    kv_scales: Mapping[int, FixedScales] | None = None
    block_size: int = 16
    pools: str = "per_kind"
    num_blocks: int | tuple[int, ...] | None = None
    kv_bytes: int | None = None
    split_tokens: int | None = None
    rollback: RollbackPolicy = NOTHING_KEPT
    prefix: PrefixOptions | None = None
    scheduling: SchedulingPolicy = FIRST_COME
    tiers: TierOptions | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_batched_tokens: int = 2048
    seed: int = 0
    check: bool = False
    pad_to: int = 1
    page_seed: int | None = None
    log_events: int = 4096
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        if self.pad_to < 1:
            raise ValueError(f"pad_to {self.pad_to}: must be at least 1")
        if self.speculation is not None and self.speculation.keep_states:
            object.__setattr__(self, "rollback", replace(self.rollback, before_drafts=True))

    def limits(self, max_position: int) -> Limits:
        """The limits of steps and sequences for a model of length `max_position`.

        Raises:
            ValueError: a limit below 1, or longer sequences than the model was made for.
        """
        length = max_position if self.max_model_len is None else self.max_model_len
        if length > max_position:
            raise ValueError(f"max_model_len {length}: the model was made for at most {max_position} tokens")
        return Limits(self.max_num_seqs, self.max_batched_tokens, length)


def engine_options(options: EngineOptions | None, changes: dict) -> EngineOptions:
    """`options`, or the defaults, with `changes` by field name.

    Raises:
        ValueError: a name that is no option, or a value out of its range.
    """
    known = {field.name for field in fields(EngineOptions)}
    if unknown := changes.keys() - known:
        raise ValueError(f"option {min(unknown)}: must be one of {', '.join(sorted(known))}")
    base = {} if options is None else {name: getattr(options, name) for name in known}
    return EngineOptions(**base | changes)
