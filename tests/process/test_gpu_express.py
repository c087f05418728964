"""Calls on a GPU that go past the broker, from end to end over the GPU of threads: onto the ring of a worker. All of
them both ways: by what is compiled, and by the Python that does the same."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process.gpu_site import (
    broker,
    close,
    connected,
    finish,
    gelu,
    held,
    new_site,
    randn,
    report,
    silu,
    slow,
    soft,
)
from tests.process.harness import PATIENCE_S, Site, wait_until
from tests.process.test_counters import counts, grown, reported
from tests.soft_gpu import soft_cupy
from tests.soft_gpu.soft_gpu import driver
from tests.soft_gpu.soft_numpy import SLOW

import layerzero as lz
from layerzero.client.gpu import fastpath_library
from layerzero.ipc.errors import CudaError

__all__ = ["broker", "connected", "new_site", "soft"]
MANY = 8  # calls after which a route is settled, and its lease has been read


@pytest.fixture(params=["compiled", "python"], autouse=True)
def is_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "compiled":
        if fastpath_library.repeats is None:
            pytest.skip(fastpath_library.why_not)
    else:
        monkeypatch.setattr(fastpath_library, "repeats", None)
    return bool(request.param == "compiled")


def settle(call: Callable[[], Any], lane: str = "express") -> None:
    """Make a call until its route has a lease, and no worker is about to be ready, which would take it back."""

    def is_settled() -> bool:
        call()
        states = {row["state"] for row in lz.status()["backends"]}  # what the broker has sent is here by now
        return report().path == lane and not states & {"probing", "starting"}

    wait_until(is_settled)


@contextlib.contextmanager
def on_a_ring(site: Site, call: Callable[[], Any]) -> Iterator[Any]:
    """The result of a call that waits on a ring until the block ends. On a busy machine new times may take its lease
    back, and the broker serves it: then another."""
    while True:
        settle(call)
        with held(site):
            result = call()
            if report().path == "express":
                yield result
                return


def known_outs(x: Any, count: int) -> list[Any]:
    """Arrays for silu's results that its worker has mapped; its route is settled."""
    settle(lambda: lz.silu(x))
    outs = [soft_cupy.empty(x.shape) for _ in range(count)]
    for out in outs:
        settle(lambda: lz.silu(x, out=out))  # noqa: B023
    lz.synchronize(PATIENCE_S)
    return outs


def kill(site: Site, name: str) -> None:
    os.kill(site.backend(name)["pid"], signal.SIGKILL)


def test_settled_calls_go_past_the_broker(connected: Site) -> None:
    """Right results, the same kernel, and the broker hears nothing but how long it took."""
    x, values = randn(32, 48)
    settle(lambda: lz.silu(x))
    before = lz.silu(x)
    first = report()
    assert (first.lane, first.backend, first.copies) == ("express", "one", ())
    for _ in range(300):
        before = lz.silu(x)
    close(before, silu(values))


def test_each_call_on_a_ring_is_counted_once(connected: Site) -> None:
    """By who makes it: the broker sees no more of it than how far the ring is."""
    x, _ = randn(32, 48)
    settle(lambda: lz.silu(x))
    before, seen = counts(), reported(lambda: lz.silu(x), 40)
    seen = Counter({(op, name, "ring" if path == "express" else path): n for (op, name, path), n in seen.items()})
    assert seen["silu", "one", "ring"] > 20
    lz.synchronize(PATIENCE_S)
    assert grown(before, counts()) == dict(seen)


def test_what_is_compiled_makes_them_without_the_python(connected: Site, is_compiled: bool) -> None:
    """All of a call that was made before."""
    x, _ = randn(32, 48)
    settle(lambda: lz.silu(x))
    lz.silu(x)
    seen = set()

    def note(frame: Any, event: str, arg: object) -> None:
        seen.add((frame.f_code.co_filename.rpartition("/")[2], frame.f_code.co_name))

    sys.setprofile(note)
    try:
        lz.silu(x)
    finally:
        sys.setprofile(None)
    assert (("calls.py", "run_known") in seen) != is_compiled


