"""The call signatures that a broker knows of this process, and what it has said of each: decisions and leases."""

from __future__ import annotations

import itertools
import re
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from layerzero.client.arrays.recognition import Array
from layerzero.client.connection import observing
from layerzero.client.connection.call import Request, Route
from layerzero.client.connection.express import Lease
from layerzero.client.connection.link import Link
from layerzero.client.connection.neighbours import Neighbours, kind_of
from layerzero.client.connection.overlay import Overlay
from layerzero.client.connection.record import Told
from layerzero.client.connection.report import EXPRESS
from layerzero.client.planning.plans import Plan, plan_out
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.transport import messages, wire
from layerzero.ipc.transport.wire import Header, Kind
from layerzero.ipc.vocabulary import pools
from layerzero.ipc.vocabulary.neighbours import Neighbourhood
from layerzero.ipc.vocabulary.ops import FUNCTION
from layerzero.ipc.vocabulary.tensors import TensorSpec

MAX_ROUTES = 4096
MAX_CHECKED = 4096
MAX_DECISIONS = 2048  # kept per route, for futures that nobody has asked yet
_BACKEND_NAME = re.compile(r"[a-z0-9][a-z0-9_.@-]{0,63}")


class Routes:
    """The routes of one connection. Threads may share it."""

    def __init__(self, ask: Callable[..., Any], on_decision: Callable[[Route, messages.Decision], None]) -> None:
        """`ask` asks the broker. `on_decision` hears each decision that the broker tells."""
        self._ask = ask
        self._on_decision = on_decision
        self._lock = threading.RLock()
        self._neighbours = Neighbours()
        self._out: dict[str, str] = {}  # backends that cannot run in this process, which policy wanted, and why
        self._known: OrderedDict[tuple[Any, ...], Route] = OrderedDict()
        self._by_number: weakref.WeakValueDictionary[int, Route] = weakref.WeakValueDictionary()  # also in flight
        self._numbers = itertools.count(1)
        self._checked: set[str] = set()  # overlays that the broker has found to be right
        self._forgotten: deque[int] = deque()  # routes to tell the broker of

    def __len__(self) -> int:
        return len(self._known)

    def clear(self) -> None:
        """Look every call up anew."""
        self._known.clear()

    def find(
        self,
        link: Link,
        request: Request,
        specs: tuple[TensorSpec | None, ...],
        outs: tuple[Array, ...],
        policy: Overlay | None,
        device: str = "",
    ) -> Route:
        """The route of a call; new ones are told to the broker. `device`: UUID of the GPU that it runs on."""
        out_specs = tuple([out.spec for out in outs])
        specs = request.shape_specs(specs)
        params = tuple([(type(value), value) for value in request.params.values()])  # True, 1 and 1.0 are equal
        asked = None if policy is None else policy.text
        key = (request.op, specs, params, request.backend, out_specs, asked, device)
        try:
            route = self._known.get(key)
        except TypeError:  # an argument that cannot be hashed: what checks it names it
            route_message(request.planner(*specs, **request.params), request.backend, policy, device)
            raise InvalidArgument(f"{request.op}: an argument is of a wrong type: {request.params!r:.200}") from None
        if route is not None:
            if route.lease is None and not route.is_told:
                with self._lock:
                    if route.lease is None and not route.is_told:
                        self._neighbours.lend(route)
            return route
        plan = request.planner(*specs, **request.params)
        if outs:
            plan = plan_out(plan, *out_specs)
        if policy is not None:
            self.check_policy(policy)
        return self.define(link, key, plan, request.backend, policy, device, may_wait=not device)

    def define(
        self,
        link: Link,
        key: tuple[Any, ...],
        plan: Plan,
        backend: str | None,
        policy: Overlay | None = None,
        device: str = "",
        *,
        may_wait: bool = False,
    ) -> Route:
        """The route of a plan, told to the broker once; `key` finds it again. With `may_wait` it is told by `tell`, if
        at all, where its calls can do without."""
        made = Route(next(self._numbers), plan, overlay="" if policy is None else policy.text, asked=(backend, policy))
        if not device:
            made.kind = kind_of(plan, backend, made.overlay)
        if not (may_wait and self._neighbours.lend(made)):
            made.body = _body_of(plan, backend, policy, device)
        with self._lock:
            route = self._known.get(key)
            if route is None:
                route = made
                if route.body:
                    self.tell(link, route)
                self._known[key] = route
                if len(self._known) > MAX_ROUTES:
                    self._known.popitem(last=False)  # the oldest; a call in flight may still hold it
            while self._forgotten:  # nobody can call on these any more
                link.send(wire.pack(Kind.FORGET, route=self._forgotten.popleft()))
        return route

    def tell(self, link: Link, route: Route, near: int = 0) -> None:
        """The broker of a route, unless it knows it. `near`: the route whose lease its call had."""
        if route.is_told:
            return
        with self._lock:
            if not route.is_told:
                route.body = route.body or _body_of(route.plan, *route.asked)
                self._by_number[route.number] = route
                near = near or (0 if route.near is None else route.near.number)
                link.send(wire.pack(Kind.ROUTE, route=route.number, aux=near, body=route.body))
                weakref.finalize(route, self._forgotten.append, route.number).atexit = False
                route.is_told = True  # last: other threads go on to call on it

    def check_policy(self, policy: Overlay) -> None:
        """Let the broker look at an overlay, once for each. Raises InvalidArgument with what is wrong and the nearest
        names."""
        if policy.text not in self._checked:
            self._ask("policy", overlay=policy.to_wire())
            if len(self._checked) >= MAX_CHECKED:
                self._checked.clear()
            self._checked.add(policy.text)

    def why_out(self, backend: str) -> str:
        """For reports: why a backend does not run in this process, which policy wanted."""
        why = self._out.get(backend)
        return f"{backend} does not run in this process: {why}" if why else ""

    def stay_out(self, backend: str, why: str) -> None:
        """No route's calls run on this backend in this process any more."""
        self._out[backend] = why
        for route in list(self._known.values()):
            if route.here is not None and route.here.decision.backend == backend:
                route.here = None

    def note_decision(self, header: Header, body: bytes) -> None:
        """The broker says what serves a route's calls."""
        route = self._by_number.get(header.route)
        if route is not None:
            if len(route.decisions) >= MAX_DECISIONS:
                del route.decisions[next(iter(route.decisions))]
            decision = route.decisions[header.aux] = Told.of(messages.decode(body, messages.Decision))
            route.slot = decision.slot
            self._on_decision(route, decision)
            if (decision.traced or observing.has_traced) and observing.on_traced is not None:
                observing.on_traced(route, decision.traced)

    def note_lease(self, header: Header, body: bytes) -> None:
        """The broker says that a route's calls may go straight to the worker."""
        route = self._by_number.get(header.route)
        decision = route.decisions.get(header.aux) if route is not None else None
        if route is not None and decision is not None:
            lease = messages.decode(body, messages.Lease)
            near = None
            if lease.neighbours:
                near = Neighbourhood.from_wire(lease.neighbours, (*route.plan.inputs, *route.plan.outputs))
            told = replace(decision, lane=EXPRESS)
            note = self.why_out(decision.backend)
            route.lease = Lease(lease.lane, lease.plan, lease.epoch, told, route.number, neighbours=near, note=note)
            route.near = None  # the broker has its kernel by its own number
            if near is not None:
                self._neighbours.note(route)


