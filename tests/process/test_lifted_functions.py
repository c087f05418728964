"""Calls of functions that this process launches itself, over the GPU of threads: a function's worker hands its kernels
over, a process of its own proves them. tests/gpu/test_lifted_functions.py does the same on a real one."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process import forks
from tests.process import lifted_functions as fn
from tests.process.gpu_site import SOFT, close, finish, gelu, randn, silu, soft
from tests.process.harness import Site, wait_ended, wait_until
from tests.process.lifted_site import kernels, rows
from tests.process.test_cli import lz as lz_command
from tests.process.test_counters import counts, grown
from tests.soft_gpu import soft_cupy

import layerzero as lz
from layerzero.client.gpu.lifting import lifted_library
from layerzero.client.gpu.lifting import lifts as client_lifts

__all__ = ["kernels", "soft"]


@pytest.fixture
def site(kernels: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A broker with the GPU, whose worker has machine code that can be seen."""
    forks.start_server()
    store = tmp_path_factory.getbasetemp() / "store of lifted functions"
    one = Site(store, restart_budget=100, backoff_s=0.01, backoff_max_s=0.01)
    one.environ |= {"LAYERZERO_WORKER_CONFINED": "0", "PYTHONPATH": str(SOFT / "broker")}
    one.environ["LAYERZERO_CUPTI"] = "/no/libcupti.so"
    with one.environment():
        fn.THERE.build(quiet=True)
        one.start().connect()
        fn.prepare()
        yield one
        lz.disconnect()
    one.stop()