@pytest.mark.parametrize("times", [1, 2])
def test_what_the_driver_refuses_holds_up_no_later_call(
    connected: Site, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """The call is on its ring by then, and what is not enqueued for it can only be tried again."""
    x, values = randn(32, 40)
    settle(lambda: lz.silu(x))
    lz.silu(x)
    real, refusals = driver.write_and_wait, iter([True] * times)

    def refuse(*told: int) -> None:
        if next(refusals, False):
            raise CudaError("cuStreamBatchMemOp_v2 returned 2", call="", number=2, name="", sticky=False)
        real(*told)

    monkeypatch.setattr(driver, "write_and_wait", refuse)
    with contextlib.suppress(CudaError):
        close(lz.silu(x), silu(values))
    assert next(refusals, None) is None
    for _ in range(2 * MANY):
        result = lz.silu(x)
    close(result, silu(values))
    lz.synchronize(PATIENCE_S)


def test_memory_that_comes_and_goes_is_never_taken_for_other_memory(connected: Site) -> None:
    """The same addresses hold other values, other shapes, other allocations."""
    rng = np.random.default_rng(5)
    for _ in range(60):
        shape = (int(rng.integers(1, 40)), 16)
        x, values = randn(*shape)
        for _ in range(6):
            result = lz.silu(x)
        close(result, silu(values))
        out = soft_cupy.asarray(np.zeros(shape, np.float32))
        assert lz.silu(x, out=out) is out
        close(out, silu(values))


def test_calls_that_are_copied_for_are_right_again_and_again(connected: Site) -> None:
    """Their memory is lent for one call, so that nothing of it may be remembered for the next."""
    x, values = randn(16, 16)
    expected = values.astype(np.float64)
    for _ in range(2 * MANY):
        assert lz.silu(x, out=x) is x
        expected = silu(expected)
        lz.status()
        assert {copy.arg for copy in report().copies} == {"out"}
    np.testing.assert_allclose(x.get(), expected, rtol=1e-3, atol=1e-6)


def test_a_session_is_closed_under_calls_of_other_threads(new_site: Callable[..., Site]) -> None:
    """They end in an error of their own; no stream hangs."""
    site = new_site("one")
    site.connect()
    x, _ = randn(24)
    settle(lambda: lz.silu(x))

    def work() -> None:
        with soft_cupy.stream():
            while True:
                lz.silu(x)

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(work) for _ in range(3)]
        lz.status()
        lz.disconnect()
        for future in futures:
            with pytest.raises(lz.LayerZeroError):
                future.result(PATIENCE_S)
    driver.synchronize()


def test_a_ring_does_not_pass_the_brokers_calls(connected: Site) -> None:
    """A worker that got a lane's calls in another order might be blocked by those that wait for the earlier ones."""
    x, values = randn(32, 56)
    outs = known_outs(x, 3)
    broker_pid = lz.session().broker_pid
    os.kill(broker_pid, signal.SIGSTOP)
    try:
        lz.silu(x, out=outs[0], timeout_s=PATIENCE_S)
        for out in outs[1:]:
            lz.silu(x, out=out)
    finally:
        os.kill(broker_pid, signal.SIGCONT)
    assert report().path == "broker"
    for out in outs:
        close(out, silu(values))
    settle(lambda: lz.silu(x))


def test_the_first_call_on_memory_that_a_worker_has_not_mapped_goes_by_the_broker(connected: Site) -> None:
    """The worker would leave it to the broker, and the calls after it would pass it on the ring."""
    x, values = randn(32, 72)
    known = known_outs(x, 1)[0]
    fresh = soft_cupy.empty((32, 72))
    log, pid = connected.folder / "worker-one.log", connected.backend("one")["pid"]
    before = log.read_text().count("came behind later ones")
    os.kill(pid, signal.SIGSTOP)
    try:
        lz.silu(x, out=fresh)
        lz.silu(x, out=known)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert report().path == "broker"
    for out in (fresh, known):
        close(out, silu(values))
    settle(lambda: lz.silu(x, out=fresh))
    assert log.read_text().count("came behind later ones") == before


