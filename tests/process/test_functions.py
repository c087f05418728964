"""Functions in an environment of their own, through a real broker: values, errors, deaths, deadlines, output.
tests/process/test_function_files.py has their files, and environments that a running broker learns of."""

from __future__ import annotations

import asyncio
import linecache
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process import isolated_functions as fn
from tests.process.function_site import site, store
from tests.process.harness import Site, wait_until

import layerzero as lz
from layerzero.ipc.functions import frames

__all__ = ["site", "store"]

pytestmark = pytest.mark.usefixtures("site")


def test_a_function_runs_in_the_interpreter_of_its_environment() -> None:
    """Its module is imported there by its name and file; of layerzero it finds what it was decorated with."""
    pid, name, prefix, has_client = fn.place()
    assert pid not in (os.getpid(), os.getppid())
    assert name == "tests.process.isolated_functions"
    assert Path(prefix).name.startswith(f"{fn.PLAIN.backend}-")
    assert not has_client
    assert fn.place.local()[0] == os.getpid()


def test_a_trace_has_calls_of_functions() -> None:
    """With their times, also those that are sent; an exception is the call's error."""
    with lz.trace() as trace:
        fn.echo(1)
        with pytest.raises(lz.RemoteError):
            fn.fail("no")
        future = fn.echo.submit(1)
        future.result()
    one, failed, sent = trace.calls
    assert (one.kind, one.backend, one.params) == ("function", fn.PLAIN.backend, {"env": "plain"})
    assert one.worker_pid not in (0, os.getpid())
    assert 0 < one.kernel_ns < one.elapsed_ns
    assert failed.error.startswith("plain: REMOTE_EXCEPTION: ")
    assert (sent.error, sent.name) == ("", one.name)


def test_values_come_back_as_they_went() -> None:
    """Types and values, sizes from nothing to far beyond what a first answer has room for."""
    value: dict[Any, Any] = {
        "plain": [None, True, 1, 2.5, "ä\ud800", b"\0\xff", (), [], {}],
        3: (float("inf"), -(1 << 63), 1 << 64, -(1 << 500)),
        None: fn.Colour.BLUE,
        b"key": {True: [[["deep"]]]},
        2.5: fn.Box("b", (1, 2), [fn.Box("c", (3, 4))]),
        "long": "y" * 300_000,
    }
    found = fn.echo(value)
    assert repr(found) == repr(value)
    assert found[2.5] == value[2.5]
    assert found[None] is fn.Colour.BLUE
    assert fn.grow(fn.Box("b", (1, 2)), fn.Colour.RED) == fn.Box("b RED", (2, 2), [fn.Box("b", (1, 2))])
    for size in (0, 1, 5_000, 3_000_000, 10):  # the second and third come in two trips
        assert fn.text_of(size) == "x" * size


@pytest.mark.parametrize(
    ("value", "where", "what"),
    [
        (object(), "args[0]", "object"),
        ({"x": [1, (2, {3})]}, "args[0]['x'][1][1]", "set"),
        ([fn.Box("a", (1, 2), [fn.Box("b", lambda: None)])], "args[0][0].inner[0].size", "function"),  # type: ignore[arg-type, list-item]
        ({(1, 2): 3}, "args[0]", "a key is tuple"),
        (np.complex64(1), "args[0]", "numpy.complex64 cannot go to another environment; its .real and .imag can"),
        (1j, "args[0]", "complex cannot go to another environment; its .real and .imag can"),
        (np.longdouble(1), "args[0]", "cannot go to another environment; float() of it can, which may round it"),
        (np.datetime64("2020"), "args[0]", "numpy.datetime64 cannot go to another environment; str() of it can"),
        (np.ones(2, complex), "args[0]", "complex128; allowed: "),
        (Path("/x"), "args[0]", "PosixPath cannot go to another environment; os.fspath() of it can"),
        (bytearray(b"x"), "args[0]", "bytearray cannot go to another environment; bytes() of it can"),
        ([{3}], "args[0][0]", "set cannot go to another environment; list() of it can"),
        (np.ones(2, complex), "args[0]", "; pass its .real and .imag"),
        (np.array(["a"]), "args[0]", "<U1"),
    ],
)
def test_what_cannot_cross_is_refused_with_its_place(value: object, where: str, what: str) -> None:
    with pytest.raises(lz.InvalidArgument) as refused:
        fn.echo(value)
    assert refused.value.message.startswith(f"{where}: ")
    assert what in refused.value.message


