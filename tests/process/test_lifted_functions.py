"""Calls of functions that this process launches itself, over the GPU of threads: a function's worker hands its kernels
over, a process of its own proves them. tests/gpu/test_lifted_functions.py does the same on a real one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process import lifted_functions as fn
from tests.process.gpu_site import close, finish, gelu, randn, silu
from tests.process.harness import Site, wait_ended, wait_until
from tests.process.lifted_function_site import kernels, lift, path_of, refused, rows, site, soft, way
from tests.process.test_cli import lz as lz_command
from tests.process.test_counters import counts, grown
from tests.soft_gpu import soft_cupy

import layerzero as lz
from layerzero.client.gpu.lifting import lifts as client_lifts

__all__ = ["kernels", "site", "soft", "way"]


def test_a_function_is_launched_by_this_process(way: None, site: Site) -> None:
    """Of one kernel or of several, with memory that it allocates, into memory that it is given, of any strides."""
    (x, a), (y, b) = randn(16, 24), randn(24, 8)
    calls: dict[str, tuple[Callable[[], Any], Any, np.ndarray]] = {
        "one kernel": (lambda: lift(fn.silu, x), fn.silu, silu(a)),
        "several": (lambda: lift(fn.silu, x, "ab"), fn.silu, silu(silu(silu(a)))),
        "of a view": (lambda: lift(fn.silu, x[3:7, ::2]), fn.silu, silu(a[3:7, ::2])),
        "with scratch": (lambda: lift(fn.gelu, x), fn.gelu, gelu(a)),
        "two arrays": (lambda: lift(fn.product, x, y), fn.product, a @ b),
        "by name": (lambda: lift(fn.product, x, y=y), fn.product, a @ b),
        "into": (lambda: lift(fn.into, x), fn.into, silu(a)),
    }
    for name, (call, function, right) in calls.items():
        close(call(), right)
        report = function.last_report()
        assert (report.served_by, report.attempts, report.copies, report.not_lifted) == (fn.THERE.backend, 1, (), ""), (
            name
        )
        assert (report.selection.worker_pid, report.selection.op) == (0, "function")
        assert "lifted: " in str(report.selection), name
    assert {row[1:] for row in rows()} == {("lifted", "")}
    for number in range(4):
        x.fill(number)
        close(fn.silu(x), silu(np.full((16, 24), number)))
        assert path_of(fn.silu) == "lifted"


def test_its_shape_function_is_called_once_for_each_call(way: None, site: Site) -> None:
    """Whichever way the call goes: it may take as long as a launch."""
    (x, _), asked, ways = randn(16, 24), list[Any](), set[str]()

    def like(x: Any, what: str = "") -> Any:
        asked.append(x)
        return x.shape, x.dtype

    for function, end in ((fn.silu, "lifted"), (fn.counted, "NOT_DETERMINISTIC: ")):
        one, named = function.options(shapes=like), {} if end == "lifted" else {"x": x}

        def has_ended(one: Any = one, end: str = end, named: Any = named) -> bool:
            asked.clear()
            one(**named) if named else one(x)
            ways.add(path_of(one))
            assert len(asked) == 1, path_of(one)
            return path_of(one) == end or one.last_report().not_lifted.startswith(end)

        wait_until(has_ended)
    assert ways == {"broker", "express", "lifted"}


def test_its_worker_has_no_part_in_it(way: None, site: Site) -> None:
    """It may be stopped; and a submitted call is there at once."""
    x, values = randn(16, 24)
    lift(fn.silu, x)
    pid = fn.prepare()
    os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(3):
            close(fn.silu(x), silu(values))
            sent = fn.silu.submit(x)
            assert sent.done()
            close(sent.result(), silu(values))
            assert sent.report is not None
            assert sent.report.selection.path == "lifted"
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_graph_of_the_application_holds_it(way: None, site: Site) -> None:
    """As kernel nodes: a replay needs no worker."""
    with soft_cupy.stream():
        x, values = randn(23, 5)
        lift(fn.gelu, x)
        os.kill(fn.prepare(), signal.SIGKILL)
        stream = soft_cupy.current()
        stream.begin_capture()
        result = fn.gelu(x)
        graph = stream.end_capture()
        for factor in (2.0, 0.5):
            x.scale(factor)
            values = values * np.float32(factor)
            graph.launch()
            finish()
            close(result, gelu(values))


def test_indices_are_tried_with_values_that_lead_somewhere(site: Site) -> None:
    """Those that `trial` names; without it such a function stays where it is, and its worker is well."""
    table, values = randn(5, 4)
    index = soft_cupy.asarray(np.array([4, 0, 3], np.int64))
    pid = fn.prepare()
    np.testing.assert_array_equal(lift(fn.taken, table, index).get(), values[[4, 0, 3]])
    told = refused(fn.taken_untried, table, index)
    assert told == "ARRAYS_UNSUPPORTED: index: an array of integers is tried with values that trial= names"
    assert fn.prepare() == pid


def test_arguments_may_share_memory(way: None, site: Site) -> None:
    """One array twice, and views of one: no kernel writes there."""
    (x, a), (y, b) = randn(16, 16), randn(16, 16)
    close(lift(fn.product, x, y), a @ b)
    for one, other, right in ((x, x, a @ a), (x, y, a @ b), (y, y, b @ b), (x[:8], x, a[:8] @ a)):
        close(lift(fn.product, one, other), right)
        assert path_of(fn.product) == "lifted"


def test_what_a_connection_has_forgotten_is_lifted_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows so many kinds of calls; those of functions are asked for once in an epoch."""
    monkeypatch.setattr(client_lifts, "MAX_KNOWN", 2)
    arrays = [randn(size) for size in (8, 9, 10)]
    for _ in range(2):
        for x, values in arrays:
            close(lift(fn.silu, x), silu(values))


