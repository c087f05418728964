"""Calls of functions on a ring that do not just return: deaths, deadlines, forks, interrupts and closed sessions."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.process import gpu_functions as fn
from tests.process.gpu_express_site import check, own, path_of, settled, site, store, there
from tests.process.gpu_site import finish, randn, soft
from tests.process.harness import PATIENCE_S, Site, is_paused, wait_until
from tests.process.test_express import forked
from tests.soft_gpu import soft_cupy

import layerzero as lz
from layerzero.functions.gpu_express import GpuExpressCall

__all__ = ["own", "site", "soft", "store", "there"]


def test_who_asks_whether_a_call_is_done_hears_of_a_death(own: Site) -> None:
    """Nobody waits for it."""
    x, _ = randn(4)
    pid = settled(x)
    sent = fn.act.submit(x, "pause", 1.0)
    assert isinstance(sent._call, GpuExpressCall)
    wait_until(lambda: is_paused(pid))
    assert not sent.done()
    os.kill(pid, signal.SIGKILL)
    wait_until(sent.done)
    with pytest.raises(lz.BackendError):
        sent.result()


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_death_is_of_one_call(own: Site, tmp_path: Path, *, is_sent: bool) -> None:
    """One that is idempotent is made once more, a fallback has the arguments, and the caller's stream goes on."""
    x, values = randn(4)
    again = fn.act.options(idempotent=True)
    safe = fn.act.options(fallback=lambda x, *_: x * 5.0)
    for function in (again, safe, fn.act):
        pid = settled(x, function=function)
    call = (lambda f, *a: f.submit(*a).result()) if is_sent else (lambda f, *a: f(*a))
    finish()
    with pytest.raises(lz.BackendError, match="it may have run in part: idempotent=True"):
        call(fn.act, x, "die")
    finish()
    fn.prepare()
    check(call(fn.act, x), values * 2)
    assert fn.act.last_report().selection.worker_pid != pid
    settled(x, function=safe)
    finish()
    check(call(safe, x, "die", 7), values * 5)
    fn.prepare()
    settled(x, function=again)
    finish()
    with pytest.raises(lz.NoTransport):  # a new worker of the tests has no GPU before it was prepared
        call(again, x, "die once", str(tmp_path / "died"))
    assert "BACKEND_ERROR" in again.last_report().failures[0]


def test_a_worker_that_dies_after_its_answer_is_told_of_by_the_next_call(own: Site, tmp_path: Path) -> None:
    """What the function had enqueued is not run again: its client has read the answer."""
    gate = tmp_path / "gate"
    x, values = randn(4)
    pid = settled(x, str(gate), function=fn.leave_later)
    finish()
    gate.touch()
    result = fn.leave_later(x, str(gate))
    assert path_of(fn.leave_later.last_report()) == "express"
    os.kill(pid, signal.SIGKILL)
    del result
    finish()
    wait_until(lambda: fn.prepare() != pid)
    with pytest.raises(lz.LayerZeroError, match="an earlier call on the GPU, function, failed"):
        wait_until(lambda: fn.act(x) is None)
    check(fn.act(x), values * 2)


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_deadline_is_of_the_call_that_took_too_long(own: Site, *, is_sent: bool) -> None:
    """Kept by who waits for it; its worker is killed."""
    x, values = randn(4)
    quick = fn.act.options(timeout_s=0.5)
    settled(x, "hang" * 0, 2.0, function=quick)
    pid = settled(x, function=quick)
    start_s = time.monotonic()
    with pytest.raises(lz.DeadlineExceeded, match=r"longer than|took|0\.5"):
        quick.submit(x, "hang").result() if is_sent else quick(x, "hang")
    assert time.monotonic() - start_s < 0.9 * PATIENCE_S
    finish()
    wait_until(lambda: fn.prepare() != pid)
    check(quick(x), values * 2)


def test_a_deadline_that_nobody_waits_for_is_kept_by_the_broker(own: Site) -> None:
    """It reads it off the ring."""
    x, values = randn(4)
    quick = fn.act.options(timeout_s=0.5)
    pid = settled(x, function=quick)
    finish()
    hanging = quick.submit(x, "hang")
    wait_until(lambda: own.backend(fn.THERE.backend)["pid"] != pid)
    with pytest.raises(lz.DeadlineExceeded):
        hanging.result()
    fn.prepare()
    check(quick(x), values * 2)


