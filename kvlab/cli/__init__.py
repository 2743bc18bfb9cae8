"""One entry point, `kvlab COMMAND`. A command's module is imported only when that command is called.

A command is a module `kvlab/cli/NAME.py` with `HELP`, `add_arguments(parser)` and `run(args) -> exit code`. Its `ValueError`
and `OSError` become one line on stderr and exit code 2, and so do arguments that cannot be read: no traceback for a wrong
name or a missing file.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import kvlab

COMMANDS = {
    "doctor": "what this machine has, and what will run where",
    "plan": "size the cache of a model: bytes, sequences that fit, decode time",
    "formats": "storage formats of the cache: nominal and real bits, and what each loses",
    "generate": "run the engine on a prompt",
    "serve": "serve a model over HTTP, OpenAI-compatible, with /metrics",
    "replay": "send a trace of requests to a server as it happened",
    "simulate": "run a trace on hardware you do not have",
    "parity": "compare the engine with transformers on a shrunken configuration",
    "bench": "measure the engine, attention or the prefix cache, both sides in one run",
    "kernels": "compile the Triton kernels ahead of time: registers, loads, tensor cores, roofline",
    "claims": "recompute the claims of the two texts and print the verdicts",
}


class Parser(argparse.ArgumentParser):
    """Arguments that cannot be read are a `ValueError`, as any other wrong input."""

    def error(self, message: str) -> NoReturn:
        """Raises."""
        raise ValueError(f"{message.removeprefix('argument ')} ({self.prog} --help says what there is)")


def one_line(error: Exception) -> str:
    """What went wrong, for people: of a file its name and what the system says."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(line.strip() for line in str(error).splitlines())


def is_out_of_memory(error: Exception) -> bool:
    """Whether Python, or torch on any device, found no memory (torch's own exception is a RuntimeError with that text)."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or "can't allocate memory" in said or "out of memory" in said


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {about}" for name, about in COMMANDS.items()]
    return (
        "usage: kvlab COMMAND [options]\n\ncommands:\n" + "\n".join(lines) +
        "\n\nkvlab COMMAND --help says more; every command has --json.\n"
    )  # fmt: skip


def _load(name: str):
    """The module of a command; a command that this build lacks is a ValueError, not a traceback."""
    try:
        return importlib.import_module(f"kvlab.cli.{name}")
    except ModuleNotFoundError as error:
        if error.name == f"kvlab.cli.{name}":
            raise ValueError(f"command {name!r}: not part of this build") from error
        raise ValueError(f"command {name!r} needs the package {error.name!r}; `make setup` installs it") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code (2 for wrong input)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview(), end="")
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        print(f"kvlab {kvlab.__version__}")
        return 0
    name, rest = argv[0], argv[1:]
    try:
        if name not in COMMANDS:
            raise ValueError(f"command {name!r}: unknown; one of {', '.join(COMMANDS)}")
        module = _load(name)
        parser = Parser(prog=f"kvlab {name}", description=module.HELP)
        module.add_arguments(parser)
        code = module.run(parser.parse_args(rest))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `kvlab claims | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"kvlab: {one_line(error)}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"kvlab: {name}: this takes more memory than the machine gives; ask for less", file=sys.stderr)
        return 2
