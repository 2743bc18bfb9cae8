"""The server as a process (`serve`) and as a thread beside a notebook or a test (`ServerThread`)."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import uvicorn

from kvlab.engine import Engine
from kvlab.serve.app import Service, create_app
from kvlab.serve.limits import ServerLimits


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens at `host`:`port`; port 0 is a free one. Calls wait in it until a server takes them.

    Raises:
        OSError: the port is taken, or not ours to take.
        ValueError: no port has that number.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"port {port}: must be from 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise OSError(f"port {port} on {host}: {error.strerror or error}") from error
    return sock


def url_of(sock: socket.socket) -> str:
    """The address of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


CANCEL_S = 5
"""Seconds that a client has to read the end of its answer, before its connection is cut."""

KEEP_ALIVE_S = 60
"""Seconds that an idle connection stays open: longer than clients keep one (the official client 5), so that it is the
client that closes. Else a call may go out on a connection that the server is closing, and fail."""


class Server(uvicorn.Server):
    """uvicorn's, which ends quietly: answers that outlast the drain are told so, and the signal that ended the server
    is not raised again behind it."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes no new calls; answers under way get the drain's seconds."""
        service: Service = self.config.app.state.service  # type: ignore[union-attr]
        end = asyncio.get_running_loop().call_later(
            service.limits.drain_s, service.loop.drop, "the server is shutting down"
        )
        await super().shutdown(sockets)
        end.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Within: SIGINT and SIGTERM ask the server to end."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()


def _server(engine: Engine, limits: ServerLimits, name: str) -> Server:
    config = uvicorn.Config(
        create_app(engine, limits, name), log_level="warning", access_log=False, lifespan="on",
        timeout_graceful_shutdown=round(limits.drain_s) + CANCEL_S, server_header=False, timeout_keep_alive=KEEP_ALIVE_S,
    )  # fmt: skip
    return Server(config)


def serve(engine: Engine, sock: socket.socket, limits: ServerLimits | None = None, name: str = "") -> None:
    """Serves until SIGINT or SIGTERM: no new calls then, answers under way get `drain_s`, and the engine ends."""
    _server(engine, limits or ServerLimits(), name).run(sockets=[sock])


class ServerThread:
    """A server on a free port of 127.0.0.1 for the length of a `with` block.

    Attributes:
        url: where it answers, without /v1.
        service: its parts: `service.loop`, `service.metrics`.
    """

    def __init__(self, engine: Engine, limits: ServerLimits | None = None, name: str = "", port: int = 0) -> None:
        self._server = _server(engine, limits or ServerLimits(drain_s=5), name)
        self.service: Service = self._server.config.app.state.service  # type: ignore[union-attr]
        self._sock = bind("127.0.0.1", port)
        self.url = url_of(self._sock)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._sock]}, name="kvlab-server", daemon=True
        )

    def start(self, timeout: float = 20.0) -> ServerThread:
        """Itself, answering.

        Raises:
            RuntimeError: it did not come up.
        """
        self._thread.start()
        end = time.monotonic() + timeout
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > end:
                raise RuntimeError(f"the server at {self.url} did not start")
            time.sleep(0.005)
        return self

    def stop(self, timeout: float = 20.0) -> None:
        """Ends it: answers under way first, then the engine's thread.

        Raises:
            RuntimeError: it did not end.
        """
        self._server.should_exit = True
        self._thread.join(timeout)
        self._sock.close()
        if self._thread.is_alive():
            raise RuntimeError(f"the server at {self.url} did not end within {timeout} s")

    def __enter__(self) -> ServerThread:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