def test_a_forked_child_does_not_wait_for_its_parents_calls(there: int) -> None:
    x, values = randn(4)
    pid = settled(x)
    first, second = fn.act.submit(x, "pause", 1.0), fn.act.submit(x)
    wait_until(lambda: is_paused(pid))

    def ask() -> str:
        with pytest.raises(lz.BrokerLost) as refusal:
            second.result()
        return refusal.value.message

    assert forked(ask)().endswith("its answer goes to the parent; call again here")
    os.kill(pid, signal.SIGCONT)
    check(first.result(), values)
    check(second.result(), values * 2)


def test_an_interrupt_keeps_what_was_lent(there: int) -> None:
    """The worker may write to it until it is done; later calls have theirs."""
    x, values = randn(4)
    pid = settled(x)
    settled(x, "pause" * 0, 3.0)

    def interrupt() -> None:
        wait_until(lambda: is_paused(pid))
        signal.raise_signal(signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        fn.act(x, "pause", 1.0)
    helper.join(PATIENCE_S)
    gc.collect()  # what was lent is not given to anybody else
    os.kill(pid, signal.SIGCONT)
    for number in range(10):
        check(fn.act(x, "", float(number)), values * number)


def test_closing_the_session_cancels_calls_that_have_not_ended(site: Site, there: int) -> None:
    x, values = randn(4)
    pid = settled(x)
    futures = [fn.act.submit(x, "pause", 1.0), fn.act.submit(x)]
    wait_until(lambda: is_paused(pid))
    closing = threading.Thread(target=lz.disconnect)
    closing.start()
    os.kill(pid, signal.SIGCONT)
    closing.join(PATIENCE_S)
    for future in futures:
        with contextlib.suppress(lz.Cancelled, lz.NotConnected):
            future.result(timeout=30)
    site.connect()
    fn.prepare()
    check(fn.act(x), values * 2)


@pytest.mark.parametrize(("long_s", "short_s", "timeout_s"), [(1.5, 0.7, 1.2), (2.5, 0.05, 0.5)])
def test_waiting_for_the_worker_does_not_count(
    own: Site, tmp_path: Path, long_s: float, short_s: float, timeout_s: float
) -> None:
    """A call that another one of its worker is before has its whole time from when it is begun."""
    x, values = randn(4)
    log, other = tmp_path / "log", tmp_path / "other"
    quick = fn.act.options(timeout_s=timeout_s)
    found: list[Any] = []
    is_settled = threading.Event()

    def run_long() -> None:
        with soft_cupy.stream():
            settled(x, "note", f"{other} 0")
            is_settled.set()
            try:
                found.append(fn.act(x, "note", f"{log} {long_s}"))
            except lz.LayerZeroError as exc:
                found.append(exc)
            found.append(path_of(fn.act.last_report()))

    log.touch()
    with soft_cupy.stream():
        settled(x, "note", f"{other} 0", function=quick)
        first = threading.Thread(target=run_long)
        first.start()
        assert is_settled.wait(PATIENCE_S)
        wait_until(lambda: log.read_text() == "run\n")
        check(quick(x, "note", f"{other} {short_s}"), values * 2)
        assert path_of(quick.last_report()) == "express"
    first.join(PATIENCE_S)
    check(found[0], values * 2)
    assert (found[1], log.read_text()) == ("express", "run\n")


def test_who_is_not_to_blame_does_not_run_twice(own: Site, tmp_path: Path) -> None:
    """An earlier call hangs on the GPU beyond its time, while a function runs: that ends in an error, and one that is
    idempotent is made again."""
    gate, log = tmp_path / "gate", tmp_path / "log"
    x, values = randn(4)
    hangs = fn.leave_later.options(timeout_s=0.5)
    settled(x, str(gate), function=hangs)
    settled(x, "note", f"{log} 0")
    before = log.read_text().count("run")
    finish()
    gate.touch()
    result = hangs(x, str(gate))
    assert path_of(hangs.last_report()) == "express"
    with soft_cupy.stream():
        y = soft_cupy.asarray(values)
        with pytest.raises(lz.BackendError, match="it may have run in part: idempotent=True"):
            fn.act(y, "note", f"{log} 20")
    gate.unlink()
    del result
    assert log.read_text().count("run") == before + 1