def test_a_circle_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(lz.InvalidArgument, match="in a circle"):
        fn.echo(circle)


def test_more_text_than_crosses_is_refused_before_it_is_sent_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody would read it: the worker of others is left alone. tests/unit/workers/functions/test_serving.py has
    results."""
    pid = fn.place()[0]
    monkeypatch.setattr(frames, "MAX_HEAD_BYTES", 4000)
    with pytest.raises(lz.InvalidArgument, match=r"^arguments: put bytes, .* into arrays.*: 4,\d+ bytes of values"):
        fn.echo(bytes(4000))
    assert fn.place()[0] == pid


def test_a_result_that_cannot_cross_says_that_the_function_has_run(capfd: pytest.CaptureFixture[str]) -> None:
    """What it has printed is shown all the same."""
    for _ in range(2):
        with pytest.raises(lz.InvalidArgument, match=r"stray has run, and result\['of'\]\[0\]: object cannot go"):
            fn.stray()
        assert "[plain] before it cannot cross" in capfd.readouterr().out


def test_arrays_need_their_library_there() -> None:
    """This environment has no NumPy: the error says where, and what to do."""
    with pytest.raises(lz.InvalidArgument, match=r"args\[0\]\[1\]: a NumPy array, .* add numpy to its requires"):
        fn.echo([1, np.zeros(3)])


def test_an_exception_keeps_its_type_message_and_traceback() -> None:
    with pytest.raises(lz.RemoteError) as raised:
        fn.fail("bread")
    error = raised.value
    assert (error.type, error.facts["message"], error.facts["env"]) == ("LookupError", "no bread", "plain")
    assert 'raise LookupError(f"no {text}")' in error.traceback
    assert "serving.py" not in error.traceback
    with pytest.raises(lz.RemoteError) as left:
        fn.leave(3)
    assert left.value.type == "SystemExit"
    assert fn.echo(1) == 1


def test_a_function_that_another_one_calls_runs_right_there() -> None:
    """Whatever its own environment is: a worker calls no other."""
    assert fn.calls_another([1, 2, 3], "") == [2, 4, 6, 2]
    with pytest.raises(lz.RemoteError, match=r"doubled.submit is for callers outside of workers; here call doubled\("):
        fn.calls_another([1], "submit")


def test_a_class_that_a_function_uses_is_the_class() -> None:
    """With what its callers have of it, and objects have none of that."""
    assert fn.uses_a_class("") == [3, 3, False]
    with pytest.raises(lz.RemoteError, match=r"Latest.warmup is for callers outside of workers; here call Latest\("):
        fn.uses_a_class("warmup")


def test_a_relative_path_that_is_not_there_is_told_where_it_begins(tmp_path: Path) -> None:
    """A worker serves programs of several folders, and is in none of them."""
    with pytest.raises(lz.RemoteError, match="relative paths begin at / in a worker: pass the function an absolute"):
        fn.read("notes.txt")
    with pytest.raises(lz.RemoteError) as absolute:
        fn.read(str(tmp_path / "notes.txt"))
    assert "relative paths begin" not in absolute.value.message


def test_a_program_that_is_not_installed_is_no_path() -> None:
    with pytest.raises(lz.RemoteError, match="no-such-program") as missing:
        fn.run(["no-such-program"])
    assert "relative paths begin" not in missing.value.message


def test_output_reaches_the_caller_with_a_label(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        fn.talk()
    out, err = capfd.readouterr()
    assert out == "[plain] one two\n"
    assert "[plain] three\n" in err
    assert [(r.name, r.getMessage()) for r in caplog.records] == [("shop.sales", "[plain] sold 3")]


def test_bytes_that_are_written_are_in_the_workers_log(site: Site) -> None:
    assert fn.write_bytes(b"raw bytes\n") == 10
    log = site.folder / f"worker-{fn.PLAIN.backend}.log"
    assert wait_until(lambda: "raw bytes" in log.read_text())


def test_a_warning_that_the_caller_ignores_is_not_shown(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    """It is in the worker's log, and no output of the function's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fn.warn_of("of no interest")
    assert "of no interest" not in "".join(capfd.readouterr())
    log = site.folder / f"worker-{fn.PLAIN.backend}.log"
    assert wait_until(lambda: "UserWarning: of no interest" in log.read_text())


