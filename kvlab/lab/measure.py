"""Measure: builds a shape with random weights, fills its cache and decodes, next to what the plan says of it.

The shape is cut to what this device can hold in a few seconds (`kvlab.lab.measure_shape`); prediction and
measurement are of the same cut shape. The cache is the engine's own pool. Its pages are filled with random entries
rather than computed from a prompt: decoding reads the same bytes, and the wait is shorter by the length of a prefill.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvlab.engine import Engine
from kvlab.engine.sizing import free_memory
from kvlab.lab.measure_shape import CutShape, Workload, cut_shape, page_tokens
from kvlab.lab.record import device_name
from kvlab.models.facts import ModelConfig
from kvlab.models.load import DTYPES, LoadedModel, empty_model
from kvlab.ops.views import PageViews, SegmentViews
from kvlab.ops.write_kv import write_kv
from kvlab.plan.explore import explorer_state
from kvlab.plan.timing import StepTime, attention_operations, cache_read_bytes, step_time
from kvlab.quant import get_codec
from kvlab.schedule import Request, SamplingParams
from kvlab.specs.pages import most_pages
from kvlab.specs.units import human_bytes

STEPS = 8
TIME_LIMIT_S = 15.0  # no decode step begins later than this; the whole returns within 20 s on two cores
CPU_BYTES = 640 * 2**20  # what two cores fill and read often enough in that time
CPU_OPERATIONS = 2e10  # of one step
GPU_OPERATIONS = 1e14

_compiling = threading.Lock()
Tell = Callable[[str], None]


class CancelledError(Exception):
    """The reader asked to stop."""


@dataclass(frozen=True)
class Rates:
    """What this device does by itself: bytes read per second, operations per second, both in the model's dtype."""

    bytes_per_s: float
    operations_per_s: float


