"""What a person means by a model: a catalogue name, a config.json or its folder, or an id on the model hub."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.specs import catalogue

_MAX_BYTES = 16 * 2**20  # no published config comes near; a checkpoint given by mistake is refused unread
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Target:
    """A model and its facts.

    Attributes:
        name: for people.
        config: as of a config.json, with at least model_type.
        source: where the facts come from, in words.
    """

    name: str
    config: dict[str, Any]
    source: str


def resolve(target: str | Path) -> Target:
    """The model that `target` names. Paths and catalogue names need no network; a hub id is looked up in the
    local cache first.

    Raises:
        ValueError: nothing is there, or what is there is no model config; one line says which and what to do.
    """
    text = str(target).strip()
    if not text:
        raise ValueError("model '': must be a catalogue name, a config.json or its folder, or a hub id")
    explicit_path = isinstance(target, Path) or text.startswith((".", "/", "~")) or text.endswith(".json")
    if not explicit_path and catalogue.find(text) is not None:
        entry = catalogue.entry(text)
        return Target(entry.name, entry.config, f"catalogue ({entry.source})")
    path = Path(text).expanduser()
    if explicit_path or path.exists():
        return from_path(path)
    if _HUB_ID.fullmatch(text):
        return from_hub(text)
    raise ValueError(f"model {text!r}: no catalogue name, path or hub id (org/name){catalogue.suggest(text)}")


def from_path(path: Path) -> Target:
    """The model whose config.json is `path`, or lies in the folder `path`.

    Raises:
        ValueError: no such file, not JSON, or no model config.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        gguf = any(path.glob("*.gguf")) if path.is_dir() else path.suffix == ".gguf"
        hint = " (a GGUF file has none: name its model instead)" if gguf else ""
        raise ValueError(
            f"model {str(path)!r}: there is no {'config.json in this folder' if path.is_dir() else 'such file'}{hint}"
        )
    config = read_config(file)
    name = file.stem if file.name != "config.json" else file.resolve().parent.name
    return Target(name, config, str(file))


def read_config(file: Path) -> dict[str, Any]:
    """The config in `file`.

    Raises:
        ValueError: too large, unreadable, not JSON, not an object, or without model_type.
    """
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ValueError(f"model {str(file)!r}: {file.stat().st_size:,} bytes is no config.json")
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"model {str(file)!r}: {error.strerror or error}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"model {str(file)!r}: not JSON ({error})") from None
    if not isinstance(config, dict):
        raise ValueError(f"model {str(file)!r}: must hold a JSON object, holds a {type(config).__name__}")
    if not isinstance(config.get("model_type"), str):
        raise ValueError(f"model {str(file)!r}: no model_type, so it is not the config.json of a model")
    return config


def from_hub(repo_id: str) -> Target:
    """The model `repo_id` of the Hugging Face hub: from the local cache, else fetched (config.json only).

    Raises:
        ValueError: huggingface_hub is not installed, or the file is neither cached nor reachable.
    """
    unknown = f"model {repo_id!r}: not in the catalogue{catalogue.suggest(repo_id)}"
    try:
        from huggingface_hub import constants, hf_hub_download
    except ImportError:
        raise ValueError(f"{unknown}; hub ids need huggingface_hub") from None
    try:
        file = hf_hub_download(repo_id, "config.json", local_files_only=True)
        return Target(repo_id, read_config(Path(file)), f"hub {repo_id} (cached)")
    except OSError:  # what the client raises when the cache has no such file
        pass
    if constants.HF_HUB_OFFLINE or not _reachable(constants.ENDPOINT):
        raise ValueError(f"{unknown}, not in the local hub cache, and {constants.ENDPOINT} is not reachable")
    try:
        file = hf_hub_download(repo_id, "config.json", etag_timeout=5)
    except Exception as error:  # the client raises its own errors and its transport's alike
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        raise ValueError(f"{unknown}, and the hub gave no config.json: {reason}") from None
    return Target(repo_id, read_config(Path(file)), f"hub {repo_id}")


def _reachable(endpoint: str) -> bool:
    """Whether the hub answers at all: the client alone would retry for half a minute. A proxy is left to the client."""
    # here, not above: they take longer to import than a plan takes to make
    import socket
    import urllib.parse
    import urllib.request

    url = urllib.parse.urlsplit(endpoint)
    if urllib.request.getproxies().get(url.scheme):
        return True
    try:
        socket.create_connection((url.hostname or "", url.port or 443), timeout=3).close()
    except OSError:
        return False
    return True