def test_warnings_are_the_callers_with_a_label() -> None:
    """Of the same category, about the same code, each time anew: what is shown is the caller's to decide."""
    said = "mind the gap [tests.process.isolated_functions.warn in plain]"
    for kind, category in (("", UserWarning), ("own", fn.SoonGone), ("deprecated", DeprecationWarning)):
        for _ in range(2):
            with pytest.warns() as seen:
                assert fn.warn(kind, times=3) == "done"
            assert [(one.category, str(one.message)) for one in seen] == [(category, said)]
            assert seen[0].filename == fn.__file__
            assert "warnings.warn(" in linecache.getline(fn.__file__, seen[0].lineno)
    with pytest.warns(RuntimeWarning, match="mind the gap") as seen:
        fn.warn.submit("odd").result()
    assert seen[0].category.__name__ == "OddWarning"
    with pytest.warns(UserWarning, match="1 and 2"):  # which cannot be made of its text
        fn.warn("pair")
    with pytest.warns() as seen:
        assert list(fn.warn_each(2)) == [0, 1]
    assert [str(one.message).partition(" [")[0] for one in seen] == ["item 0", "item 1"]


def test_a_warning_about_the_caller_names_the_line_that_calls() -> None:
    """As Python does: `stacklevel` counts on in this program, and in none of our files."""

    def call(level: int) -> int:
        return fn.warn_at(level)

    def iterate(level: int) -> int:
        return next(fn.warn_each_at(level))

    def send(level: int) -> int:
        return fn.warn_at.submit(level).result()

    for calls in (call, iterate, send):
        with pytest.warns(DeprecationWarning, match="mind the gap") as told:
            assert [calls(level) for level in (2, 3)] == [2, 3]
        assert {one.filename for one in told} == {__file__}
        lines = [linecache.getline(__file__, one.lineno).strip() for one in told]
        assert lines[0].startswith("return ")
        assert lines[1].startswith("assert [calls(")
        assert told[0].lineno == calls.__code__.co_firstlineno + 1
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", category=DeprecationWarning, module=__name__.replace(".", r"\."))
        for _ in range(3):
            fn.warn_at(2)
    assert len(told) == 1  # once of a line, as of this module's own


def test_filters_of_the_caller_decide_about_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="mind the gap"):
            fn.warn()
        assert fn.warn.last_report().served_by == fn.PLAIN.backend
        warnings.filterwarnings("ignore", "mind the", module=r"tests\.process\.isolated_functions")
        assert fn.warn() == "done"
        with pytest.raises(UserWarning, match="before") as raised:
            fn.warn_and_fail()
        assert isinstance(raised.value.__context__, lz.RemoteError)
    with pytest.warns(UserWarning, match="before"), pytest.raises(lz.RemoteError, match="gone"):
        fn.warn_and_fail()


def test_a_death_is_an_error_that_says_so_and_the_next_call_is_served(tmp_path: Path) -> None:
    """Nobody runs it twice unasked."""
    notes = str(tmp_path / "runs")
    with pytest.raises(lz.BackendError) as died:
        fn.dies_at_first(notes)
    assert "may have run in part" in died.value.message
    assert "idempotent=True" in died.value.message
    assert fn.note_run(notes) == 2
    assert fn.dies_at_first.last_report().attempts == 1
    assert fn.echo(5) == 5


