"""The page by HTTP. Whoever asks must show the token, once, by the address that `lz dashboard` prints; then a cookie
does. No other site's page can ask: docs/security.md."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from anyio import to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.responses import StreamingResponse as Stream
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import layerzero as lz
from layerzero.dashboard import kept
from layerzero.dashboard.watching import Broker, Watch
from layerzero.ipc.transport import secret

PAGE = Path(__file__).parent / "page"
FILES = {
    "index.html": "text/html",
    "app.js": "text/javascript",
    "views.js": "text/javascript",
    "details.js": "text/javascript",
    "nodes.js": "text/javascript",
    "draw.js": "text/javascript",
    "style.css": "text/css",
    "icon.svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
TOKEN = "token"
ASKED = "x-layerzero"  # a header that a form of another site cannot send
SILENCE_S = 10.0  # then a comment says that the stream is alive
MAX_SPAN_S = 30 * 86_400.0
ACTIONS = ("restart", "reset")
Nodes = Callable[[], dict[str, Any]]


class Site(NamedTuple):
    """What there is to be shown. `may_act`: backends may be restarted and reset from the page. `nodes`: what each node
    of a cluster said last, None where there is none."""

    broker: Broker
    watch: Watch
    capsules: Path
    traces: Path
    matrix: Path
    may_act: bool
    nodes: Nodes | None = None


def application(site: Site, token: str, host: str, port: int) -> ASGIApp:
    """`host` and `port`: where it listens."""

    @asynccontextmanager
    async def living(_: Starlette) -> AsyncIterator[None]:
        site.watch.begin()
        try:
            yield
        finally:
            await to_thread.run_sync(site.watch.end)

    routes = [
        Route("/", partial(_file, "index.html")),
        *(Route(f"/{name}", partial(_file, name)) for name in FILES if name != "index.html"),
        Route("/events", partial(_events, site)),
        Route("/api/site", partial(_answer, partial(_about, site))),
        *([] if site.nodes is None else [Route("/api/nodes", partial(_answer, partial(_nodes, site.nodes)))]),
        Route("/api/history", partial(_answer, partial(_history, site))),
        Route("/api/decisions", partial(_answer, lambda _: site.broker.ask("decisions"))),
        Route("/api/capsules", partial(_answer, lambda _: {"capsules": kept.capsules(site.capsules)})),
        Route("/api/capsules/{name}", partial(_answer, lambda r: kept.capsule(site.capsules, r.path_params["name"]))),
        Route("/api/traces", partial(_answer, lambda _: kept.traces(site.traces))),
        Route("/api/traces/{name}", partial(_answer, lambda r: kept.trace(site.traces, r.path_params["name"]))),
        Route("/api/matrix", partial(_answer, lambda _: {"matrix": kept.matrix(site.matrix)})),
        Route("/api/{action}/{backend}", partial(_act, site), methods=["POST"]),
    ]
    return Gate(Starlette(routes=routes, lifespan=living), token, host, port)


def _about(site: Site, _: Request) -> dict[str, Any]:
    return {"may_act": site.may_act, "version": lz.__version__, "has_nodes": site.nodes is not None}


def _nodes(nodes: Nodes, _: Request) -> dict[str, Any]:
    return nodes()


class Gate:
    """Lets through who has shown the token, from this very site; everything that leaves has HEADERS."""

    def __init__(self, app: ASGIApp, token: str, host: str, port: int) -> None:
        self._app = app
        self._token = token
        self._cookie = f"lz-dashboard-{port}"
        try:
            is_here = ipaddress.ip_address(host).is_loopback
        except ValueError:
            is_here = False
        names = ("localhost", "127.0.0.1", "[::1]", host)
        self._hosts = {f"{name}:{port}" for name in names} if is_here else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *own]}
            await send(message)

        answer = self._refusal(Request(scope))
        await (self._app if answer is None else answer)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if self._hosts is not None and host not in self._hosts:
            return PlainTextResponse("ask for the address that lz dashboard has printed\n", 421)
        if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return PlainTextResponse("other sites may not ask\n", 403)
        given = request.query_params.get(TOKEN)
        if given is not None and request.method == "GET" and request.url.path == "/":
            if not secret.is_equal(given.encode(), self._token.encode()):
                return PlainTextResponse("open the address that lz dashboard has printed: the token is another\n", 401)
            answer = RedirectResponse("/", 303)
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
            return answer
        shown = request.cookies.get(self._cookie) or request.headers.get("authorization", "").removeprefix("Bearer ")
        if not secret.is_equal(shown.encode(), self._token.encode()):
            return PlainTextResponse("open the address that lz dashboard has printed: it has a token in it\n", 401)
        if request.method not in ("GET", "HEAD"):
            origin = request.headers.get("origin")
            if request.headers.get(ASKED) != "1" or (origin is not None and origin.partition("://")[2] != host):
                return PlainTextResponse("other sites may not ask\n", 403)
        return None


async def _file(name: str, _: Request) -> Response:
    return FileResponse(PAGE / name, media_type=FILES[name])


async def _answer(function: Callable[[Request], Any], request: Request) -> Response:
    """An error is an answer, too: the page shows it, and a browser's console does not."""
    try:
        return JSONResponse(await to_thread.run_sync(function, request))
    except lz.LayerZeroError as exc:
        return JSONResponse({"error": {"message": exc.message, "repair": str(exc.facts.get("repair", ""))}})


def _history(site: Site, request: Request) -> dict[str, Any]:
    """`seconds` until now, or until `end`."""
    try:
        seconds = float(request.query_params.get("seconds", "900"))
        end = float(request.query_params.get("end", str(time.time())))
    except ValueError as exc:
        raise lz.InvalidArgument(f"seconds and end are numbers: {exc}") from exc
    if not 0 < seconds <= MAX_SPAN_S or not 0 <= end <= time.time() + 60:
        raise lz.InvalidArgument(f"seconds is {seconds:g}; allowed: more than 0, at most {MAX_SPAN_S:g}, until now")
    return {"points": site.watch.points(end - seconds, end)}


async def _events(site: Site, request: Request) -> Response:
    async def told() -> AsyncIterator[str]:
        number = -1
        while not site.watch.is_over and not await request.is_disconnected():
            after = partial(site.watch.after, number, 1.0 if number < 0 else SILENCE_S)
            new, frame = await to_thread.run_sync(after, abandon_on_cancel=True)
            yield ":\n\n" if new == number else f"data: {frame}\n\n"
            number = new

    return Stream(told(), media_type="text/event-stream")


async def _act(site: Site, request: Request) -> Response:
    action, backend = request.path_params["action"], request.path_params["backend"]
    if action not in ACTIONS:
        return PlainTextResponse(f"there are {', '.join(ACTIONS)}\n", 404)
    if not site.may_act:
        return PlainTextResponse("this page only shows: lz dashboard --allow-actions lets it act\n", 403)
    more: dict[str, Any] = {"timeout_s": 120.0, "force": False} if action == "restart" else {}
    return await _answer(lambda _: site.broker.ask(action, backend=backend, **more), request)
