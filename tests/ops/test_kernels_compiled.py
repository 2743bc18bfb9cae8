"""The kernels compiled ahead of time in CI's configurations, and a checker that sees planted faults.

Compilation happens in processes of its own: in this one kernels may be interpreted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is for Linux only")

from kvlab.lab.kernels.compiling import TARGETS
from kvlab.lab.kernels.configs import CI, configs
from kvlab.lab.kernels.cost import attention_cost
from kvlab.lab.kernels.shapes import SHAPES
from kvlab.ops.attention.coverage import PACKED, WHOLE
from kvlab.ops.write_kv.triton_ import KINDS

WITH_PRODUCTS = ("decode", "prefill", "verify-tree", "mla-decode", "selected-decode", "closed-decode")
PLANTED = Path(__file__).parent / "planted.py"


def output(*command: str, code: int = 0) -> str:
    """What a command prints, run without the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_what_ci_is_to_compile_exists() -> None:
    """A misspelt name or target would be compiled by nobody, and keep every rule."""
    names = [c.name for c in configs()]
    assert len(names) == len(set(names)) and set(CI) <= set(names)
    assert all(archs and set(archs) <= set(TARGETS) for archs in CI.values())
    assert {c.name: c.archs for c in configs() if c.archs} == CI
    assert {
        "decode/llama-3-8b/bf16",
        "prefill/llama-3-8b/bf16",
        "prefill/llama-3-8b/int4",
        "write/llama-3-8b/bf16",
    } <= {name for name, archs in CI.items() if set(archs) == set(TARGETS)}


def test_every_format_with_a_kernel_is_compiled_in_decode_prefill_and_write() -> None:
    """Of names of one kernel (int4, symmetric, turned before it is written) one stands for all."""
    compiled = {c.name for c in configs()}
    kernels = {fmt: (fmt,) for fmt in WHOLE if fmt != "fp32"} | {fmt: kernel for fmt, kernel in PACKED.items()}
    for operation in ("decode", "prefill"):
        found = [kernel for fmt, kernel in kernels.items() if f"{operation}/llama-3-8b/{fmt}" in compiled]
        assert sorted(found, key=str) == sorted(set(kernels.values()), key=str)
    assert {f"write/llama-3-8b/{fmt}" for fmt in KINDS if fmt != "fp32"} <= compiled


@pytest.mark.parametrize("arch", TARGETS)
def test_production_configurations_keep_the_rules(arch: str) -> None:
    """No spills, 16-byte loads of codes, matrix units in every narrow product, or an exception with its reason."""
    rows = json.loads(output("-m", "kvlab", "kernels", "--arch", arch, "--json"))["rows"]
    assert sorted(r["config"] for r in rows) == sorted(name for name, archs in CI.items() if arch in archs)
    assert not [r["broken"] for r in rows if r["broken"]]
    for r in rows:
        products = r["config"].split("/")[0] in WITH_PRODUCTS
        assert r["registers"] > 0 and (r["tensor_ops"] > 0) == products, r
        if products and arch != "gfx942":
            # tiles of 32 tokens there, half as wide: the table of exceptions says why
            widest = 8 if arch == "sm_80" and r["kernel"] == "paged_prefill_packed" else 16
            assert r["async_copies"] > 0 and max(map(int, r["code_load_bytes"])) == widest, r
        assert set(r["roofline"]) == {"a100-80gb", "h100-sxm", "h200", "b200", "mi300x"}


def test_the_checker_sees_what_was_planted() -> None:
    found = json.loads(output(str(PLANTED)))
    rules = {name: [rule for rule, _ in case["broken"]] for name, case in found.items()}
    assert rules == {"wide load": [], "product": [], "scalar load": ["16-byte loads"], "spill": ["no spills"]}
    assert [name for name, case in found.items() if case["tensor_ops"]] == ["product"]


def test_an_exception_covers_what_it_names_and_no_more() -> None:
    """A narrower load, more stack, or another kernel is broken all the same."""
    from kvlab.lab.kernels.reading import Reading
    from kvlab.lab.kernels.rules import EXCEPTIONS, broken

    def rules(where: str, **found: object) -> list[str]:
        arch, _, name = where.replace("*", "x").partition("/")
        arch = arch.replace("sm_x", "sm_90")
        fine = {"spill_bytes": 0, "code_loads": {16: 4}, "scalar_dots": 0, "dots": 2}
        reading = Reading(**{f.name: None for f in fields(Reading)} | fine | found)
        return [rule for rule, _ in broken(arch, name, reading)]

    for one in EXCEPTIONS:
        assert one.why
        if one.rule == "16-byte loads":
            assert rules(one.where, code_loads={16: 4, one.limit: 2}) == []
            assert rules(one.where, code_loads={16: 4, one.limit // 2: 2}) == ["16-byte loads"]
        else:
            assert rules(one.where, spill_bytes=one.limit) == []
            assert rules(one.where, spill_bytes=one.limit + 4) == ["no spills"]
    for arch in ("sm_90", "gfx942"):
        assert rules(f"{arch}/decode/llama-3-8b/bf16", spill_bytes=4) == ["no spills"]
    assert rules("sm_90/decode/llama-3-8b/bf16", code_loads={8: 1}) == ["16-byte loads"]


def test_a_product_without_matrix_units_is_seen() -> None:
    from kvlab.lab.kernels.reading import _dots

    operand = "tensor<16x64xbf16, #ttg.dot_op<{opIdx = 0, parent = #blocked}>>"
    assert _dots(f"%a = tt.dot %b, %c, %d : {operand} * {operand} -> tensor<16x64xf32, #blocked>") == (1, 1)
    assert _dots(f"%a = tt.dot %b, %c, %d : {operand} * {operand} -> x".replace("blocked", "mma")) == (1, 0)


def test_a_configuration_of_every_kernel_has_bytes_and_operations() -> None:
    """Counted by hand for one: 8 sequences of 8,192 tokens, 8 KV heads of 128 keys and values in bf16."""
    cost = attention_cost(SHAPES["llama-3-8b"])
    pages = 8 * 8192 * 2 * 8 * 128 * 2
    assert cost.read_bytes == pages + 8 * (512 * 4 + 32 * 128 * 2)
    assert cost.write_bytes == 8 * 32 * 128 * 2
    assert cost.flops == 8 * 32 * 8192 * (128 + 128) * 2
    microseconds, bound = cost.roofline("h200")
    assert bound == "memory" and microseconds == pytest.approx(1e6 * cost.bytes / 4.8e12)


def test_an_interpreting_process_compiles_nothing() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "kvlab", "kernels", "--arch", "sm_90"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2 and "TRITON_INTERPRET is set" in done.stderr