def test_an_idempotent_call_runs_once_more_and_the_report_says_it(tmp_path: Path) -> None:
    again = fn.dies_at_first.options(idempotent=True)
    assert again(str(tmp_path / "runs")) == 2
    report = again.last_report()
    assert (report.attempts, len(report.failures), report.served_by) == (2, 1, fn.PLAIN.backend)
    assert "BACKEND_ERROR" in report.failures[0]
    with pytest.raises(lz.BackendError):
        fn.dies_always.options(idempotent=True)(str(tmp_path / "always"))
    assert fn.note_run(str(tmp_path / "always")) == 3


def test_a_deadline_ends_the_worker_and_the_caller_hears_of_it(tmp_path: Path) -> None:
    pid = fn.place()[0]
    with pytest.raises(lz.DeadlineExceeded):
        fn.never_ends.options(timeout_s=0.3)(str(tmp_path / "runs"))
    assert fn.place()[0] != pid
    assert fn.note_run(str(tmp_path / "runs")) == 2  # not again


@pytest.mark.parametrize("fallback", [fn.here, fn.elsewhere])
def test_a_fallback_takes_the_arguments_and_the_report_names_it(fallback: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "runs")
    safe = fn.dies_always.options(fallback=fallback)
    assert safe(path) == (fallback.__name__, (path,) if fallback is fn.here else [path])
    report = safe.last_report()
    assert report.served_by == f"fallback {fallback.__qualname__}"
    assert "BACKEND_ERROR" in report.failures[0]
    assert safe.options(fallback=fallback).submit(path).result()[0] == fallback.__name__


@pytest.mark.parametrize(("fallback", "kind"), [(fn.fails_here, KeyError), (fn.fail, lz.RemoteError)])
def test_a_fallback_that_fails_too_leaves_a_report_of_both(
    fallback: Any, kind: type[Exception], tmp_path: Path
) -> None:
    unsafe = fn.dies_always.options(fallback=fallback)
    with pytest.raises(kind) as raised:
        unsafe(str(tmp_path / "runs"))
    report = unsafe.last_report()
    assert report.served_by == ""
    first, last = report.failures
    assert "plain: BACKEND_ERROR" in first
    assert last.startswith(f"fallback {fallback.__qualname__}: ")
    causes = [raised.value.__context__, getattr(raised.value.__context__, "__context__", None)]
    assert any(isinstance(one, lz.BackendError) for one in causes)


def test_the_first_error_is_behind_what_a_fallback_raises(tmp_path: Path) -> None:
    """Also where the fallback, or who calls, was at another one already; and whatever the exception's own code does."""
    unsafe = fn.dies_always.options(fallback=fn.fails_unspoken)
    try:
        raise OSError("before")
    except OSError:
        with pytest.raises(fn.Unspoken) as raised:
            unsafe(str(tmp_path / "runs"))
    chain: list[BaseException] = [raised.value]
    while (one := chain[-1].__context__) is not None:
        chain.append(one)
    assert [type(one) for one in chain[:3]] == [fn.Unspoken, LookupError, lz.BackendError]
    last = unsafe.last_report().failures[-1]
    assert last == "fallback fails_unspoken: Unspoken: (its text cannot be had: ValueError)"


@pytest.mark.parametrize("kind", [TimeoutError, KeyboardInterrupt])
def test_a_fallback_ends_its_future_whatever_it_raises(kind: type[BaseException], tmp_path: Path) -> None:
    """Elsewhere these leave the call under way."""

    def fails(_: str) -> None:
        raise kind("of the fallback")

    future = fn.dies_always.options(fallback=fails).submit(str(tmp_path / "runs"))
    for _ in range(2):
        with pytest.raises(kind, match="of the fallback"):
            future.result()
    assert repr(future).endswith(": done>")
    assert future.report is not None
    assert future.report.failures[-1].endswith(f"{kind.__name__}: of the fallback")


