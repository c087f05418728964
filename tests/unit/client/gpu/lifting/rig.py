"""A client's side of lifted calls without a broker: what the broker would answer is said by the test, and kernels run
on the GPU of tests/soft_gpu."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from tests.soft_gpu import soft_cupy
from tests.soft_gpu.soft_gpu import driver
from tests.soft_gpu.soft_lifts import CODE, lifted_silu

from layerzero.client.connection import arena, overlay
from layerzero.client.connection.call import Request, Route, describe_all
from layerzero.client.connection.counters import Counters
from layerzero.client.connection.record import report_of
from layerzero.client.connection.report import SelectionReport
from layerzero.client.gpu.arrays import current_stream, give
from layerzero.client.gpu.fastpath import MISS
from layerzero.client.gpu.lifting.lifts import Lifts
from layerzero.client.gpu.memory import memory_of
from layerzero.client.gpu.results import result_like
from layerzero.client.gpu.session_view import Placed
from layerzero.client.planning import plans, token_plans
from layerzero.ipc.cuda.streams import ClientOrder
from layerzero.ipc.errors import InvalidArgument, LayerZeroError
from layerzero.ipc.lifting.form import Lifted, digest
from layerzero.ipc.shm.timeline_page import create_page
from layerzero.ipc.vocabulary.tensors import TensorSpec

PATIENCE_S = 10.0
ORDINARY = object()  # what a call gives that is not lifted


def wait_until(is_true: Callable[[], object]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < until_s, "it did not come to be"
        time.sleep(0.002)


class Broker:
    """What is asked of the broker, and what it says. `answers`: by op, from the route and alignments."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, Callable[[Route, list[int]], Any]] = {}
        self.ahead: Callable[..., Any] = lambda *_: {"calls": []}  # of a route, what it grows by, first and count
        self.held: dict[str, bytes] = {digest(CODE): CODE}
        self.fetched: list[str] = []
        self.routes: dict[int, Route] = {}
        self.numbers: dict[str, int] = {}

    def hold(self, data: bytes) -> str:
        name = digest(data)
        self.held[name] = data
        return name

    def ready(self, lifted: Lifted, epoch: int) -> dict[str, Any]:
        name = self.hold(lifted.pack())
        number = self.numbers.setdefault(name, len(self.numbers) + 1)
        backend = lifted.kernel_id.partition(".")[0]
        return {"state": "ready", "number": number, "backend": backend, "digest": name, "epoch": epoch}

    def ask(self, method: str, **params: Any) -> Any:
        self.asked.append((method, params))
        if method == "lift_ahead":
            route = self.routes[params["route"]]
            answer = self.ahead(route, params["grows"], params["first"], params["count"])
            for one in answer["calls"] if params["forms"] else ():
                one["form"] = self.held[one["digest"]]
            return answer
        if method != "lift":
            return {}
        route = self.routes[params["route"]]
        answer = self.answers.get(route.plan.op)
        if answer is None:
            raise InvalidArgument(f"{method} is no method")
        given = answer(route, params["alignments"])
        if isinstance(given, LayerZeroError):
            raise given
        return given

    def count(self, method: str = "lift") -> int:
        return [name for name, _ in self.asked].count(method)

    def get_lifted(self, wanted: str) -> tuple[int, int] | None:
        self.fetched.append(wanted)
        data = self.held[wanted]
        fd = os.memfd_create("lifted")
        os.write(fd, data)
        return fd, len(data)


