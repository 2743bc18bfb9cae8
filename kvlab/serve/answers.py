"""Answers in OpenAI's shape: whole objects, and the chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from kvlab.serve.limits import Rejection
from kvlab.serve.loop import Delta, Flow
from kvlab.serve.protocol import Call
from kvlab.serve.text import TextOf


@dataclass
class Choice:
    """One completion on its way: its text, its end, and the tokens of its prompt."""

    text: TextOf
    prompt_tokens: int
    finish_reason: str | None = None
    error: str = ""
    cached_tokens: int = 0
    # what the last delta brought
    fresh: str = ""
    fresh_ids: list[int] = field(default_factory=list)

    def take(self, delta: Delta) -> None:
        """Adds `delta`; a stop string ends the completion."""
        self.fresh_ids = delta.token_ids
        self.fresh = self.text.push(delta.token_ids, delta.finish_reason is not None)
        self.cached_tokens = delta.cached_tokens
        self.finish_reason, self.error = delta.finish_reason, delta.error
        if self.text.stopped:
            self.finish_reason = "stop"


class Answer:
    """The answer to one call.

    Args:
        call: what was asked. chat: whether it speaks in messages.
        model: the served name.
        choices: one per completion, in the order of the flow's jobs.
    """

    def __init__(self, call: Call, model: str, choices: list[Choice], chat: bool) -> None:
        self.call, self.choices, self.chat = call, choices, chat
        kind = "chatcmpl" if chat else "cmpl"
        self._head = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    async def run(self, flow: Flow) -> AsyncIterator[tuple[int, Choice]]:
        """Each completion that got something, with its index; ends when all have ended."""
        async for index, delta in flow:
            choice = self.choices[index]
            choice.take(delta)
            if choice.text.stopped:
                flow.stop(index)
            yield index, choice

    async def whole(self, flow: Flow) -> dict[str, Any]:
        """The complete answer.

        Raises:
            Rejection: 500, a completion ended in an error; 503, it was ended with the server.
        """
        async for _, choice in self.run(flow):
            if choice.error and choice.finish_reason in ("error", "abort"):
                raise failed(choice)
        choices = [self._choice(i, choice) for i, choice in enumerate(self.choices)]
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self.usage}

    async def events(self, flow: Flow) -> AsyncIterator[str]:
        """The server-sent events of the answer, [DONE] included."""
        usage = {"usage": None} if self._wants_usage else {}
        if self.chat:
            for i in range(len(self.choices)):
                yield _event(self._chunk([self._delta(i, {"role": "assistant", "content": ""})]) | usage)
        async for index, choice in self.run(flow):
            if choice.error and choice.finish_reason in ("error", "abort"):
                yield _event(failed(choice).body)
                return
            if choice.fresh or choice.finish_reason or (self.call.return_token_ids and choice.fresh_ids):
                yield _event(self._chunk([self._piece(index, choice)]) | usage)
        if self._wants_usage:
            yield _event(self._chunk([]) | {"usage": self.usage})
        yield "data: [DONE]\n\n"

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens of the call. A prompt counts once however many completions it has."""
        n = self.call.n
        prompt = sum(choice.prompt_tokens for choice in self.choices[::n])
        new = sum(len(choice.text.token_ids) for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in self.choices[::n])},
        }

    @property
    def _wants_usage(self) -> bool:
        return bool(self.call.stream_options and self.call.stream_options.include_usage)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk" if self.chat else "text_completion", "choices": choices}

    def _piece(self, index: int, choice: Choice) -> dict[str, Any]:
        ids = {"token_ids": choice.fresh_ids} if self.call.return_token_ids else {}
        if self.chat:
            return self._delta(index, {"content": choice.fresh}, choice.finish_reason) | ids
        end = choice.finish_reason
        return {"index": index, "text": choice.fresh, "logprobs": None, "finish_reason": end} | ids

    def _delta(self, index: int, delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        ids = {"token_ids": choice.text.token_ids} if self.call.return_token_ids else {}
        text = choice.text.text
        said = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return {"index": index, **said, "logprobs": None, "finish_reason": choice.finish_reason} | ids


def failed(choice: Choice) -> Rejection:
    """What a caller is told whose completion ended in an error, or with the server."""
    return Rejection(500 if choice.finish_reason == "error" else 503, choice.error, "engine_error")


def _event(data: dict[str, Any]) -> str:
    # escaped: many clients split lines at more characters than line feeds
    return f"data: {json.dumps(data)}\n\n"