def test_calls_of_several_shapes_are_lifted_in_turns(site: Site) -> None:
    arrays = [randn(size) for size in (8, 9, 10)]
    seen: set[int] = set()

    def are_lifted() -> bool:
        for x, values in arrays:
            close(fn.silu(x), silu(values))
            if path_of(fn.silu) == "lifted":
                seen.add(x.size)
        return len(seen) == len(arrays)

    wait_until(are_lifted)


def test_calls_of_several_alignments_are_each_asked_for(site: Site) -> None:
    """Arrays that are alike but for where they begin have programs of their own."""
    base, values = randn(17, 24)
    close(lift(fn.silu, base[:16]), silu(values[:16]))
    close(lift(fn.silu, base[1:]), silu(values[1:]))


def test_each_is_counted_as_a_call_of_a_function(site: Site) -> None:
    x, _ = randn(16, 24)
    lift(fn.silu, x)
    before = counts()
    for _ in range(20):
        fn.silu(x)
    assert grown(before, counts()) == {("function", fn.THERE.backend, "lifted"): 20}


def test_what_it_prints_while_it_is_tried_is_nobodys(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    """And it prints nothing once it is lifted, as it is not called."""
    x, values = randn(16, 24)
    calls = 0

    def is_lifted() -> bool:
        nonlocal calls
        close(fn.speaks(x, "word"), silu(values))
        calls += path_of(fn.speaks) != "lifted"
        return path_of(fn.speaks) == "lifted"

    wait_until(is_lifted)
    assert capfd.readouterr().out.count("word") == calls


def test_it_ends_with_the_process_that_it_comes_from(site: Site, tmp_path: Path) -> None:
    """Another one may have other modules: it is lifted from that anew."""
    (x, values), path = randn(16, 24), tmp_path / "version"
    path.write_text("")
    close(lift(fn.versioned, x, str(path)), silu(values))
    path.write_text("a")
    assert lz_command(site, "restart", fn.THERE.backend).returncode == 0
    fn.prepare()
    wait_until(lambda: fn.versioned(x, str(path)) is not None and path_of(fn.versioned) != "lifted")
    close(lift(fn.versioned, x, str(path)), silu(silu(values)))


def test_what_keeps_it_is_of_this_threads_call(site: Site) -> None:
    x, _ = randn(16, 24)
    assert refused(fn.counted, x).startswith("NOT_DETERMINISTIC")
    other = threading.Thread(target=fn.counted, args=(randn(5)[0],))
    other.start()
    other.join()
    assert fn.counted.last_report().not_lifted.startswith("NOT_DETERMINISTIC")


def test_what_keeps_it_is_of_this_session(site: Site) -> None:
    """And not what an earlier one was told."""
    x, _ = randn(16, 24)
    assert refused(fn.counted, x).startswith("NOT_DETERMINISTIC")
    lz.disconnect()
    site.connect()
    fn.counted(x)
    assert fn.counted.last_report().not_lifted.startswith("NOT_YET: ")


def test_the_broker_may_die(site: Site) -> None:
    x, values = randn(16, 24)
    lift(fn.silu, x)
    pid = site.broker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_ended(pid)
    for _ in range(3):
        close(fn.silu(x), silu(values))
        assert path_of(fn.silu) == "lifted"
    with pytest.raises(lz.BrokerLost):
        fn.silu(randn(33)[0])
    site.connect()
    fn.prepare()
    close(lift(fn.silu, x), silu(values))


def test_the_session_may_be_closed_beside_its_calls(way: None, site: Site) -> None:
    """Those that are under way give their result, or say that there is no session."""
    x, values = randn(16, 24)
    lift(fn.silu, x)
    is_over, others = threading.Event(), list[BaseException]()

    def call() -> None:
        while not is_over.is_set():
            try:
                close(fn.silu(x), silu(values))
            except (lz.BrokerLost, lz.NotConnected, lz.Cancelled):
                pass
            except BaseException as exc:
                others.append(exc)
                return

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        lz.disconnect()
        site.connect()
        wait_until(lambda: others or (fn.silu(x) is not None and path_of(fn.silu) == "lifted"))
    is_over.set()
    for thread in threads:
        thread.join()
    assert others == []


def test_policy_keeps_it_in_its_worker(site: Site) -> None:
    x, values = randn(16, 24)
    lz.configure(backend_isolation="subprocess")
    try:
        told = refused(fn.silu, x)
    finally:
        lz.configure(backend_isolation=None)
    assert told.startswith("NOT_ALLOWED: policy: backend_isolation is subprocess for ")
    wait_until(lambda: fn.silu(x) is not None and path_of(fn.silu) == "lifted")
    close(fn.silu(x), silu(values))


def test_plans_do_not_record_it(site: Site) -> None:
    """As others: its result would be taken for a constant."""
    x, _ = randn(16, 24)
    lift(fn.silu, x)
    with pytest.raises(lz.InvalidArgument, match="call it outside of the plan"):
        lz.plan(lambda given: (fn.silu(x), given))(x)
