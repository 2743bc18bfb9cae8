"""Every product of an index and a stride in a kernel has an int64 operand: read from the source, without running it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

OPS = Path(__file__).parents[2] / "kvlab" / "ops"
FILES = sorted(p for p in OPS.rglob("triton_*.py") if "@triton.jit" in p.read_text(encoding="utf-8"))
# functions of kernels that give int64, and which of their results
WIDE_CALLS = {"page_rows": "all", "place": (0, 1, 2), "sequence_of": (0,), "block_of": (0, 1, 2, 3)}
# parameters that callers pass as int64; the test of calls below holds it
WIDE_PARAMETERS = ("i_seq", "i_kv", "i_page", "i_head", "i_position", "o_head", "o_scale")


def kernels(tree: ast.Module) -> list[ast.FunctionDef]:
    return [
        f
        for f in ast.walk(tree)
        if isinstance(f, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in f.decorator_list)
    ]


class Widths:
    """Which names of a kernel hold int64, in order of its statements."""

    def __init__(self, kernel: ast.FunctionDef) -> None:
        self.wide = {a.arg for a in kernel.args.args if a.arg in WIDE_PARAMETERS}
        for node in ast.walk(kernel):
            if isinstance(node, ast.Assign):
                self.assign(node.targets[0], node.value)

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple):
            if isinstance(value, ast.Tuple):
                for t, v in zip(target.elts, value.elts, strict=True):
                    self.assign(t, v)
            elif isinstance(value, ast.Call) and isinstance(WIDE_CALLS.get(ast.unparse(value.func)), tuple):
                self.wide |= {ast.unparse(target.elts[i]) for i in WIDE_CALLS[ast.unparse(value.func)]}
        elif isinstance(target, ast.Name) and self.is_wide(value):
            self.wide.add(target.id)

    def is_wide(self, node: ast.expr) -> bool:
        """Whether an expression is int64: a cast, a wide name, or arithmetic with a wide operand."""
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
                return "tl.int64" in ast.unparse(node)
            return WIDE_CALLS.get(ast.unparse(node.func)) == "all"
        if isinstance(node, ast.BinOp):
            return self.is_wide(node.left) or self.is_wide(node.right)
        if isinstance(node, ast.Subscript):
            return self.is_wide(node.value)
        return isinstance(node, ast.Name) and node.id in self.wide


def narrow_products(kernel: ast.FunctionDef) -> list[str]:
    """Products with a stride of which no operand is int64."""
    widths = Widths(kernel)
    found = []
    for node in ast.walk(kernel):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = (node.left, node.right)
            stride = any(isinstance(s, ast.Name) and s.id.startswith("s_") for s in sides)
            if stride and not any(widths.is_wide(s) for s in sides):
                found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(OPS)))
def test_every_product_with_a_stride_is_64_bits_wide(path: Path) -> None:
    found = {k.name: narrow_products(k) for k in kernels(ast.parse(path.read_text(encoding="utf-8")))}
    assert not {name: products for name, products in found.items() if products}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(OPS)))
def test_callers_pass_wide_values_for_wide_parameters(path: Path) -> None:
    """What makes the first test's assumption about parameters true."""
    everything = {k.name: k for p in FILES for k in kernels(ast.parse(p.read_text(encoding="utf-8")))}
    wrong = []
    for kernel in kernels(ast.parse(path.read_text(encoding="utf-8"))):
        widths = Widths(kernel)
        for call in ast.walk(kernel):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in everything:
                names = [a.arg for a in everything[ast.unparse(call.func)].args.args]
                pairs = [*zip(names, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
                wrong += [f"{ast.unparse(call.func)}({n}={ast.unparse(v)})" for n, v in pairs
                          if n in WIDE_PARAMETERS and not widths.is_wide(v)]  # fmt: skip
    assert not wrong


def test_strides_are_named_so_that_the_test_sees_them() -> None:
    """A kernel's run-time integers are strides (s_) or counts that never meet an index."""
    counts = {"splits", "first_seq", "num_seqs", "width", "words", "count", "scale", "softcap"}
    for path in FILES:
        for kernel in kernels(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.arg for a in kernel.args.args if a.annotation is None]
            if any(n.startswith("p_out") for n in names) and kernel.name not in ("turned", "put", "finish"):
                assert not [n for n in names if not n.startswith(("p_", "s_")) and n not in counts], kernel.name


def test_a_planted_narrow_product_is_seen() -> None:
    source = "@triton.jit\ndef f(p, s_page):\n    i = tl.program_id(0)\n    x = tl.load(p + i * s_page)\n"
    assert narrow_products(ast.parse(source).body[0]) == ["i * s_page"]
    assert not narrow_products(ast.parse(source.replace("program_id(0)", "program_id(0).to(tl.int64)")).body[0])
