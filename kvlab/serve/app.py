"""The routes: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from kvlab.engine import Engine
from kvlab.engine.prompts import prompt_ids
from kvlab.engine.sizing import longest_sequence
from kvlab.serve.answers import Answer, Choice
from kvlab.serve.limits import BodyLimit, Rejection, ServerLimits, invalid, too_long
from kvlab.serve.loop import EngineLoop, Flow, Job
from kvlab.serve.metrics import EngineMetrics
from kvlab.serve.protocol import Call, ChatCall, CompletionCall
from kvlab.serve.text import TextOf


class Service:
    """What the routes share: the engine's thread, its limits, its numbers.

    Args:
        engine: nobody else may step it from now on.
        limits: of the server.
        name: under which the model is served; its own when empty.
    """

    def __init__(self, engine: Engine, limits: ServerLimits | None = None, name: str = "") -> None:
        self.engine, self.limits = engine, limits or ServerLimits()
        self.name = name or engine.model.name
        self.metrics = EngineMetrics(engine, self.name)
        self.loop = EngineLoop(engine, self.metrics.together)
        self.created = int(time.time())
        self.longest = longest_sequence(engine)

    def jobs(self, call: Call, prompts: Sequence[Sequence[int]]) -> list[Job]:
        """The completions that a call asks for: n of each prompt.

        Raises:
            Rejection: 400, 413 or 429, with the reason.
        """
        count = len(prompts) * call.n
        if not prompts:
            raise invalid("prompt: must hold at least one prompt", "prompt")
        places = self.engine.limits.max_num_seqs + self.limits.max_waiting
        if count > (most := min(self.limits.max_choices, places)):
            message = f"{count} completions in one call: must be at most {most}"
            raise self._turned_away("too_many_choices", Rejection(413, message, "too_many_choices", "n"))
        if (live := self.loop.num_live) > places - count:
            full = Rejection(429, f"{live} requests run or wait: the queue is full", "queue_full")
            raise self._turned_away("capacity", full)
        extra = {"priority": call.priority, "salt": call.cache_salt}
        found = []
        for prompt in prompts:
            most = self._room_after(prompt)
            limit = most if call.limit is None else call.limit
            found += [Job(prompt, call.sampling(limit, choice), extra, call.n) for choice in range(call.n)]
        return found

    def _room_after(self, prompt: Sequence[int]) -> int:
        try:
            count = len(prompt_ids(self.engine.model, prompt))
        except ValueError as error:
            raise invalid(str(error), "prompt") from None
        if reason := self.engine.scheduler.refusal(count, count + 1):
            raise self._turned_away("too_long", too_long(reason)) if count else invalid(reason, "prompt")
        return self.longest - count

    def _turned_away(self, reason: str, why: Rejection) -> Rejection:
        """`why`, counted: a call that would have been answered by a larger or an idle server. What the engine itself
        refuses is counted by its event."""
        self.metrics.reject(reason)
        return why

    async def ids(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a prompt; a long text is cut in a thread of its own."""
        if not isinstance(prompt, str):
            return prompt
        if self.engine.model.tokenizer is None:
            raise invalid("prompt: the model has no tokenizer, give token ids", "prompt")
        try:
            return await asyncio.to_thread(self.engine.model.tokenizer.encode, prompt)
        except ValueError as error:
            raise invalid(str(error), "prompt") from None

    async def chat_ids(self, call: ChatCall) -> list[int]:
        """Token ids of a conversation in the model's chat template."""
        if self.engine.model.tokenizer is None:
            raise invalid("messages: the model has no tokenizer", "messages")
        messages = [message.plain for message in call.messages]
        try:
            return await asyncio.to_thread(self.engine.model.tokenizer.encode_chat, messages)
        except ValueError as error:
            raise invalid(str(error), "messages") from None

    async def reply(self, call: Call, prompts: Sequence[Sequence[int]], request: Request, chat: bool) -> Response:
        """The answer, whole or as a stream; a client that leaves ends its requests."""
        jobs = self.jobs(call, prompts)
        if not self.loop.alive:
            raise self._turned_away("stopped", Rejection(503, "the engine has stopped", "stopped"))
        flow = self.loop.submit(jobs)
        try:
            await flow.accepted()
        except ValueError as refused:
            raise too_long(str(refused)) from None
        except BaseException:
            flow.close()
            raise
        tokenizer = self.engine.model.tokenizer
        choices = [Choice(TextOf(tokenizer, call.stops), len(job.prompt)) for job in jobs]
        answer = Answer(call, self.name, choices, chat)
        if call.stream:
            return FlowResponse(flow, answer)
        return await whole_or_gone(flow, answer, request)