def measure(
    params: dict[str, Any], tell: Tell = lambda text: None, cancelled: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Predicted and measured bytes and tokens per second of the shape that `params` (the explorer's controls) names.

    Args:
        tell: is told what is going on, a line at a time.
        cancelled: asked between pieces of work; when true the measurement ends.

    Returns:
        `predicted` and `measured` (each `kv_bytes` and `tokens_per_s`), `factors`, `conditions`, `sentence`.

    Raises:
        ValueError: a shape the engine does not run, or one that cannot be cut to fit.
        CancelledError: `cancelled` said so.
    """
    begun = time.perf_counter()
    state = explorer_state(params)
    config = state["config"] or _preset_config(state["params"]["model"])
    _check(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = "bf16" if device.type == "cuda" else "fp32"
    p = state["params"]
    size = page_tokens(config)
    work = Workload(p["context"], p["batch"], _engine_format(p["kv_dtype"]), dtype, block_size=size)
    budget = free_memory(device) // 2
    limits = (budget, GPU_OPERATIONS) if device.type == "cuda" else (min(budget, CPU_BYTES), CPU_OPERATIONS)
    cut = cut_shape(config, work, *limits)
    _wait_for_the_last(tell, cancelled)
    tell(f"building {cut.describe()}")
    model = random_model(cut, dtype, device, cancelled)
    rates = device_rates(device, DTYPES[dtype])
    tell(f"filling {human_bytes(cut.kv_bytes)} of cache")
    engine = filled_engine(model, work, cancelled)
    seconds = decode(engine, begun + TIME_LIMIT_S, tell, cancelled)
    step = predicted_step(cut, engine, work, rates)
    return _result(cut, work, engine, (step, seconds), rates)


def _preset_config(name: str) -> dict[str, Any]:
    from kvlab.specs.resolve import resolve

    return dict(resolve(name).config)


def _check(config: dict[str, Any]) -> None:
    """Raises ValueError for a shape the engine does not run, before anything is built."""
    try:
        ModelConfig.from_hf(config)
    except ValueError as error:
        raise ValueError(f"the engine does not run this shape yet ({error}); its plan stands") from None


def _engine_format(name: str) -> str:
    from kvlab.quant import get_codec

    get_codec(name)  # raises ValueError for a format the engine cannot store yet
    return name


def random_model(cut: CutShape, dtype: str, device: torch.device, cancelled: Callable[[], bool]) -> LoadedModel:
    """The cut shape with random weights of a sensible scale; norms are 1 so that values stay finite."""
    model = empty_model(cut.config, dtype, device, "measured shape")
    weights = model.decoder.weights
    shapes = {name: (t.shape, t.dtype) for name, t in weights.named.items()}
    weights.fill(_random_tensors(shapes, device, cancelled))
    return model


def _random_tensors(
    shapes: dict, device: torch.device, cancelled: Callable[[], bool]
) -> Iterator[tuple[str, torch.Tensor]]:
    # one random block, repeated: drawing a gigabyte would take longer than measuring with it
    generator = torch.Generator(device="cpu").manual_seed(0)
    block = (2 * torch.rand(2**20, generator=generator) - 1).to(device)
    for name, (shape, dtype) in shapes.items():
        _stop_if(cancelled)
        if len(shape) == 1:
            yield name, (torch.zeros if name.endswith("bias") else torch.ones)(shape, dtype=dtype, device=device)
            continue
        count = shape.numel()
        flat = block.repeat(-(-count // block.numel()))[:count] if count > block.numel() else block[:count]
        yield name, (flat.view(shape) * (3 / shape[-1]) ** 0.5).to(dtype)


def filled_engine(model: LoadedModel, work: Workload, cancelled: Callable[[], bool]) -> Engine:
    """An engine whose pool holds exactly the workload, every sequence STEPS tokens short of `context`."""
    groups_of = _groups(model, work)
    blocks = tuple(
        1 + work.batch * most_pages(g.retention, g.block_size, work.context, work.in_flight) for g in groups_of
    )
    engine = Engine(
        model, kv_dtype=work.kv_dtype, block_size=work.block_size, num_blocks=blocks, max_model_len=work.context,
        max_num_seqs=work.batch, max_batched_tokens=work.batch, log_events=64,
    )  # fmt: skip
    _fill_pages(engine, cancelled)
    vocabulary, known = model.config.vocab_size, max(2, work.context - STEPS - 1)
    ids = torch.randint(vocabulary, (known,), generator=torch.Generator().manual_seed(1)).tolist()
    for i in range(work.batch):
        _stop_if(cancelled)
        request = Request(str(i), ids, SamplingParams(max_tokens=STEPS + 1, ignore_eos=True))
        request.max_total, request.num_computed = work.context, known - 1
        # as if its tokens had been computed one by one: pages are taken, those behind a window given back
        for end in [*range(work.block_size, known - 1, work.block_size), known - 1]:
            taken = engine.cache.allocate(request.request_id, end)
            assert taken, "the pool was sized for this workload"
            engine.cache.advance(request.request_id, end)
        engine.requests[request.request_id] = request
        engine.scheduler.running.append(request)
    return engine


def _groups(model: LoadedModel, work: Workload) -> tuple:
    from kvlab.specs.kv_dtypes import with_formats
    from kvlab.specs.layout import group_parts

    return group_parts(with_formats(model.spec, work.kv_dtype), work.block_size)


def _fill_pages(engine: Engine, cancelled: Callable[[], bool]) -> None:
    """Random entries in one page of each layer, encoded by the engine's own operation, then copied to the others."""
    device, size = engine.model.device, engine.options.block_size
    generator = torch.Generator().manual_seed(2)
    slots = torch.arange(size, 2 * size, device=device)
    for views in (v for layer in engine.storage.views(engine.spec) for v in layer if v is not None):
        _stop_if(cancelled)
        if isinstance(views, PageViews):
            shapes = [(size, views.k.shape[1], views.key_dim), (size, views.v.shape[1], views.value_dim)]
            rows = [torch.randn(s, generator=generator).to(device, engine.model.decoder.dtype) for s in shapes]
            write_kv(*rows, views, slots)
        else:
            _fill_segments(views, generator)
        views.buffer[2:] = views.buffer[1]
        views.buffer[0] = 0


def _fill_segments(views: SegmentViews, generator: torch.Generator) -> None:
    """Random values in page 1, stored as the format of each segment stores them."""
    for name, stored in views.segments.items():
        if name.endswith("_scale"):
            continue
        values = torch.randn((*stored[1].shape[:-1], views.width(name)), generator=generator)
        codes, meta = get_codec(views.layout[name].format).encode(values)
        stored[1].copy_(codes)
        if meta is not None:
            views[f"{name}_scale"][1].copy_(meta)


def decode(engine: Engine, deadline: float, tell: Tell, cancelled: Callable[[], bool]) -> list[float]:
    """Seconds of each timed decode step; the first step, which compiles and touches memory first, is left out.

    At most STEPS - 1 steps, and after the first none that begins later than `deadline` (of `time.perf_counter`).
    """
    tell("first step, which compiles what this shape needs")
    first_step(engine, cancelled)
    seconds: list[float] = []
    while len(seconds) < STEPS - 1 and (not seconds or time.perf_counter() < deadline):
        _stop_if(cancelled)
        tell(f"decoding, step {len(seconds) + 1} of {STEPS - 1}")
        start = time.perf_counter()
        outputs = engine.step()  # its tokens are on the host, so the device has finished
        seconds.append(time.perf_counter() - start)
        assert outputs and all(o.finish_reason != "error" for o in outputs), "random weights gave no finite logits"
    return seconds


def first_step(engine: Engine, cancelled: Callable[[], bool]) -> None:
    """One step in a thread of its own: compiling cannot be interrupted, waiting for it can.

    What is compiled after a cancel is kept for the next measurement, which waits for it before it begins.
    """
    failed: list[BaseException] = []
    left = threading.Event()

    def step() -> None:
        with _compiling:
            if left.is_set():
                return
            try:
                engine.step()
            except BaseException as error:  # raised below, in the thread that waits
                failed.append(error)

    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            _stop_if(cancelled)
            thread.join(0.05)
    finally:
        left.set()
    if failed:
        raise failed[0]


def device_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Bytes per second of reading a buffer of 256 MiB, and operations per second of a product of 1,024 cubed."""
    data = torch.ones(2**28 // dtype.itemsize, dtype=dtype, device=device)
    square = torch.ones(1024, 1024, dtype=dtype, device=device)
    read = _best_seconds(lambda: data.sum(), device)
    product = _best_seconds(lambda: square @ square, device)
    return Rates(2**28 / read, 2 * 1024**3 / product)


def _best_seconds(work: Callable[[], Any], device: torch.device) -> float:
    found = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found)


def predicted_step(cut: CutShape, engine: Engine, work: Workload, rates: Rates) -> StepTime:
    """The planner's time of one decode step of the cut shape, with this device's own rates."""
    cache = work.batch * cache_read_bytes(engine.spec, work.context)
    operations = cut.operations + work.batch * attention_operations(engine.spec, work.context, prompt=False)
    return step_time(cut.read_bytes, cache, operations, round(rates.bytes_per_s), round(rates.operations_per_s))


def _wait_for_the_last(tell: Tell, cancelled: Callable[[], bool]) -> None:
    """Returns when no cancelled measurement compiles any more: it takes the cores that rates are measured on."""
    if _compiling.locked():
        tell("waiting until what was cancelled has compiled")
    while not _compiling.acquire(timeout=0.05):
        _stop_if(cancelled)
    _compiling.release()


def _stop_if(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise CancelledError("cancelled")


def _result(
    cut: CutShape, work: Workload, engine: Engine, times: tuple[StepTime, list[float]], rates: Rates
) -> dict[str, Any]:
    step, seconds = times
    middle = statistics.median(seconds)
    predicted = {"kv_bytes": cut.kv_bytes, "tokens_per_s": work.batch / step.seconds}
    measured = {"kv_bytes": engine.kv.allocated_bytes, "tokens_per_s": work.batch / middle}
    same = "exactly the predicted" if predicted["kv_bytes"] == measured["kv_bytes"] else f"{cut.kv_bytes:,} predicted,"
    share = measured["tokens_per_s"] / predicted["tokens_per_s"]
    return {
        "predicted": predicted,
        "measured": measured,
        "factors": {"layers": cut.of_layers / cut.layers, "width": cut.width},
        "layers": [cut.layers, cut.of_layers],
        "step_seconds": seconds,
        "sentence": f"The cache takes {same} {measured['kv_bytes']:,} bytes; {measured['tokens_per_s']:,.1f} tokens/s "
        f"measured, {share:.0%} of the predicted {predicted['tokens_per_s']:,.1f}.",
        "conditions": [
            f"Cut shape: {cut.describe()}; prediction and measurement are both of this shape.",
            f"{work.batch:,} sequences of {work.context:,} tokens, cache in {work.kv_dtype} (pages of "
            f"{work.block_size} tokens, filled with random entries), {human_bytes(cut.weights_bytes)} of random "
            f"{work.weight_dtype} weights, one device, no tensor parallelism.",
            f"{device_name()}, {_threads()} threads; it reads {rates.bytes_per_s / 1e9:,.1f} GB/s and computes "
            f"{rates.operations_per_s / 1e9:,.0f} billion operations/s by itself, and the prediction uses these: "
            f"a step is bound by {step.bound_by}.",
            f"Median of {len(seconds)} steps, {1e3 * min(seconds):,.1f} to {1e3 * max(seconds):,.1f} ms.",
        ],
    }


def _threads() -> int:
    return min(torch.get_num_threads(), os.cpu_count() or 1)
