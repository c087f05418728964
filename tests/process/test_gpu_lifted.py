"""Calls that the client launches itself, from end to end over the GPU of threads, among those that workers run. What
the broker would say of lifting is said by the test. All of it both ways: by what is compiled, and by the Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.process.gpu_site import broker, close, connected, finish, new_site, randn, report, silu, soft
from tests.process.harness import Site, wait_until
from tests.soft_gpu import soft_cupy, soft_kernels
from tests.soft_gpu.soft_lifts import CODE, lifted_silu, lifted_triple

import layerzero as lz
from layerzero.client.facade import running
from layerzero.client.gpu.lifting import lifted_library, loaded
from layerzero.client.session.session import Session
from layerzero.ipc.lifting.form import Lifted, digest

__all__ = ["broker", "connected", "new_site", "soft"]


@pytest.fixture(params=["compiled", "python"], autouse=True)
def is_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "compiled":
        if lifted_library.lifted is None:
            pytest.skip(lifted_library.why_not)
    else:
        monkeypatch.setattr(lifted_library, "lifted", None)
    return bool(request.param == "compiled")


class Lifting:
    """What the broker says of a session's calls of silu."""

    def __init__(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        self.session, self.answer = session, {"state": "ready"}
        self.make: Callable[[Any], Lifted] = lifted_silu
        self.held = {digest(CODE): CODE}
        self.asked, self._ask = 0, session.ask
        monkeypatch.setattr(session, "ask", self.ask)
        monkeypatch.setattr(session.link, "get_lifted", self.get)

    @property
    def page(self) -> Any:
        return self.session.gpus.gpu(0).order.page

    def ask(self, method: str, **params: Any) -> Any:
        if method != "lift":
            return self._ask(method, **params)
        self.asked += 1
        route = self.session.routes._by_number[params["route"]]
        if route.plan.op != "silu":
            return {"state": "refused", "reason": "NOT_DETERMINISTIC", "detail": "two runs differ"}
        if self.answer["state"] != "ready":
            return self.answer
        packed = self.make(route.plan.inputs[0]).pack()
        self.held[digest(packed)] = packed
        epoch = self.page.lift_epoch
        return {"state": "ready", "number": 1, "backend": "one", "digest": digest(packed), "epoch": epoch}

    def get(self, wanted: str) -> tuple[int, int]:
        fd = os.memfd_create("lifted")
        os.write(fd, self.held[wanted])
        return fd, len(self.held[wanted])

    def settle(self, call: Callable[[], Any]) -> None:
        def is_lifted() -> bool:
            call()
            return report().path == "lifted"

        wait_until(is_lifted)


@pytest.fixture
def kernels(soft: None) -> Iterator[Any]:
    yield soft_kernels.install()
    loaded.forget()


@pytest.fixture
def lifting(connected: Site, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> Lifting:
    lz.disconnect()  # what it has asked so far was answered by the broker
    return Lifting(connected.connect(), monkeypatch)


def test_lifted_calls_and_those_of_workers_are_in_the_streams_order(lifting: Lifting) -> None:
    values = randn(16, 16)[1] / 8
    x = soft_cupy.asarray(values)
    lifting.settle(lambda: lz.silu(x))
    value, expected = x, values.astype(np.float64)
    for _ in range(30):
        value = lz.silu(lz.matmul(value, x))
        expected = silu(expected @ values)
    assert report().path == "lifted"
    np.testing.assert_allclose(value.get(), expected, rtol=1e-3, atol=1e-5)


def test_a_call_that_is_in_store_needs_no_worker(
    new_site: Callable[..., Site], kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its first call on, and in the next session; code is loaded once."""
    site = new_site("one")
    for _ in range(2):
        lifting = Lifting(site.connect(), monkeypatch)
        x, values = randn(100)
        for _ in range(3):
            close(lz.silu(x), silu(values))
            assert (report().path, report().backend, report().worker_pid) == ("lifted", "one", 0)
        assert lifting.asked == 1
        assert site.backend("one")["pid"] is None
        lz.disconnect()
    assert kernels.loads == 1


def test_reports_name_the_kernel_and_why_a_call_is_not_lifted(lifting: Lifting) -> None:
    x, _ = randn(20, 20)
    lifting.settle(lambda: lz.silu(x))
    told = report()
    assert (told.kernel_id, told.lane, told.copied_bytes) == ("one.silu", "lifted", 0)
    assert "one.silu of soft 1.0" in str(told)
    assert "copied nothing" in str(told)
    wait_until(lambda: (lz.matmul(x, x), "not lifted: NOT_DETERMINISTIC: two runs differ" in report().notes)[1])


def test_what_was_asked_of_other_brokers_goes_the_ordinary_way(
    connected: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not know of lifting."""
    session = connected.connect()
    ask = session.ask
    monkeypatch.setattr(session, "ask", lambda method, **more: ask(method.replace("lift", "no such"), **more))
    x, values = randn(21)
    for _ in range(4):
        close(lz.silu(x), silu(values))
    assert report().path in ("broker", "express")
    assert not any("lifted" in note for note in report().notes)


def test_calls_of_tools_and_samples_are_not_lifted(lifting: Lifting) -> None:
    x, values = randn(22)
    lifting.settle(lambda: lz.silu(x))
    session = lifting.session
    wished: list[Any] = []
    token = running.handler.set(wished.append)
    lz.silu(x)
    running.handler.reset(token)
    result, told = session.run_apart(wished[0])
    close(result, silu(values))
    assert told.path == "broker"
    lz.silu(x, timeout_s=5.0)
    assert report().path == "broker"
    session.shadow.rate = 1.0
    close(lz.silu(x), silu(values))
    assert report().path != "lifted"


def test_graphs_of_the_application_have_the_kernels_themselves(lifting: Lifting) -> None:
    lifting.make = lifted_triple
    with soft_cupy.stream():
        x, values = randn(23)
        lifting.settle(lambda: lz.silu(x))
        stream = soft_cupy.current()
        stream.begin_capture()
        result = lz.silu(x)
        graph = stream.end_capture()
        assert report().path == "lifted"
        for _ in range(3):
            x.scale(2)
            values = 2 * values
            graph.launch()
            close(result, 3 * values)


def test_another_epoch_sends_calls_to_workers(lifting: Lifting) -> None:
    x, values = randn(24)
    lifting.settle(lambda: lz.silu(x))
    lifting.answer = {"state": "refused", "reason": "FAULTED", "detail": "it struck"}
    lifting.page.bump_lift_epoch()
    for _ in range(12):
        close(lz.silu(x), silu(values))
        assert report().path in ("broker", "express")
    wait_until(lambda: (lz.silu(x), "not lifted: FAULTED: it struck" in report().notes)[1])


def test_submitted_calls_have_reports(lifting: Lifting) -> None:
    x, values = randn(25)
    lifting.settle(lambda: lz.silu(x))
    future = lz.submit(lz.silu, x)
    close(future.result(), silu(values))
    assert future.report is not None
    assert future.report.path == "lifted"
    finish()
