"""A model ready to run: from a directory, a hub id, a GGUF file, the packaged default, or tensors in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvlab.models import checkpoint, convert
from kvlab.models.config import ModelConfig
from kvlab.models.decoder import Decoder
from kvlab.models.tokenizer import Tokenizer
from kvlab.specs.model import ModelSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_ALIASES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float64": "fp64"}


@dataclass(frozen=True)
class LoadedModel:
    """A decoder with its weights, and what goes with it.

    Attributes:
        spec: what its layers cache, in the model's dtype.
        config: what the decoder runs by.
        hf_config: the config.json it came from.
        decoder: the model.
        tokenizer: None when the directory had none.
        name: for people.
        source: where the weights came from, quantization included.
        dtype: "fp32", "bf16", "fp16" or "fp64".
        max_model_len: longest sequence it was made for, in tokens.
    """

    spec: ModelSpec
    config: ModelConfig
    hf_config: dict[str, Any]
    decoder: Decoder
    tokenizer: Tokenizer | None
    name: str
    source: str
    dtype: str

    @property
    def max_model_len(self) -> int:
        """Longest sequence the model was made for, in tokens."""
        return self.config.max_position

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.decoder.device


def load_model(target: str | Path | None = None, dtype: str = "fp32", device: str = "auto") -> LoadedModel:
    """The model called `target`, its weights read once into fused tensors.

    Args:
        target: None for the default (SmolLM2-135M-Instruct), "gemma3-270m", a directory with config.json and
            safetensors, a .gguf file, or a hub id such as "org/name".
        dtype: of weights and activations: fp32, bf16, fp16 or fp64.
        device: "cpu", "cuda", "cuda:1", or "auto" for CUDA where there is one.

    Raises:
        ValueError: an unknown dtype or device, an architecture the engine does not run, or files that are
            missing, damaged, pickled, or do not fit the config.
    """
    name, directory, source = locate(target)
    hf_config = checkpoint.read_config(directory)
    # refuse what cannot run before reading gigabytes
    config = ModelConfig.from_hf(hf_config)
    files = checkpoint.weight_files(directory)
    tokenizer = Tokenizer.from_directory(directory, config.eos_token_ids)
    return _build(hf_config, checkpoint.tensors(files), (dtype, device), tokenizer, (name, source))


def from_state_dict(
    config: dict[str, Any],
    state: Mapping[str, Tensor],
    dtype: str = "fp32",
    device: str = "cpu",
    *,
    tokenizer: Tokenizer | None = None,
    name: str = "in memory",
) -> LoadedModel:
    """A model of `config` (a parsed config.json) with the tensors of `state`, which keeps its own copy.

    Raises:
        ValueError: as `load_model`.
    """
    return _build(config, state.items(), (dtype, device), tokenizer, (name, "tensors in memory"))


def _build(
    hf_config: dict[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    place: tuple[str, str],
    tokenizer: Tokenizer | None,
    origin: tuple[str, str],
) -> LoadedModel:
    from kvlab.specs.families import from_config

    dtype = dtype_name(place[0])
    config = ModelConfig.from_hf(hf_config)
    spec = from_config(hf_config, name=origin[0], kv_format=dtype)
    _check_windows(config, spec)
    decoder = Decoder(config, DTYPES[dtype], resolve_device(place[1])).load(tensors)
    return LoadedModel(spec, config, hf_config, decoder, tokenizer, origin[0], origin[1], dtype)


def locate(target: str | Path | None) -> tuple[str, Path, str]:
    """(name, directory of safetensors, source) of `target`; converts a GGUF file the first time.

    Raises:
        ValueError: nothing of that name can be found or reached.
    """
    if target is None or str(target).lower() in convert.PACKAGED:
        return convert.packaged(str(target or convert.DEFAULT).lower())
    path = Path(target).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return convert.gguf_directory(path)
    if path.suffix in checkpoint.PICKLES and path.is_file():
        raise ValueError(f"{path}: pickled weights can run code when read; convert them to safetensors")
    if path.is_dir():
        return path.resolve().name, path, str(path)
    if path.is_file():
        raise ValueError(f"{path}: give the directory that holds it, or a .gguf file")
    return _from_hub(str(target))


def _from_hub(repo: str) -> tuple[str, Path, str]:
    if repo.count("/") != 1 or repo.startswith((".", "/")):
        known = ", ".join(convert.PACKAGED)
        raise ValueError(f"model {repo!r}: no such directory or file; packaged models are {known}")
    try:
        from huggingface_hub import snapshot_download

        wanted = ["*.safetensors", "*.safetensors.index.json", "config.json", "tokenizer*.json", "*.jinja"]
        return repo, Path(snapshot_download(repo, allow_patterns=wanted)), f"hub {repo}"
    except Exception as error:  # many kinds: offline, unknown id, no permission, no package
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"model {repo!r}: not a directory here, and the hub did not give it ({first})") from error


def dtype_name(dtype: str) -> str:
    """The short name of `dtype`: "bf16" for "bfloat16".

    Raises:
        ValueError: the engine does not compute in it.
    """
    name = _ALIASES.get(str(dtype).removeprefix("torch."), str(dtype))
    if name not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: must be one of {', '.join(DTYPES)}")
    return name


def resolve_device(device: str) -> torch.device:
    """The device called `device`; "auto" is CUDA where there is one.

    Raises:
        ValueError: unknown, or not present on this machine.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f'device {device!r}: must be "auto", "cpu", "cuda" or "cuda:N"') from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r}: torch finds no CUDA device here")
    return found


def _check_windows(config: ModelConfig, spec: ModelSpec) -> None:
    """Refuses a config whose windows the cache and the decoder read differently: pages would be dropped too early."""
    held = tuple(layer.parts[0].retention.size for layer in spec.layers)
    if held != config.windows:
        raise ValueError(f"windows: the cache reads {held} from this config, the decoder {config.windows}")
