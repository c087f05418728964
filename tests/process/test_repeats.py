"""Calls on the CPU that are made again (client/session/_repeats.c): whatever differs from the call before is seen."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.backends.toy import HANG, KILL, fault
from tests.process.harness import Site, wait_until

import layerzero as lz
from layerzero.client.connection import arena
from layerzero.client.connection.arena import pool
from layerzero.client.session import repeats
from layerzero.ipc import spinning

pytestmark = pytest.mark.skipif(repeats.library is None, reason="not compiled")
X = np.linspace(-3, 3, 8, dtype=np.float32)


class Mine(np.ndarray):
    pass


def silu(x: np.ndarray) -> np.ndarray:
    wide = np.asarray(x, np.float64)
    return wide / (1 + np.exp(-wide))


def known() -> int:
    """How many calls are known."""
    return len(lz.session().repeats._known)


def settle(x: np.ndarray = X, **kwargs: object) -> lz.SelectionReport:
    """Call until the call is known."""

    def report() -> lz.SelectionReport | None:
        np.testing.assert_allclose(lz.silu(x, **kwargs), silu(x), rtol=1e-6)  # type: ignore[arg-type]
        return lz.last_report() if lz.last_report().path == "express" else None  # type: ignore[union-attr]

    for _ in range(3):
        found = wait_until(report)
    return found


@pytest.fixture
def connected(connected: Site) -> Site:
    connected.wait_ready("alpha", "beta")
    return connected


def kinds() -> dict[str, np.ndarray]:
    """Arrays that differ in one thing from each other, each with numbers of its own."""
    rng = np.random.default_rng(0)

    def numbers(*shape: int, dtype: type = np.float32) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    read_only = numbers(8)
    read_only.flags.writeable = False
    odd = np.frombuffer(b"\0" + numbers(8).tobytes(), np.uint8)[1:].view(np.float32)
    shared, wide = lz.share(numbers(8)), lz.share(numbers(16))
    return {
        "plain": numbers(8),
        "two dimensions": numbers(2, 4),
        "other order": np.asfortranarray(numbers(2, 4)),
        "wider": numbers(8, dtype=np.float64),
        "strided": numbers(16)[::2],
        "backwards": numbers(8)[::-1],
        "read-only": read_only,
        "misaligned": odd,
        "of a subclass": numbers(8).view(Mine),
        "no dimensions": numbers(),
        "empty": numbers(0),
        "in an arena": shared,
        "strided in an arena": wide[::2],
        "behind others": numbers(9)[1:],
        "broadcast": np.broadcast_to(numbers(1), (8,)),
        "of 78 KiB": numbers(20_000),
        "of 2.3 MiB": numbers(600, 1000),
        "of two and more MiB, strided": numbers(600, 2000)[:, ::2],
    }


def test_calls_in_any_order_give_their_own_results(connected: Site) -> None:
    """What is known of one call must not serve another: each has its numbers and its report."""
    arrays, order = kinds(), random.Random(0)
    settle()
    first: dict[str, object] = {}
    for n in range(40 * len(arrays)):
        name = order.choice(list(arrays))
        result = lz.silu(arrays[name])
        np.testing.assert_allclose(result, silu(arrays[name]), rtol=1e-6, err_msg=f"call {n}: {name}")
        assert type(result) is np.ndarray
        assert (result.shape, result.dtype) == (arrays[name].shape, arrays[name].dtype), name
        report = lz.last_report()
        assert report is not None
        taken = [(c.arg, c.nbytes) for c in (*report.copies, *report.kept)]
        told = (report.op, report.backend, report.kernel_id, taken)
        assert told == first.setdefault(name, told), name
    assert known() >= 5


def test_errors_of_arguments_are_those_of_a_first_call(connected: Site) -> None:
    """Each of these looks like a call that is known, but for one thing."""
    settle()
    swapped = X.astype(X.dtype.newbyteorder())
    frozen = np.zeros(8, np.float32)
    frozen.flags.writeable = False
    for args, kwargs in (
        ((swapped,), {}),
        ((X.astype(np.complex64),), {}),
        ((X,), {"out": frozen}),
        ((X,), {"out": np.zeros(9, np.float32)}),
        ((X,), {"backend": 7}),
        ((X,), {"timeout_s": -1}),
        ((np.ma.masked_array(X),), {}),
        ((None,), {}),
    ):
        with pytest.raises(lz.InvalidArgument):
            lz.silu(*args, **kwargs)  # type: ignore[arg-type]
    settle()


def test_out_that_overlaps_the_input_is_seen_at_each_call(connected: Site) -> None:
    """The same shapes, and memory that lies otherwise."""
    base = lz.empty(16)
    apart, near = (base[:8], base[8:]), (base[:8], base[4:12])
    for x, out in (apart, near, apart, near, apart, apart, near):
        for _ in range(4):
            base[:] = np.linspace(-2, 2, 16)
            wanted = silu(x)
            assert lz.silu(x, out=out) is out
            np.testing.assert_allclose(out, wanted, rtol=1e-6)


def test_results_are_the_callers_own(connected: Site) -> None:
    """Memory of results is used again only when nobody has it."""
    settle()
    kept = []
    for n in range(100):
        x = np.full(8, n, np.float32)
        result = lz.silu(x)
        result += 1
        kept.append((result[2:4], n))  # a view keeps it
    gc.collect()
    for view, n in kept:
        np.testing.assert_allclose(view, silu(np.full(2, n, np.float32)) + 1, rtol=1e-6)
    before = pool.stats()["slots"]
    del kept, view, result
    gc.collect()
    assert pool.stats()["slots"] == before - 100


def test_many_calls_take_no_more_memory(connected: Site) -> None:
    settle()
    slots, count = pool.stats()["slots"], len(gc.get_objects())
    for _ in range(20_000):
        lz.silu(X)
    assert pool.stats()["slots"] == slots
    assert len(gc.get_objects()) < count + 200
    assert known() < 20


def test_inputs_of_some_mebibytes_are_copied_on_the_compiled_path(connected: Site) -> None:
    """Of more than 8 MiB a copy may serve again, else they go the longer way."""
    for count, nbytes in enumerate((8 << 20, (8 << 20) + 64), 1):
        x = np.zeros((nbytes // 4,), np.float32)
        settle(x)
        assert known() == count
        report = lz.last_report()
        assert report is not None
        assert [(c.arg, c.nbytes) for c in (*report.copies, *report.kept)] == [("x", nbytes)]


def test_what_changes_while_inputs_are_copied_is_seen(connected: Site) -> None:
    """Others run meanwhile: here they call, too, and change the policy. Who is left out serves nobody."""
    arrays = [np.random.default_rng(n).standard_normal(300_000).astype(np.float32) for n in range(3)]
    wanted, over = [silu(x) for x in arrays], threading.Event()
    settle(arrays[0])

    def repeat(n: int) -> int:
        count = 0
        while not over.is_set() or count < 30:
            np.testing.assert_allclose(lz.silu(arrays[n]), wanted[n], rtol=1e-6)
            count += 1
        return count

    with ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(repeat, n) for n in range(3)]
        try:
            for n in range(20):
                name = ("alpha", "beta")[n % 2]
                lz.configure(locks={"silu": f"{name}.silu"})
                lz.silu(arrays[0])
                assert lz.last_report().backend == name  # type: ignore[union-attr]
        finally:
            over.set()
            lz.configure(locks=None)
        assert all(future.result() >= 30 for future in futures)


def test_policy_that_changes_as_a_call_ends_is_not_taken_for_the_calls(
    connected: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another thread does there: the call's kernel was chosen by the policy of before."""
    table = lz.session().repeats
    remember = table.remember

    def change_first(*args: Any) -> None:
        lz.configure(locks={"silu": "beta.silu"})
        remember(*args)

    try:
        lz.configure(locks={"silu": "alpha.silu"})
        settle()
        table.forget()
        monkeypatch.setattr(table, "remember", change_first)
        lz.silu(X)
        assert lz.last_report().backend == "alpha"  # type: ignore[union-attr]
        monkeypatch.undo()
        for _ in range(3):
            lz.silu(X)
            assert lz.last_report().backend == "beta"  # type: ignore[union-attr]
    finally:
        lz.configure(locks=None)


