"""The engine on a GPU: tokens a second of decode, with launches from Python and replayed as CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from kvlab.engine import Engine, SamplingParams
from kvlab.engine.graphs import Capture, cuda_capture, replay_decodes
from kvlab.lab.kernels.cost import PAGE
from kvlab.models.load import LoadedModel, empty_model
from kvlab.specs import catalogue
from kvlab.specs.weights import count

Row = Callable[[], dict[str, Any]]
MODELS = (
    "llama-3-8b",
    "llama-3.2-1b",
    "smollm2-135m",
)  # the first whose weights take a third of the free memory at most
BATCHES = (1, 8, 32)
PROMPT, OUTPUT = 1024, 64


def engine_rows(device: torch.device, capture: Capture = cuda_capture) -> dict[str, Row]:
    """Each batch: the same requests eager and replayed; their tokens are compared before any figure is kept."""
    made: list[LoadedModel] = []

    def row(batch: int, kv_dtype: str) -> dict[str, Any]:
        if not made:
            made.append(random_model(fitting(torch.cuda.mem_get_info(device)[0]), device))
        return decode_speed(made[0], batch, kv_dtype, capture)

    cases = [(batch, "bf16") for batch in BATCHES] + [(BATCHES[-1], "fp8_e4m3"), (BATCHES[-1], "int4")]
    return {f"{fmt} x {batch}": lambda b=batch, f=fmt: row(b, f) for batch, fmt in cases}


def fitting(free_bytes: int) -> str:
    """The largest named model whose weights in bf16 take at most a third of `free_bytes`; else the smallest."""
    return next((m for m in MODELS if 6 * count(catalogue.get(m)).total <= free_bytes), MODELS[-1])


@torch.no_grad()
def random_model(name: str, device: torch.device, dtype: str = "bf16") -> LoadedModel:
    """A model of that shape with random weights, on `device`."""
    model = empty_model(catalogue.get(name), dtype, device, f"{name}, random weights")
    torch.manual_seed(0)
    for _, tensor in sorted(model.decoder.weights.named.items()):
        if tensor.dim() == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, tensor.shape[-1] ** -0.5)
    return model


def decode_speed(model: LoadedModel, batch: int, kv_dtype: str, capture: Capture) -> dict[str, Any]:
    """Decode steps a second, eager and replayed, and how many tokens of both runs are the same."""
    eager, first = _run(model, batch, kv_dtype, None)
    graphs, second = _run(model, batch, kv_dtype, capture)
    pairs = [(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True)]
    same = sum(a == b for a, b in pairs)
    found = {"model": model.name, "batch": batch, "prompt": PROMPT, "output": OUTPUT,
             "same_tokens": same, "tokens": len(pairs)}  # fmt: skip
    if same < len(pairs):
        # the same kernels on the same numbers: another token is a fault, and its speed is no figure
        return found | {"not measured": "replayed steps gave other tokens"}
    return found | {"eager_tokens_per_s": batch / eager, "graph_tokens_per_s": batch / graphs}


def _run(
    model: LoadedModel, batch: int, kv_dtype: str, capture: Capture | None
) -> tuple[float, list[list[int]]]:  # fmt: skip
    """(seconds of a decode step, the tokens of each request)."""
    length = PROMPT + OUTPUT
    engine = Engine(
        model, kv_dtype=kv_dtype, block_size=PAGE, num_blocks=batch * -(-length // PAGE) + 1, max_model_len=length,
        max_num_seqs=batch, max_batched_tokens=max(2048, batch),
    )  # fmt: skip
    if capture is not None:
        replay_decodes(engine, capture)
    generator = torch.Generator().manual_seed(1)
    vocab = model.config.vocab_size
    ids = [
        engine.add_request(
            torch.randint(vocab, (PROMPT,), generator=generator).tolist(), SamplingParams(OUTPUT, ignore_eos=True)
        )
        for _ in range(batch)
    ]
    requests = [engine.requests[i] for i in ids]
    times = []
    while engine.requests:
        start, waiting = time.perf_counter(), any(len(r.output) == 0 for r in requests)
        engine.step()  # reads its tokens back, so the device is done
        if not waiting:
            times.append(time.perf_counter() - start)
    settled = sorted(times[2:] or times)  # the first steps compile and capture
    return settled[len(settled) // 2], [list(r.output) for r in requests]