class Rig:
    """A session, as far as lifted calls need one."""

    def __init__(self) -> None:
        self.broker, self.ordinary, self.looks = Broker(), 0, 0
        self.last = threading.local()
        self.memory = memory_of(0)
        fd = create_page()
        order = ClientOrder(self.memory.context, fd, has_memops=True)
        os.close(fd)
        self.gpu: Any = SimpleNamespace(memory=self.memory, uuid=self.memory.uuid, order=order, lock=threading.RLock())
        self.gpu.counters = Counters(None)
        outcomes = SimpleNamespace(failed=deque())
        self.calls: Any = SimpleNamespace(
            outcomes=outcomes, run_again=lambda request, start_ns: MISS, look=self._look, glance=self._glance
        )
        session: Any = SimpleNamespace(ask=self.broker.ask, last=self.last, note=self._note)
        self.link: Any = SimpleNamespace(get_lifted=self.broker.get_lifted, forks=arena.forks, is_alive=True)
        self.lifts = Lifts(session, self.link, self.calls)
        self._plans: dict[Any, Route] = {}
        self._lock = threading.Lock()
        self.is_armed = True  # routes are known; else each is new
        self.bump()

    @property
    def page(self) -> Any:
        return self.gpu.order.page

    def bump(self) -> int:
        epoch: int = self.page.bump_lift_epoch()
        return epoch

    def _look(self, gpu: Any) -> None:
        self.looks += 1

    def _glance(self, gpu: Any, stream: int, every: int) -> None:
        pass

    def _note(self, record: Any) -> None:
        self.last.record = record

    def offer(self, op: str, make: Callable[[Route], Lifted]) -> None:
        """Let the broker say of an op's calls that they are lifted."""
        self.broker.answers[op] = lambda route, _: self.broker.ready(make(route), self.page.lift_epoch)

    def offer_silu(self, make: Callable[[TensorSpec], Lifted] = lifted_silu) -> None:
        self.offer("silu", lambda route: make(route.plan.inputs[0]))  # type: ignore[arg-type]

    def run(self, request: Request) -> Any:
        """As a session does; ORDINARY for a call that would be put on a ring or sent."""
        start_ns = time.perf_counter_ns()
        result = self.lifts.run_again(request, start_ns)
        if result is not MISS:
            return result
        arrays, outs = describe_all(request)
        out = outs[0] if outs else None
        like = next(array for array in arrays if array is not None)
        asked_in, route = overlay.process(), self._route(request, arrays, out)
        made, address = result_like(like, out, route.plan.results)
        stream = current_stream(like)
        with self.memory.context:
            call = Placed(request, route, arrays, out, like, self.gpu, stream, address, start_ns, asked_in)
            if self.lifts.serve(call):
                return give(like, made)
        with self._lock:
            self.ordinary += 1
        return ORDINARY

    def _route(self, request: Request, arrays: Any, out: Any) -> Route:
        specs = tuple(None if array is None else array.spec for array in arrays)
        key = (request.op, specs, out is not None)
        with self._lock:
            route = self._plans.get(key)
            if route is None:
                plan = request.planner(*specs, **request.params)
                if out is not None:
                    plan = plans.plan_out(plan, out.spec)
                route = self._plans[key] = Route(len(self._plans) + 1, plan, b"")
                route.is_armed = self.is_armed
                self.broker.routes[route.number] = route
        return route

    def silu(self, x: Any, out: Any = None, **options: Any) -> Any:
        return self.run(Request("silu", (x,), {}, plans.plan_silu, out, **options))

    def append_kv(self, *args: Any) -> Any:
        return self.run(Request("append_kv", (*args, None, None), {}, token_plans.plan_append_kv))

    def settle(self, call: Callable[[], Any]) -> Any:
        """Make a call until it is lifted; its result."""
        results: list[Any] = []

        def is_lifted() -> bool:
            results.append(call())
            return results[-1] is not ORDINARY

        wait_until(is_lifted)
        return results[-1]

    def report(self) -> SelectionReport:
        found = report_of(self.last.record)
        assert found is not None
        return found

    def close(self) -> None:
        self.lifts.finish()
        self.lifts.close()
        self.gpu.order.close()


def randn(*shape: int, seed: int = 0) -> tuple[Any, np.ndarray]:
    """On the GPU already, for whatever stream reads it."""
    values = np.random.default_rng(sum(shape) + seed).standard_normal(shape, dtype=np.float32)
    made = soft_cupy.asarray(values)
    made.get()
    return made, values


def silu(x: np.ndarray) -> np.ndarray:
    wide = np.asarray(x, np.float64)
    return wide / (1 + np.exp(-wide))


def close(result: Any, expected: np.ndarray) -> None:
    assert result is not ORDINARY
    np.testing.assert_allclose(result.get(), expected, rtol=1e-5, atol=1e-6)


def synchronize() -> None:
    driver.synchronize_stream(soft_cupy.current().ptr)