def test_arenas_that_have_closed_are_not_kept(connected: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until another call, which may never come. The broker has not heard of this one."""
    monkeypatch.setattr(arena, "MAX_IDLE_BYTES", 0)
    monkeypatch.setattr(arena, "KEPT_IDLE_BYTES", 0)
    monkeypatch.setattr(pool, "_bound_bytes", 0)
    x = lz.empty(1 << 23)
    found = pool.find(x.ctypes.data, x.nbytes)
    assert found is not None
    its = weakref.ref(found[0])
    settle()
    del x, found
    pool.allocate(64)  # which closes those that nobody needs
    assert its() is None


def test_a_worker_that_dies_with_a_call_on_shared_memory_costs_one_attempt(connected: Site) -> None:
    """The broker hears on which lane it was: it is an attempt, and the report has it."""
    x, out = lz.share(X), lz.empty(8)
    settle(x, out=out)
    x[0] = fault(KILL, "alpha")
    lz.silu(x, out=out)
    report = lz.last_report()
    assert report is not None
    assert [(a.backend, a.outcome, a.exit_signal) for a in report.attempts] == [
        ("alpha", "BACKEND_ERROR", signal.SIGKILL),
        ("beta", None, None),
    ]
    np.testing.assert_allclose(out, silu(x), rtol=1e-6)


def test_the_brokers_own_deadline_holds(new_site: Callable[..., Site]) -> None:
    site = new_site(timeout_s=1.0)
    site.connect()
    site.wait_ready("alpha", "beta")
    settle()
    x = X.copy()
    x[0] = fault(HANG, "alpha")
    np.testing.assert_allclose(lz.silu(x), silu(x), rtol=1e-6)
    report = lz.last_report()
    assert report is not None
    assert [(a.backend, a.outcome) for a in report.attempts] == [("alpha", "DEADLINE"), ("beta", None)]


def test_a_policy_of_the_moment_and_a_change_of_it_are_seen(connected: Site) -> None:
    settle()
    with lz.prefer("beta"):
        lz.silu(X)
        assert lz.last_report().backend == "beta"  # type: ignore[union-attr]
        settle()
        assert lz.last_report().backend == "beta"  # type: ignore[union-attr]
    lz.silu(X)
    assert lz.last_report().backend == "alpha"  # type: ignore[union-attr]


def test_a_forked_child_has_calls_of_its_own(connected: Site) -> None:
    """It must neither ring the parent's worker on the parent's lane, nor give the parent's memory away."""
    settle()
    kept = lz.silu(X)
    child = os.fork()
    if child == 0:
        try:
            for _ in range(20):
                np.testing.assert_allclose(lz.silu(X + 1), silu(X + 1), rtol=1e-6)
        except BaseException:
            os._exit(1)
        os._exit(0)
    for _ in range(20):
        np.testing.assert_allclose(lz.silu(X), silu(X), rtol=1e-6)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    np.testing.assert_allclose(kept, silu(X), rtol=1e-6)


def test_without_spinning_calls_go_the_same_way(new_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERZERO_SPIN_US", "0")
    site = new_site()
    site.connect()
    site.wait_ready("alpha", "beta")
    settle()
    assert known()


def test_no_python_runs_between_a_call_and_its_wait(
    no_leaks: None, broker: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's handler could run there, and what it raised would be lost: what is compiled asks for itself whether
    cores are free."""
    asked: list[spinning.Cores] = []
    monkeypatch.setattr(spinning.Cores, "are_free", asked.append)
    broker.connect().ask("reset")
    settle()
    for _ in range(100):
        lz.silu(X)
    assert asked == []
    lz.disconnect()
