"""Shadow checks and background tuning of calls on a GPU, on that of threads (tests/soft_gpu)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.process.gpu_site import broker, close, connected, finish, gelu, held, new_site, randn, silu, slow, soft
from tests.process.harness import PATIENCE_S, Site, wait_until
from tests.process.test_gpu_graphs import capture, replay
from tests.soft_gpu import soft_cupy, soft_gpu, soft_numpy

import layerzero as lz

__all__ = ["broker", "connected", "new_site", "soft"]


def told(session: lz.Session, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the session's shadow checks tell the broker."""
    found: list[dict[str, Any]] = []
    ask = session.ask

    def heard(method: str, **params: Any) -> Any:
        answer = ask(method, **params)
        if method == "shadow":
            found.append(params)
        return answer

    monkeypatch.setattr(session, "ask", heard)
    session.shadow.references = ("two",)
    session.shadow.rate = 1.0
    return found


def test_calls_on_a_gpu_are_compared_with_a_reference_there(
    new_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a kernel that is wrong is told of; they were never looked at."""
    session = new_site("one", "two").connect()
    checks = told(session, monkeypatch)
    x, values = randn(8, 16)
    worn = np.full((8, 16), soft_numpy.WORN, np.float32)
    lz.silu(x)  # the first call after the rate was set is not sampled
    for count, array in enumerate((x, x, soft_cupy.asarray(worn)), 1):
        lz.silu(array)
        wait_until(lambda count=count: len(checks) == count)
    assert {(c["kernel_id"], c["reference"]) for c in checks} == {("one.silu", "two.silu")}
    assert [c["error"] > 1e-3 for c in checks] == [False, False, True]
    report = lz.last_report()
    assert [(copy.arg, copy.nbytes) for copy in report.copies if copy.reason == "sampled shadow check"] == [
        ("x", 512),
        ("out", 512),
    ]
    wait_until(lambda: session.shadow.counts["compared"] == 3)
    assert session.shadow.counts == {"compared": 3, "beyond": 1}
    wait_until(lambda: "NOT_CERTIFIED" in str(lz.explain("silu", x)))  # one client is all there are
    close(lz.silu(x), silu(values))
    assert lz.last_report().kernel_id == "two.silu"


def test_what_is_compared_is_what_the_call_had_and_made(connected: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the caller enqueues next; and when it writes the result over the input, or has strides."""
    session = lz.session()
    checks = told(session, monkeypatch)
    x, _ = randn(8, 16)
    wide, _ = randn(16, 32)
    for count in range(6):
        x.fill(0.1 * count)
        if count % 3 == 0:
            out = lz.silu(x)
            out.fill(7)
        elif count % 3 == 1:
            lz.silu(x, out=x)
        else:
            lz.silu(wide[::2, 3:9], out=wide[1::2, 20:26])
        x.fill(-1)
        wait_until(lambda count=count: len(checks) == count)
    assert [c["error"] <= 2e-5 for c in checks] == [True] * 5


def test_a_sampled_call_is_not_waited_for(connected: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies are work of its stream like all the rest."""
    session = lz.session()
    x, values = randn(soft_numpy.SLOW)
    slow(x)
    finish()
    told(session, monkeypatch)
    slow(x)
    finish()
    before = session.shadow.counts["compared"]
    with held(connected):
        result = slow(x)
        x.fill(0)
        assert not soft_gpu.driver.is_stream_idle(soft_cupy.current().ptr)
        assert session.shadow.counts["compared"] == before
    close(result, gelu(values))
    wait_until(lambda: session.shadow.counts["compared"] > before)


def test_calls_in_a_capture_are_counted_and_not_sampled(connected: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in the application's graph would be made at each replay."""
    session = lz.session()
    x, values = randn(4, 16)
    for _ in range(3):
        lz.silu(x)
    session.shadow.rate = 1.0
    lz.silu(x)
    graph, result = capture(lambda: lz.silu(x))
    replay(graph)
    assert session.shadow.counts["captured"] == 1
    close(result, silu(values))


def test_a_reference_that_fails_is_counted_and_raised_by_nobody(
    new_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The application did not make that call."""
    session = new_site("one", "two").connect()
    x, values = randn(8, 16)
    lz.layer_norm(x, (16,), eps=soft_numpy.RAISE, backend="two")
    session.shadow.references = ("one",)
    session.shadow.rate = 1.0
    for _ in range(3):
        lz.layer_norm(x, (16,), eps=soft_numpy.RAISE, backend="two")
    wait_until(lambda: session.shadow.counts["failed"] >= 1)
    assert "the toy raises" in session.shadow.last_error
    close(lz.silu(x), silu(values))
    lz.synchronize(PATIENCE_S)


def test_session_can_be_closed_while_calls_are_compared(new_site: Callable[..., Site]) -> None:
    """Their thread once found the page of words closed that it waited for a word of, and died of it."""
    site, (x, _) = new_site("one", "two"), randn(8, 16)
    for n in range(20):
        session = site.connect()
        session.shadow.references = ("two",)
        session.shadow.rate = 1.0
        for _ in range(3):
            lz.silu(x)
        wait_until(lambda session=session, n=n: session.shadow.counts["compared"] >= n % 3)
        lz.disconnect()
        wait_until(lambda session=session: not session.shadow._unseen)


def test_background_tuning_measures_every_kernel_on_the_gpu(new_site: Callable[..., Site]) -> None:
    """Also a backend's second one, which no call goes to."""
    site = new_site("one", "two", slow_silu=True)
    (site.folder / "layerzero" / "policy.yaml").write_text("tune_budget: 1.0\nweights: {perfdb: 0}\n")
    session = site.connect()
    x, values = randn(8, 16)
    kernels = {"one.silu", "one.silu.slow", "two.silu", "two.silu.slow"}

    def measured() -> set[str]:
        close(lz.silu(x), silu(values))
        return {c.kernel_id for c in lz.explain("silu", x).candidates if c.measured_us is not None}

    wait_until(lambda: measured() == kernels)
    assert session.shadow.counts["tuned"] >= 3
    assert not session.shadow.counts["failed"], session.shadow.last_error
    assert lz.last_report().kernel_id == "one.silu.slow"