class FlowResponse(StreamingResponse):
    """A stream of events whose requests end with it, however it ends."""

    def __init__(self, flow: Flow, answer: Answer) -> None:
        super().__init__(answer.events(flow), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._flow = flow

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends the events; a client that left, a stop string and a shutdown all close the flow."""
        try:
            await super().__call__(scope, receive, send)
        except asyncio.CancelledError:
            # the server ends, and the client has not read what was sent
            pass
        finally:
            self._flow.close()


async def whole_or_gone(flow: Flow, answer: Answer, request: Request) -> Response:
    """The complete answer, or an empty response that nobody reads once the client has left."""
    work = asyncio.ensure_future(answer.whole(flow))
    gone = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(await work) if work.done() else Response(status_code=499)
    finally:
        work.cancel()
        gone.cancel()
        flow.close()


async def disconnected(request: Request) -> None:
    """Returns when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def create_app(engine: Engine, limits: ServerLimits | None = None, name: str = "") -> FastAPI:
    """The application over `engine`; its thread starts and ends with the application."""
    service = Service(engine, limits, name)

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        service.loop.start()
        yield
        await asyncio.to_thread(service.loop.stop)

    app = FastAPI(title="kvlab", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    refused = partial(service.metrics.reject, "body_too_large")
    app.add_middleware(BodyLimit, max_bytes=service.limits.max_body_bytes, refused=refused)
    _add_errors(app)
    _add_routes(app, service)
    return app


def _add_errors(app: FastAPI) -> None:
    """Whatever goes wrong, before a route is found, in it or behind it, is told in OpenAI's shape."""

    async def told(request: Request, error: Exception) -> JSONResponse:
        why = rejection_of(request, error)
        return JSONResponse(why.body, why.status, why.headers)

    for kind in (Rejection, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, told)


def rejection_of(request: Request, error: Exception) -> Rejection:
    """What a client is told of `error`."""
    if isinstance(error, Rejection):
        return error
    if isinstance(error, HTTPException):
        what = {404: "no such address", 405: f"the address does not take {request.method}"}
        message = f"{request.url.path}: {what.get(error.status_code, error.detail)}"
        return Rejection(error.status_code, message, headers=error.headers)
    if not isinstance(error, RequestValidationError):
        return Rejection(500, "the server failed at this call", "internal_error")
    kind = request.headers.get("content-type", "")
    if "json" not in kind.lower():
        return Rejection(415, f"content-type {kind!r}: must be application/json", "unsupported_media_type")
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return invalid(f"body: is no JSON ({first.get('ctx', {}).get('error', first['msg'])})")
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    return invalid(f"{place or 'body'}: {first['msg']}", place or None)


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(call: CompletionCall, request: Request) -> Response:
        call.check((service.name,))
        prompts = [await service.ids(prompt) for prompt in call.prompts]
        return await service.reply(call, prompts, request, chat=False)

    @app.post("/v1/chat/completions")
    async def chat(call: ChatCall, request: Request) -> Response:
        call.check((service.name,))
        return await service.reply(call, [await service.chat_ids(call)], request, chat=True)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        row = {
            "id": service.name, "object": "model", "created": service.created, "owned_by": "kvlab",
            "max_model_len": service.longest, "vocab_size": service.engine.model.config.vocab_size,
        }  # fmt: skip
        return {"object": "list", "data": [row]}

    @app.get("/health")
    async def health() -> Response:
        if service.loop.alive:
            return JSONResponse({"status": "ok", "live": service.loop.num_live})
        return JSONResponse({"status": "stopped", "reason": str(service.loop.failure or "shutdown")}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        body, content_type = service.metrics.exposition()
        return Response(body, media_type=content_type)
