"""HTTP: /metrics, /healthz, /readyz. Every request asks the broker anew, by a connection of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any, Protocol

from prometheus_client.registry import Collector

from layerzero.client.metrics import text
from layerzero.client.metrics.families import Snapshot
from layerzero.ipc.cuda.usage import GpuUsage
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.transport import secret

MAX_REQUESTS = 16  # at once
REQUEST_S = 10.0  # for a request to come, and to be sent its answer
HEALTH_S = 1.0
METRICS_S = 8.0  # Prometheus itself gives up after 10 s, if it is not told otherwise
Ask = Callable[[str], dict[str, Any]]


class Source(Protocol):
    """What is shown."""

    def answer(self, question: str, within_s: float) -> dict[str, Any]:
        """To `ping` and `serving`. Raises LayerZeroError and OSError."""

    def snapshot(self) -> Collector:
        """What there is to count now. Raises as `answer` does."""


class Broker:
    """Questions to the broker, each in a time; one of a kind is under way, however many wait for it."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._under_way: dict[str, Future[dict[str, Any]]] = {}
        self._threads = ThreadPoolExecutor(2, "question")
        self._usage = GpuUsage()

    def answer(self, question: str, within_s: float) -> dict[str, Any]:
        """Raises LayerZeroError, OSError, and TimeoutError when there is no answer in that time."""
        with self._lock:
            found = self._under_way.get(question)
            if found is None or found.done():
                found = self._under_way[question] = self._threads.submit(self._ask, question)
        try:
            return found.result(within_s)
        except FutureTimeoutError:
            raise TimeoutError(f"the broker does not answer within {within_s:g} s") from None

    def snapshot(self) -> Snapshot:
        """What there is to count now. Raises as `answer` does."""
        answer = self.answer("metrics", METRICS_S)
        return Snapshot(answer, self._usage.of(answer["pids"]))


class Server(ThreadingMixIn, HTTPServer):
    """On a socket that listens. `token`: what `Authorization: Bearer` must have; None: nothing."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, source: Source, token: bytes | None) -> None:
        super().__init__(("", 0), Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.source, self.token = source, token
        self._room = threading.BoundedSemaphore(MAX_REQUESTS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever asked has gone."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = REQUEST_S
    server_version, sys_version = "layerzero", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/healthz":
            self._health("ping", lambda answer: [])
        elif path == "/readyz":
            self._health("serving", lambda answer: answer["why"])
        elif path == "/metrics" and not self._is_allowed():
            self._send(401, "a token is needed: Authorization: Bearer TOKEN\n", ("WWW-Authenticate", "Bearer"))
        elif path == "/metrics":
            self._metrics()
        else:
            self._send(404, "there are /metrics, /healthz and /readyz\n")

    do_HEAD = do_GET

    def _is_allowed(self) -> bool:
        token = self.server.token
        kind, _, given = self.headers.get("Authorization", "").partition(" ")
        return token is None or (kind.lower() == "bearer" and secret.is_equal(given.strip().encode(), token))

    def _metrics(self) -> None:
        try:
            snapshot = self.server.source.snapshot()
        except (LayerZeroError, OSError) as exc:
            self._send(503, f"{exc}\n")
            return
        self._send(200, text.render(snapshot.collect()), ("Content-Type", text.CONTENT_TYPE))

    def _health(self, question: str, why_of: Callable[[dict[str, Any]], list[str]]) -> None:
        """Why it is not well hears only who may read metrics."""
        try:
            why = why_of(self.server.source.answer(question, HEALTH_S))
        except (LayerZeroError, OSError) as exc:
            why = [str(exc)]
        if not why:
            self._send(200, "ok\n")
        else:
            self._send(503, "; ".join(why) + "\n" if self._is_allowed() else "not ok\n")

    def _send(self, status: int, body: str | bytes, *headers: tuple[str, str]) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for name, value in headers or [("Content-Type", "text/plain; charset=utf-8")]:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Not each scrape."""