def _body_of(plan: Plan, backend: str | None, policy: Overlay | None, device: str = "") -> bytes:
    """As `route_message`, encoded. Raises InvalidArgument also for a call that is too long to describe."""
    body = messages.encode(route_message(plan, backend, policy, device))
    if len(body) > wire.MAX_ROUTE_BYTES:
        raise InvalidArgument(f"{plan.op}: the call's description is {len(body)} bytes; pass data as tensors")
    return body


def route_message(plan: Plan, backend: str | None, policy: Overlay | None, device: str = "") -> messages.Route:
    """What the broker is told of a signature. Raises InvalidArgument for what cannot be a backend's name."""
    one_by_one = [backend] if backend is None or plan.op != FUNCTION else pools.named(backend)
    if any(not (one is None or (isinstance(one, str) and _BACKEND_NAME.fullmatch(one))) for one in one_by_one):
        raise InvalidArgument(f"backend is {backend!r:.80}; allowed: None or a name that lz.status() lists")
    return messages.Route(
        op=plan.op,
        inputs=[None if s is None else s.to_wire() for s in plan.inputs],
        outputs=[s.to_wire() for s in plan.outputs],
        attrs=dict(plan.attrs),
        backend=backend or "",
        policy={} if policy is None else policy.to_wire(),
        device=device,
    )
