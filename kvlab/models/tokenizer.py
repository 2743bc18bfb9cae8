"""Text to token ids and back, with the `tokenizers` library alone (no transformers)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

_REPLACEMENT = "�"


class Tokenizer:
    """The tokenizer of a model directory: tokenizer.json, and its chat template where there is one.

    Attributes:
        eos_ids: tokens that end a text.
        chat_template: the Jinja source, or None.
    """

    def __init__(self, backend: Any, settings: dict[str, Any], eos_ids: tuple[int, ...] = ()) -> None:
        self._backend = backend
        self._settings = settings
        self.chat_template: str | None = settings.get("chat_template")
        named = self.token_id(_content(settings.get("eos_token")))
        self.eos_ids = tuple(dict.fromkeys([*eos_ids, *([] if named is None else [named])]))

    @classmethod
    def from_directory(cls, directory: Path, eos_ids: tuple[int, ...] = ()) -> Tokenizer | None:
        """The tokenizer in `directory`, or None when there is no tokenizer.json.

        Raises:
            ValueError: a tokenizer.json that cannot be read.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            return None
        from tokenizers import Tokenizer as Backend

        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path}: not a readable tokenizer ({error})") from error
        # fine-tuned models are often saved with the trainer's: a prompt would silently lose its end, or gain padding
        backend.no_truncation()
        backend.no_padding()
        settings_path, template_path = directory / "tokenizer_config.json", directory / "chat_template.jinja"
        settings = json.loads(settings_path.read_text()) if settings_path.is_file() else {}
        if template_path.is_file():
            settings["chat_template"] = template_path.read_text()
        return cls(backend, settings, eos_ids)

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included."""
        return self._backend.get_vocab_size()

    def fingerprint(self) -> bytes:
        """sha256 over all that decides which ids a text gets."""
        settings = json.dumps(self._settings, sort_keys=True, default=str)
        return hashlib.sha256(self._backend.to_str().encode() + settings.encode()).digest()

    def token_id(self, token: str | None) -> int | None:
        """The id of `token` as the vocabulary spells it, None if there is none."""
        return None if token is None else self._backend.token_to_id(token)

    def token(self, token_id: int) -> str:
        """The vocabulary's spelling of `token_id`, for tables and widgets."""
        return self._backend.id_to_token(token_id) or ""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of `text`; with the model's own start token if it has one and `special`.

        Raises:
            ValueError: half of a surrogate pair in it, which is no text.
        """
        try:
            return self._backend.encode(text, add_special_tokens=special).ids
        except TypeError:
            raise ValueError(f"text {text[:20]!r}: must be text that UTF-8 can hold") from None

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        """The text of `ids`; special tokens are written out only with `special`."""
        return self._backend.decode(list(ids), skip_special_tokens=not special)

    def stream(self) -> StreamDecoder:
        """A decoder that takes one id at a time."""
        return StreamDecoder(self)

    def chat_text(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The prompt that the model's chat template makes of `messages` ({"role": ..., "content": ...} each).

        The template is the model's, not ours: it runs in Jinja's sandbox.

        Raises:
            ValueError: a model without a template, or messages its template refuses.
        """
        if self.chat_template is None:
            raise ValueError("chat: this model has no chat template")
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        tokens = {name: _content(self._settings.get(name)) or "" for name in ("bos_token", "eos_token", "pad_token")}
        try:
            return environment.from_string(self.chat_template).render(
                messages=messages, add_generation_prompt=add_generation_prompt, **tokens
            )
        except TemplateError as error:
            raise ValueError(f"messages: the chat template refuses them ({error})") from error

    def encode_chat(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        """The ids of `chat_text`; the template itself writes the special tokens."""
        return self.encode(self.chat_text(messages, add_generation_prompt=add_generation_prompt), special=False)


class StreamDecoder:
    """Text as it grows. Holds back bytes that are not yet a whole character.

    The pieces of `push` and `finish` joined are `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # text up to `_read` was handed out; decoding restarts at `_start`, so that a token's left neighbours count
        self._start = self._read = 0

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is incomplete."""
        self._ids.append(token_id)
        text = self._fresh()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return text

    def finish(self) -> str:
        """What was held back, as far as it can be written."""
        text = self._fresh()
        self._start = self._read = len(self._ids)
        return text

    def _fresh(self) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._read])
        return self._tokenizer.decode(self._ids[self._start :])[len(before) :]


def _content(token: str | dict[str, Any] | None) -> str | None:
    """The text of a token that tokenizer_config.json writes as a string or as an object."""
    return token.get("content") if isinstance(token, dict) else token