@pytest.fixture(params=["compiled", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of launching: by what is compiled, and by the Python."""
    if request.param == "python":
        monkeypatch.setattr(lifted_library, "lifted", None)
    elif lifted_library.lifted is None:
        pytest.skip(lifted_library.why_not)


def path_of(function: Any) -> str:
    return str(function.last_report().selection.path)


def lift(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call it until this process launches its kernels; the result of that."""
    result = None

    def is_lifted() -> bool:
        nonlocal result
        result = function(*args, **kwargs)
        told = function.last_report().not_lifted
        assert told.startswith("NOT_YET: ") or not told, told
        return path_of(function) == "lifted"

    wait_until(is_lifted)
    return result


def refused(function: Any, *args: Any) -> str:
    """Call it until its report says why it stays in its worker; that."""
    told = ""

    def is_told() -> bool:
        nonlocal told
        function(*args)
        assert path_of(function) != "lifted"
        told = function.last_report().not_lifted
        return not told.startswith("NOT_YET")

    wait_until(is_told)
    return told


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


@pytest.mark.parametrize(
    ("function", "reason", "detail"),
    [
        (fn.branching, "NOT_CAPTURABLE", "cuStreamQuery"),
        (fn.counted, "NOT_DETERMINISTIC", "two runs on the same inputs"),
        (fn.summed, "NOT_DETERMINISTIC", "two runs on the same inputs"),
        (fn.weighted, "PROOF_DIFFERS", "out is not what the library gave"),
        (fn.on_host, "NODE_UNSUPPORTED", "a function on the host"),
        (fn.otherwise, "NOT_CAPTURABLE", "allowed: one array on the GPU, which is what shapes= tells"),
        (fn.slow, "TOO_SLOW", "allowed: 1, as others' calls wait meanwhile"),
        (fn.exits, "NOT_CAPTURABLE", "SystemExit"),
    ],
)
def test_a_function_that_must_not_be_lifted_stays_in_its_worker(
    site: Site, function: Any, reason: str, detail: str
) -> None:
    """And says why, in the words that kernels have. Its calls go on, and so do those of others, which are lifted."""
    x, values = randn(16, 24)
    pid = fn.prepare()
    told = refused(function, x)
    assert told.startswith(f"{reason}: ")
    assert detail in told
    assert [row[1:] for row in rows()] == [("refused", reason)]
    close(lift(fn.silu, x), silu(values))
    assert fn.prepare() == pid


def test_several_results_and_functions_that_nobody_wants_lifted_stay(site: Site) -> None:
    x, values = randn(16, 24)
    assert refused(fn.two, x) == "ARRAYS_UNSUPPORTED: 2 results; allowed: 1"
    for _ in range(20):
        close(fn.never(x), silu(values))
    assert (path_of(fn.never), fn.never.last_report().not_lifted) == ("express", "")
    assert rows() == []


def test_arguments_may_share_memory(way: None, site: Site) -> None:
    """One array twice, and views of one: no kernel writes there."""
    (x, a), (y, b) = randn(16, 16), randn(16, 16)
    close(lift(fn.product, x, y), a @ b)
    for one, other, right in ((x, x, a @ a), (x, y, a @ b), (y, y, b @ b), (x[:8], x, a[:8] @ a)):
        close(lift(fn.product, one, other), right)
        assert path_of(fn.product) == "lifted"


def test_calls_that_do_not_come_again_are_not_tried(site: Site) -> None:
    """Such as those with a count among their arguments: each trial runs the function ten times. Those that do, are."""
    x, values = randn(16, 24)
    for number in range(400):
        close(fn.numbered(x, number), silu(values))
        close(fn.numbered(x, -number), silu(values))
    assert path_of(fn.numbered) == "express"
    assert fn.numbered.last_report().not_lifted == "NOT_YET: calls like it come too rarely; needed: 3"
    assert rows() == []
    close(lift(fn.numbered, x, 7), silu(values))
    assert [row[1:] for row in rows()] == [("lifted", "")]


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


def test_one_whose_worker_ends_when_it_is_captured_is_tried_once(site: Site, tmp_path: Path) -> None:
    """Else it would end the next ones; and once more when somebody has restarted that."""
    (x, values), note = randn(16, 24), tmp_path / "note"
    told = ""

    def is_told() -> bool:
        nonlocal told
        with suppress(lz.LayerZeroError):  # until the worker that follows has the GPU
            fn.prepare()
            close(fn.leaves(x, str(note)), silu(values))
            told = fn.leaves.last_report().not_lifted
        return told.startswith(f"WORKER_FAILED: {fn.__name__}.leaves: its worker ended")

    wait_until(is_told)
    for _ in range(100):
        close(fn.leaves(x, str(note)), silu(values))
    assert note.read_text() == "left\n"
    close(lift(fn.silu, x), silu(values))
    assert lz_command(site, "restart", fn.THERE.backend).returncode == 0

    def has_left_again() -> bool:
        with suppress(lz.LayerZeroError):
            fn.prepare()
            close(fn.leaves(x, str(note)), silu(values))
        return note.read_text() == "left\n" * 2

    wait_until(has_left_again)


def why_it_hangs(site: Site, note: Path, **options: Any) -> str:
    """Call it until its report says why it stays in its worker, where it hung when it was tried; that. `options`: of
    all calls; without, none of those that wait meanwhile may fail that the next worker can serve."""
    function, prepare = fn.hangs.options(**options), fn.prepare.options(**options)
    (x, values), told = randn(16, 24), ""

    def is_told() -> bool:
        nonlocal told
        try:
            close(function(x, str(note)), silu(values))
            told = function.last_report().not_lifted
        except lz.LayerZeroError:  # the next worker got the call before the GPU: one that follows may have it
            with suppress(*[lz.DeadlineExceeded] if options else ()):
                pid = prepare()
                os.kill(pid, signal.SIGKILL)
                wait_ended(pid)
        with suppress(*[lz.DeadlineExceeded] if options else ()):
            prepare()
        return not told.startswith("NOT_YET")

    wait_until(is_told)
    for _ in range(100):
        close(function(x, str(note)), silu(values))
    assert note.read_text() == "hung\n"
    close(lift(fn.silu, x), silu(values))
    return told


@pytest.fixture
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LZ_SOFT_TRIAL_S", "2")


@pytest.mark.usefixtures("short_trials")
def test_one_whose_trial_does_not_end_is_ended_and_tried_once(site: Site, tmp_path: Path) -> None:
    """With its worker, by the broker."""
    pid = fn.prepare()
    told = why_it_hangs(site, tmp_path / "note")
    assert told.startswith(f"TOO_SLOW: {fn.__name__}.hangs: its trial had not ended after 2 s, which ended its worker;")
    assert fn.prepare() != pid


def test_one_whose_trial_ends_by_a_calls_deadline_is_tried_once(site: Site, tmp_path: Path) -> None:
    """Else each of its workers would end so."""
    told = why_it_hangs(site, tmp_path / "note", timeout_s=2.0)
    assert told.startswith(f"TOO_SLOW: {fn.__name__}.hangs: its trial had not ended by the deadline of a call that ")


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


def test_one_that_was_refused_is_tried_again_after_a_restart(site: Site, tmp_path: Path) -> None:
    """Of its worker, as what says why it was refused tells; without one it is not."""
    (x, values), path = randn(16, 24), tmp_path / "what"
    path.write_text("counted")
    told = refused(fn.mended, x, str(path))
    label = f"NOT_DETERMINISTIC: {fn.__name__}.mended: two runs on the same inputs"
    command = f"lz restart {fn.THERE.backend}"
    assert told.startswith(label)
    assert told.endswith(f"; it is tried again once its file has changed, or after {command}")
    assert f"  not lifted: {told}" in str(fn.mended.explain(x, str(path)))
    assert f"  not lifted: {told}" in str(fn.mended.last_report())
    path.write_text("")
    for _ in range(100):
        fn.mended(x, str(path))
    assert fn.mended.last_report().not_lifted == told
    assert lz_command(site, *command.split()[1:]).returncode == 0
    fn.prepare()
    wait_until(lambda: fn.mended(x, str(path)) is not None and path_of(fn.mended) == "lifted")
    close(fn.mended(x, str(path)), silu(values))
    assert "not lifted" not in str(fn.mended.explain(x, str(path)))


def test_one_that_was_refused_is_tried_again_once_its_file_has_changed(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the program that has imported it anew, in the same worker."""
    (x, _), file = randn(16, 24), tmp_path / "edited_functions.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    text = """
import sys
import layerzero as lz
@lz.isolated(lz.env("lifted-there", from_interpreter=sys.executable), shapes=lambda x: (x.shape, x.dtype), lift=True)
def edited(x):
    return """

    def why(does: str) -> str:
        file.write_text(text + does)
        importlib.invalidate_caches()
        module = importlib.import_module("edited_functions")
        monkeypatch.delitem(sys.modules, "edited_functions")
        return refused(module.edited, x)

    pid = fn.prepare()
    assert why("x * 2.0").startswith("NODE_UNSUPPORTED: edited_functions.edited: ")
    assert why("x * 2.0 if x.get().any() else x").startswith("NOT_CAPTURABLE: edited_functions.edited: ")
    assert why("x * 2.0").startswith("NODE_UNSUPPORTED: edited_functions.edited: ")
    assert fn.prepare() == pid


def test_without_cupti_it_stays(site: Site) -> None:
    x, values = randn(16, 24)
    assert lz_command(site, "restart", fn.THERE.backend).returncode == 0
    fn.prepare(False)
    assert refused(fn.silu, x).startswith(f"NO_CUPTI: {fn.__name__}.silu: /no/libcupti.so")
    close(fn.silu(x), silu(values))


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


def test_what_trial_gives_is_checked(site: Site) -> None:
    table, _ = randn(5, 4)
    index = soft_cupy.asarray(np.array([4, 0, 3], np.int64))

    def until_it_is_asked(given: Any) -> None:
        def is_raised() -> bool:
            try:
                wrong(table, index)
            except lz.InvalidArgument as exc:
                return "allowed: ranges of values that arrays of integers can have: index" in exc.message
            return False

        wrong = fn.taken.options(trial=lambda *_: given)
        wait_until(is_raised)

    for given in (
        5,
        {"table": range(5)},
        {"index": 5},
        {"index": range(0)},
        {"index": range(0, 9, 2)},
        {"it": range(5)},
    ):
        until_it_is_asked(given)