def test_a_report_is_of_the_last_call_with_whatever_options(tmp_path: Path) -> None:
    fn.dies_always.options(fallback=fn.here)(str(tmp_path / "runs"))
    assert fn.dies_always.last_report().served_by == "fallback here"


def test_what_a_function_raises_is_no_case_for_the_fallback() -> None:
    with pytest.raises(lz.RemoteError):
        fn.fail.options(fallback=fn.here)("bread")


def test_futures_maps_and_asyncio() -> None:
    futures = [fn.echo.submit(n) for n in range(40)]
    assert [future.result(30) for future in futures] == list(range(40))
    report = futures[0].report
    assert report is not None
    assert report.served_by == fn.PLAIN.backend
    assert list(fn.echo.map(range(70))) == list(range(70))

    async def both() -> list[Any]:
        return list(await asyncio.gather(fn.echo.submit("a"), fn.echo.submit("b")))

    assert asyncio.run(both()) == ["a", "b"]
    with pytest.raises(lz.RemoteError):
        fn.fail.submit("x").result()


def test_what_is_wrong_with_a_call_is_said_before_it_is_sent() -> None:
    with pytest.raises(lz.InvalidArgument, match="too many positional arguments"):
        fn.text_of(1, 2)  # type: ignore[call-arg]
    with pytest.raises(lz.InvalidArgument, match="missing a required argument: 'size'"):
        fn.text_of()  # type: ignore[call-arg]
    with pytest.raises(lz.InvalidArgument, match=r"missing a required .*argument: 'path'"):
        fn.keyword(1)  # type: ignore[call-arg]
    with pytest.raises(lz.InvalidArgument, match="no option nap"):
        fn.echo.options(nap=1)


def test_a_plan_refuses_to_record_one() -> None:
    """Its result would be taken for a constant."""
    planned = lz.plan(lambda x: (fn.echo(1), x))
    with pytest.raises(lz.InvalidArgument, match="call it outside of the plan"):
        planned(np.zeros(4, np.float32))


def test_an_explanation_runs_nothing(tmp_path: Path) -> None:
    told = fn.never_ends.explain(str(tmp_path / "runs"))
    assert (told.backend, told.command) == (fn.PLAIN.backend, "")
    assert not (tmp_path / "runs").exists()
    missing = fn.unbuilt.explain()
    assert (missing.state, missing.command) == (
        "its environment is not built",
        f"lz env build {fn.UNBUILT.backend}",
    )


def test_a_warm_up_imports_the_module_and_calls_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert fn.talk.warmup() > 0
    assert capfd.readouterr().out == ""


def test_a_killed_worker_leaves_other_functions_calls_alone(tmp_path: Path) -> None:
    """Calls behind the one that died were not begun: they are served by the next worker."""
    first = fn.dies_at_first.submit(str(tmp_path / "runs"))
    others = [fn.echo.submit(n) for n in range(5)]
    with pytest.raises(lz.BackendError):
        first.result()
    assert [other.result() for other in others] == list(range(5))
    wait_until(lambda: fn.echo(1) == 1)


def test_one_that_dies_too_often_is_disabled_and_the_fallback_serves(store: Path, tmp_path: Path) -> None:
    """As any backend: the error says why, until when, and what to run. A broker of its own, started afterwards."""
    lz.disconnect()
    own = Site(store, restart_budget=1, backoff_s=0.01)
    try:
        with own.environment():
            own.start().connect()
            for _ in range(2):
                with pytest.raises(lz.BackendError):
                    fn.dies_always(str(tmp_path / "runs"))
            with pytest.raises(lz.EnvError) as disabled:
                fn.dies_always(str(tmp_path / "runs"))
            assert "BACKEND_DISABLED" in disabled.value.message
            assert disabled.value.message.startswith(f"run: lz restart {fn.PLAIN.backend}\n")
            assert fn.note_run(str(tmp_path / "runs")) == 3
            assert fn.echo.options(fallback=fn.here)(1) == ("here", (1,))
            lz.disconnect()
    finally:
        own.stop()
