"""Kernels of this folder run in Triton's interpreter; the device path is forced test by test."""

from __future__ import annotations

from types import FunctionType

import pytest


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("KVLAB_OPS", "triton")


@pytest.fixture(autouse=True)
def _aligned_as_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch of these tests begins its tensors where its signature, with which kernels are compiled ahead of time,
    says that they begin."""
    support = pytest.importorskip("kvlab.ops.triton_support", reason="triton is for Linux only", exc_type=ImportError)
    run = support.Launch.run

    def checked(launch: object) -> None:
        stated = launch.signature()[2]
        for place, name in enumerate(launch.kernel.arg_names):
            if (place,) in stated and hasattr(launch.args.get(name), "data_ptr"):
                assert launch.args[name].data_ptr() % 16 == 0, name
        run(launch)

    monkeypatch.setattr(support.Launch, "run", checked)


@pytest.fixture(autouse=True, scope="session")
def _language_replaced_once() -> None:
    """The interpreter replaces the language's functions at a launch, and again, to no effect, at every call of a helper
    function of the kernel: a third of these tests' time. Where it is replaced already nothing is done here."""
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="triton is for Linux only")
    replace, nothing, tl = interpreter._patch_lang, interpreter._LangPatchScope, interpreter.tl

    def once(fn: FunctionType) -> object:
        seen = [module for module in (tl, tl.core) if any(value is module for value in fn.__globals__.values())]
        return replace(fn) if any(tl.core.is_builtin(module.load) for module in seen) else nothing()

    interpreter._patch_lang = once


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter computes with NumPy, which warns of NaN in lanes that a mask then leaves out."""
    for item in items:
        if "interpreter" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