def test_chains_hop_between_rings_in_their_order(connected: Site) -> None:
    """Each call of a lane waits for the one before, whichever worker has it, and several lanes run side by side."""

    def chain(number: int) -> None:
        rng = np.random.default_rng(number)
        values = rng.standard_normal((16, 16), dtype=np.float32) / 4
        with soft_cupy.stream():
            for _ in range(25):
                x = value = soft_cupy.asarray(values)
                expected = values.astype(np.float64)
                for name in rng.choice(["one", "two", ""], 8):
                    value = lz.silu(value, backend=name or None) if name else lz.matmul(value, x)
                    expected = silu(expected) if name else expected @ values
                np.testing.assert_allclose(value.get(), expected, rtol=1e-3, atol=1e-5)

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(chain, number) for number in range(3)]:
            future.result(PATIENCE_S)
    x, _ = randn(16, 16)
    for name in ("one", "two"):
        settle(lambda: lz.silu(x, backend=name))  # noqa: B023


def test_what_is_on_a_ring_survives_its_worker(new_site: Callable[..., Site]) -> None:
    """With hundreds of calls under way: those that the GPU was not through with run elsewhere, in their order."""
    site = new_site()
    site.connect()
    x, values = randn(SLOW)
    settle(lambda: slow(x))
    y, others = randn(24)
    settle(lambda: lz.silu(y))
    with held(site):
        first = slow(x)
        results = [lz.silu(y) for _ in range(200)]
        kill(site, "one")
    close(first, gelu(values))
    for result in results:
        close(result, silu(others))
    lz.synchronize(PATIENCE_S)
    close(lz.silu(y), silu(others))


def test_the_report_tells_where_a_call_of_a_ring_ran_in_the_end(new_site: Callable[..., Site]) -> None:
    """With the attempt that its first worker did not live to finish."""
    site = new_site(backoff_s=600, backoff_max_s=600)
    site.connect()
    x, values = randn(SLOW)
    with on_a_ring(site, lambda: slow(x)) as result:
        kill(site, "one")
    close(result, gelu(values))
    lz.synchronize(PATIENCE_S)
    told = report()
    assert (told.backend, [attempt.outcome for attempt in told.attempts]) == ("two", ["BACKEND_ERROR", None])


def test_a_call_of_a_ring_that_nobody_can_finish_is_raised_later(new_site: Callable[..., Site]) -> None:
    """Its stream goes on meanwhile."""
    site = new_site("one", backoff_s=600, backoff_max_s=600)
    site.connect()
    x, _ = randn(SLOW)
    settle(lambda: slow(x, backend="one"))
    with held(site):
        slow(x, backend="one")
        kill(site, "one")
    finish()
    with pytest.raises(lz.BackendError, match="an earlier call on the GPU, gelu, failed"):
        lz.synchronize(PATIENCE_S)


def test_a_call_of_a_ring_goes_back_to_the_only_backend(new_site: Callable[..., Site]) -> None:
    """Its worker was killed: that is not its caller's error. The restarted one takes the call from the broker."""
    site = new_site("one")
    site.connect()
    x, values = randn(SLOW)
    with on_a_ring(site, lambda: slow(x)) as result:
        kill(site, "one")
    close(result, gelu(values))
    lz.synchronize(PATIENCE_S)
    assert (report().backend, report().worker_pid) == ("one", site.backend("one")["pid"])
    assert site.backend("one")["restarts"] == 1


