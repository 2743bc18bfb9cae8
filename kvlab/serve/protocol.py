"""What a client may ask, in OpenAI's words, and what vLLM adds to them: top_k, ignore_eos, priority, cache_salt."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from kvlab.engine import SamplingParams
from kvlab.serve.limits import Rejection, invalid

# a value other than these changes the answer, and this server would give the unchanged one
MAX_STOPS, MAX_STOP_LENGTH = 16, 1024
"""Stop strings are looked for in every piece of every answer, between other people's pieces."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "logprobs": (None, False), "top_logprobs": (None, 0), "echo": (None, False), "suffix": (None, ""),
    "best_of": (None, 1), "logit_bias": (None, {}), "presence_penalty": (None, 0), "frequency_penalty": (None, 0),
    "tools": (None, []), "tool_choice": (None, "none", "auto"), "functions": (None, []), "prompt_logprobs": (None,),
    "response_format": (None, {"type": "text"}), "use_beam_search": (None, False), "structured_outputs": (None,),
    "guided_json": (None,), "guided_regex": (None,), "guided_choice": (None,), "guided_grammar": (None,),
    # vLLM's
    "min_tokens": (None, 0), "min_p": (None, 0), "repetition_penalty": (None, 1), "length_penalty": (None, 1),
    "bad_words": (None, []), "allowed_token_ids": (None,), "logits_processors": (None, []), "prompt_embeds": (None,),
    "include_stop_str_in_output": (None, False), "skip_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,), "chat_template": (None,), "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
}  # fmt: skip


class StreamOptions(BaseModel):
    """`include_usage`: a last chunk without choices says how many tokens the call took."""

    include_usage: bool = False


class Call(BaseModel):
    """What completions and chat completions share. Fields that would change the answer and are not here are refused."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    n: int = 1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    priority: int = 0
    cache_salt: str = ""

    @model_validator(mode="before")
    @classmethod
    def nothing_said(cls, data: Any) -> Any:
        """A null is as good as no field, as in OpenAI's interface."""
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data

    def check(self, served: tuple[str, ...]) -> None:
        """Refuses what this server would silently ignore.

        Raises:
            Rejection: an unsupported field, a model that is not served, n below 1, an empty stop string.
        """
        for name, value in (self.model_extra or {}).items():
            if name in UNSUPPORTED and not any(_same(value, plain) for plain in UNSUPPORTED[name]):
                raise invalid(f"{name}: is not supported", name)
        if self.model and self.model not in served:
            raise Rejection(
                404, f"model {self.model!r}: must be one of {', '.join(served)}", "model_not_found", "model"
            )
        if self.n < 1:
            raise invalid(f"n {self.n}: must be at least 1", "n")
        if "" in self.stops:
            raise invalid("stop: must not hold an empty string", "stop")
        if len(self.stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in self.stops):
            raise invalid(f"stop: at most {MAX_STOPS} strings of at most {MAX_STOP_LENGTH} characters", "stop")
        try:
            self.cache_salt.encode()
        except UnicodeEncodeError:
            raise invalid("cache_salt: must be text that UTF-8 can hold", "cache_salt") from None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def limit(self) -> int | None:
        """New tokens at most, where the call says so."""
        return self.max_tokens

    def sampling(self, max_tokens: int, choice: int) -> SamplingParams:
        """How completion `choice` of a prompt is picked; with a seed, each has its own.

        Raises:
            Rejection: a value out of its range.
        """
        try:
            return SamplingParams(
                max_tokens=max_tokens, temperature=self.temperature, top_k=max(0, self.top_k), top_p=self.top_p,
                seed=None if self.seed is None else self.seed + choice,
                stop_token_ids=tuple(self.stop_token_ids), ignore_eos=self.ignore_eos,
            )  # fmt: skip
        except ValueError as error:
            raise invalid(str(error), str(error).split(" ", 1)[0]) from None


def _same(value: Any, plain: Any) -> bool:
    """Equal, and not only because False counts as 0."""
    return value == plain and isinstance(value, bool) == isinstance(plain, bool)


class CompletionCall(Call):
    """POST /v1/completions. A prompt is a text or token ids; a list holds several of one kind."""

    prompt: str | list[int] | list[str] | list[list[int]]

    @property
    def limit(self) -> int | None:
        """As OpenAI's completions: 16 when the call says nothing."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class TextPart(BaseModel):
    """A piece of a message's content. Only text is read."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation."""

    role: str
    content: str | list[TextPart] | None = ""

    @property
    def plain(self) -> dict[str, str]:
        """As chat templates read it."""
        said = self.content or ""
        text = said if isinstance(said, str) else "".join(part.text for part in said)
        return {"role": self.role, "content": text}


class ChatCall(Call):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None

    def check(self, served: tuple[str, ...]) -> None:
        """As `Call.check`; a conversation has a message."""
        super().check(served)
        if not self.messages:
            raise invalid("messages: must hold at least one message", "messages")

    @property
    def limit(self) -> int | None:
        """None lets the answer grow until the model's length."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
