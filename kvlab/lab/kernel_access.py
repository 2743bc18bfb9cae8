"""What a paged decode kernel reads, load by load, from a run in Triton's interpreter: which page, which bytes, in which order.

`recorded` runs it in a process of its own, because the interpreter has to be chosen before triton is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True)
class Example:
    """What is run: one layer, sequences in pages.

    Attributes:
        lens: tokens of each sequence. tables: their block tables.
        heads, kv_heads, dim: Hq, Hkv, D. block_size: tokens of a page. fmt: storage format.
        window: tokens a query sees, 0 for all. split: tokens of a split.
    """

    lens: tuple[int, ...] = (13,)
    tables: tuple[tuple[int, ...], ...] = ((5, 2, 7, 3),)
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    block_size: int = 4
    fmt: str = "bf16"
    window: int = 0
    split: int = 16


def recorded(example: Example) -> list[dict[str, Any]]:
    """The accesses of `example` in order; each {order, program, segment, page, head, slots, lanes, bytes, first}.

    `program` is (head block, split, sequence); `slots` the slots of the page that a load took from one page, in the
    order of its lanes; `lanes` the lane that reads the first byte of each; `first` the byte of the page where it begins;
    `bytes` how many were read, lanes that a mask left out not counted. A lane is a place in the load's tile, counted row
    by row: which thread holds it, and with how many neighbours, is the compiler's to choose (`kvlab kernels`).

    Raises:
        RuntimeError: triton is not installed (it is for Linux only), or the run failed.
    """
    if find_spec("triton") is None:
        raise RuntimeError("triton is not installed: it exists for Linux only")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    call = [sys.executable, "-W", "ignore", "-m", "kvlab.lab.kernel_access", json.dumps(asdict(example))]
    done = subprocess.run(call, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout)


def _record(example: Example) -> list[dict[str, Any]]:
    """As `recorded`, in a process whose kernels are interpreted."""
    import torch
    from triton.runtime import interpreter

    from kvlab.ops.attention import triton_
    from kvlab.ops.attention.rules import Rules
    from kvlab.ops.batch import make_batch
    from kvlab.ops.views import page_views
    from kvlab.ops.write_kv.reference import write_kv
    from kvlab.specs.formats import get_format
    from kvlab.specs.layout import page_layout
    from kvlab.specs.parts import Attention

    layout = page_layout(
        Attention(example.kv_heads, example.dim, example.dim, get_format(example.fmt)), example.block_size
    )
    pages = 1 + max(max(t) for t in example.tables)
    views = page_views(torch.full((pages, layout.page_bytes), 255, dtype=torch.uint8), layout)
    width = max(map(len, example.tables))
    table = torch.tensor([[*t, *[0] * (width - len(t))] for t in example.tables], dtype=torch.int32)
    prompt = make_batch(list(example.lens), list(example.lens), table, example.block_size)
    rows = torch.randn(sum(example.lens), example.kv_heads, example.dim)
    write_kv(rows, rows, views, prompt.slot_mapping)
    batch = make_batch([1] * len(example.lens), list(example.lens), table, example.block_size)
    query = torch.randn(len(example.lens), example.heads, example.dim)
    rules = Rules(example.dim**-0.5, window=example.window)
    launches = triton_.decode_launches(query, views, batch, rules, torch.empty_like(query), example.split)
    log: list[dict[str, Any]] = []
    builder = interpreter.interpreter_builder
    load = builder.create_masked_load

    def watched(ptrs, mask, *rest):  # type: ignore[no-untyped-def]
        _note(log, builder.grid_idx, (ptrs.data, mask.data, ptrs.get_element_ty().primitive_bitwidth // 8), views)
        return load(ptrs, mask, *rest)

    builder.create_masked_load = watched
    launches[0].run()
    return log


def _note(log: list[dict[str, Any]], program: tuple[int, ...], access: tuple, views: Any) -> None:
    """Adds what one load took from each page, page after page in the order of its lanes."""
    import numpy as np

    pointers, mask, item = access
    pointers, mask = np.broadcast_arrays(pointers, mask)
    base, page_bytes = views.buffer.data_ptr(), views.layout.page_bytes
    at, lanes = pointers[mask].astype(np.int64) - base, np.flatnonzero(mask)
    in_pool = (at >= 0) & (at < views.buffer.numel())
    at, lanes = at[in_pool], lanes[in_pool]
    for page in dict.fromkeys((at // page_bytes).tolist()):
        here = at // page_bytes == page
        inside, mine = at[here] % page_bytes, lanes[here]
        segment = next(s for s in views.layout.segments if s.offset <= inside[0] < s.offset + s.size_bytes)
        rows, first = np.unique((inside - segment.offset) // segment.row_bytes, return_index=True)
        rows, first = rows[np.argsort(first)], np.sort(first)
        log.append({"order": len(log), "program": list(program), "segment": segment.name, "page": int(page),
                    "head": int(rows[0] // segment.tokens), "slots": (rows % segment.tokens).tolist(),
                    "lanes": mine[first].tolist(), "first": int(inside.min()),
                    "bytes": int(len(np.unique(inside)) * item)})  # fmt: skip


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    given |= {"lens": tuple(given["lens"]), "tables": tuple(map(tuple, given["tables"]))}
    print(json.dumps(_record(Example(**given))))