def test_a_full_ring_makes_its_caller_wait(connected: Site) -> None:
    """More calls than a ring has room for, behind one that takes its time."""
    x, _ = randn(SLOW)
    waste = soft_cupy.empty(SLOW)
    settle(lambda: slow(x, out=waste))
    y, others = randn(8)
    outs = known_outs(y, 4)
    for out in outs:
        with soft_cupy.stream():
            slow(x, out=waste)
            for _ in range(230):
                lz.silu(y, out=out)
            assert report().path == "express"
    lz.synchronize(PATIENCE_S)
    for result in outs:
        close(result, silu(others))


def test_a_sleeping_worker_wakes_for_each_call(connected: Site) -> None:
    """Calls far apart find it asleep; none is lost."""
    x, values = randn(12)
    settle(lambda: lz.silu(x))
    paths = set()
    for _ in range(40):
        close(lz.silu(x), silu(values))
        paths.add(report().path)  # one that is late on a busy machine is the broker's
        lz.status()  # takes longer than a worker looks
    assert "express" in paths


UNRUNG = """
from tests.soft_gpu import soft_cupy
soft_cupy.install()
import layerzero as lz
from layerzero.client.gpu import fastpath_library
from layerzero.ipc.shm import lane
from tests.process.harness import wait_until
fastpath_library.repeats = None
lz.connect()
x = soft_cupy.empty(64)
def is_settled():
    lz.silu(x)
    return lz.last_report().path == "express"
wait_until(is_settled)
lz.synchronize()
(ring,) = lz.session().gpus._lanes.values()
wait_until(lambda: ring._ring.is_asleep)
lane.ring = lambda doorbell: print("put", flush=True) or wait_until(lambda: False)
lz.silu(x)
"""


def test_a_call_whose_client_died_before_it_rang_is_served(connected: Site) -> None:
    """The worker sleeps; it must be woken, or the call would stay on the ring, and the ring with the worker."""
    x, values = randn(64)
    close(lz.silu(x), silu(values))
    (pid,) = connected.wait_ready("one")

    def rings() -> int:
        count = 0
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                count += os.readlink(fd).startswith("/memfd:lz-ring")
        return count

    before = rings()
    with connected.python(UNRUNG) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "put\n"
        assert rings() == before + 1
        other.kill()
    wait_until(lambda: rings() == before)
    close(lz.silu(x), silu(values))
    assert connected.wait_ready("one") == [pid]


def test_policy_takes_a_ring_back(connected: Site) -> None:
    """The next call is decided anew."""
    x, values = randn(20)
    settle(lambda: lz.silu(x))
    with lz.avoid("one"):
        close(lz.silu(x), silu(values))
        assert report().backend == "two"
    lz.silu(x)
    assert report().backend == "one"


def test_express_lanes_can_be_turned_off(new_site: Callable[..., Site]) -> None:
    """All calls go through the broker then."""
    site = new_site(express=False)
    site.connect()
    x, values = randn(20)
    for _ in range(2 * MANY):
        result = lz.silu(x)
        lz.status()
    close(result, silu(values))
    assert report().path == "broker"


def test_a_trace_has_calls_on_a_gpu_with_its_times(connected: Site) -> None:
    """By whichever way they go; which call feeds which is told by memory that is still its result."""
    x, values = randn(32, 48)
    settle(lambda: lz.silu(x))
    with lz.trace() as trace:
        y = lz.silu(x)
        z = lz.silu(y)
        del y
        out = soft_cupy.empty(x.shape)
        lz.silu(z, out=out)
        lz.silu(out)
    lz.synchronize(PATIENCE_S)
    close(z, silu(silu(values)))
    calls = trace.calls
    assert [(call.device, call.backend) for call in calls] == [("cuda:0", "one")] * 4
    assert [[(one.input, one.call) for one in call.sources] for call in calls] == [
        [],
        [("x", 0)],
        [("x", 1)],
        [("x", 2)],
    ]
    spans = [call.gpu_ns for call in calls]
    assert None not in spans
    for call, (start_ns, took_ns) in zip(calls, spans, strict=True):  # type: ignore[misc]
        assert took_ns > 0
        assert call.start_ns - 5_000_000 < start_ns
