"""A model ready to run: from a directory, a hub id, a GGUF file, the packaged default, or tensors in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvlab.models import checkpoint, convert
from kvlab.models.decoder import Decoder
from kvlab.models.facts import AttentionFacts, LayerFacts, ModelConfig
from kvlab.models.families import renamed
from kvlab.models.tokenizer import Tokenizer
from kvlab.models.weights import Source
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
    return _build(hf_config, checkpoint.Checkpoint(files), (dtype, device), tokenizer, (name, source))


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
    return _build(config, state, (dtype, device), tokenizer, (name, "tensors in memory"), copy=True)


def _build(
    hf_config: dict[str, Any],
    tensors: Mapping[str, Tensor],
    place: tuple[str, str],
    tokenizer: Tokenizer | None,
    origin: tuple[str, str],
    *,
    copy: bool = False,
) -> LoadedModel:
    dtype = dtype_name(place[0])
    config, spec = ModelConfig.from_hf(hf_config), cache_spec(hf_config, dtype, origin[0])
    check_windows(config, spec)
    source = Source(renamed(tensors, hf_config), DTYPES[dtype], resolve_device(place[1]), copy=copy)
    decoder = Decoder(config, source, spec)
    source.finish(ignored=("lm_head.weight",) if config.head.tied else ())
    return LoadedModel(spec, config, hf_config, decoder, tokenizer, origin[0], origin[1], dtype)


def empty_model(hf_config: dict[str, Any], dtype: str, device: torch.device | str, name: str) -> LoadedModel:
    """A model whose tensors hold nothing yet: `decoder.weights.fill` puts them in.

    Raises:
        ValueError: an architecture the engine does not run.
    """
    config, spec = ModelConfig.from_hf(hf_config), cache_spec(hf_config, dtype, name)
    decoder = Decoder(config, Source(None, DTYPES[dtype], device), spec)
    return LoadedModel(spec, config, hf_config, decoder, None, name, "made in memory", dtype)


def cache_spec(hf_config: dict[str, Any], dtype: str, name: str = "") -> ModelSpec:
    """What the layers of a model that computes in `dtype` cache: everything in that type, states at least in fp32."""
    from kvlab.specs.families import from_config

    state = "fp64" if dtype == "fp64" else "fp32"
    return from_config(hf_config, name=name, kv_format=dtype, state_format=state, conv_format=dtype)


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


def check_windows(config: ModelConfig, spec: ModelSpec) -> None:
    """Refuses a config whose windows the cache and the decoder read differently: pages would be dropped too early.

    Raises:
        ValueError: the first layer that differs.
    """
    for layer, facts in zip(spec.layers, config.layers, strict=True):
        modules = [b.module for b in facts.branches] if isinstance(facts, LayerFacts) else []
        seen = [m.window or m.chunk for m in modules if isinstance(m, AttentionFacts) and m.source is None]
        held = [part.retention.size for part in layer.parts if part.kind in ("full", "sliding", "chunked")]
        if modules and seen != held:
            raise ValueError(
                f"windows: the cache reads {held} from layer {layer.index} of this config, the decoder {seen}"
            )
