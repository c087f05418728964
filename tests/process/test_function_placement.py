"""Functions that run in the program's own process where their requirements hold there and policy allows it, through a
real broker: who decides, what is told, what differs."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.process import forks
from tests.process import placed_functions as fn
from tests.process.function_site import serving
from tests.process.harness import Site, wait_until

import layerzero as lz


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    forks.start_server()
    one = Site(tmp_path_factory.mktemp("store"), restart_budget=100, backoff_s=0.01)
    with serving(one, fn.ELSEWHERE):
        yield one


pytestmark = pytest.mark.usefixtures("site")


def test_where_requirements_hold_no_environment_is_needed() -> None:
    """Nothing was built for this one; the report and explain() say where and why."""
    assert not fn.HERE.is_built
    assert fn.pid() == os.getpid()
    report = fn.pid.last_report()
    assert (report.placement, report.served_by, report.attempts, report.failures) == (
        "in_process",
        "this process",
        1,
        (),
    )
    assert "numpy>=1.26" in report.placement_reason
    assert "holds here; policy allows it" in report.placement_reason
    assert report.placement_reason in str(report)
    explained = fn.pid.explain()
    assert (explained.placement, explained.state, explained.command) == ("in_process", "this process", "")
    assert fn.pid.warmup() == 0
    assert [*fn.pid.map(range(3), chunksize=2)] == [os.getpid()] * 3
    assert not fn.HERE.is_built


def test_where_they_do_not_it_is_a_worker_or_an_error_with_the_command() -> None:
    auto = fn.pid.options(placement="auto", fallback=fn.ten)
    assert auto() == os.getpid()
    with pytest.raises(lz.EnvError) as no:
        fn.never()
    first, _, rest = no.value.message.partition("\n")
    assert first.startswith("run: ")
    assert "-m pip install 'no-such-thing[x]>=2' 'numpy<1.0', or let it run in its environment: placement=" in first
    assert f"numpy<1.0: numpy {np.__version__} is installed" in rest
    assert "no-such-thing[x]>=2: it is not installed" in rest
    report = fn.never.last_report()
    assert (report.placement, report.served_by) == ("worker", "")
    assert fn.never.options(fallback=fn.ten)() == 10
    calls: list[str] = []

    def late() -> None:
        calls.append("once")
        raise TimeoutError("of the fallback")

    future = fn.never.options(fallback=late).submit()
    for _ in range(2):
        with pytest.raises(TimeoutError, match="of the fallback"):
            future.result()
    assert calls == ["once"]
    with pytest.raises(lz.EnvError, match="pip install"):
        fn.never.warmup()
    with pytest.raises(lz.EnvError, match=r"never is not built"):  # that is where the call goes then
        fn.never.options(placement="auto")()
    other = lz.isolated(fn.OTHER_PYTHON, placement="in_process")(fn.ten)
    with pytest.raises(lz.EnvError, match=f"it requires Python {fn.OTHER_PYTHON.python}"):
        other()
    interpreter = lz.isolated(lz.env("x", from_interpreter="/nowhere/bin/python"), placement="in_process")(fn.ten)
    with pytest.raises(lz.EnvError, match="/nowhere/bin/python is another interpreter"):
        interpreter()


@pytest.mark.parametrize("path", [sys.executable, sys.prefix])
def test_an_interpreter_that_runs_this_program_is_here(path: str) -> None:
    mine = lz.isolated(lz.env("mine", from_interpreter=path, requires=["numpy"]), placement="in_process")(fn.ten)
    assert mine() == 10
    assert mine.last_report().placement == "in_process"


def test_policy_keeps_them_out(site: Site) -> None:
    """Of the environment or of all; for this process, and in the broker's file, within seconds."""
    assert fn.worker_pid() == os.getpid()
    with contextlib.ExitStack() as undone:
        undone.callback(lz.configure, backend_isolation=None)
        for name in (fn.ELSEWHERE.backend, f"{fn.ELSEWHERE.backend}.call", "*"):
            lz.configure(backend_isolation={name: "subprocess"})
            assert fn.worker_pid() != os.getpid()
            report = fn.worker_pid.last_report()
            assert report.placement == "worker"
            assert f"backend_isolation of {name} is subprocess, by lz.configure" in report.placement_reason
            assert "subprocess" in fn.worker_pid.explain().placement_reason
            assert len({*fn.worker_pid.map(range(4), chunksize=2), os.getpid()}) == 2
        lz.configure(backend_isolation={"*": "subprocess", fn.ELSEWHERE.backend: "lifted"})
        assert fn.worker_pid() == os.getpid()
        lz.configure(backend_isolation="subprocess")
        with pytest.raises(lz.EnvError, match=r"^run: lz policy show"):
            fn.fill(np.zeros(1), 1)
    assert fn.worker_pid() == os.getpid()
    site.set_policy("backend_isolation: subprocess\n")
    wait_until(lambda: fn.worker_pid() != os.getpid())
    site.set_policy()
    wait_until(lambda: fn.worker_pid() == os.getpid())


def test_values_are_the_programs_own_and_there_is_no_deadline() -> None:
    """What it writes is seen, what it returns need not cross, and it goes on after `timeout_s`."""
    array = np.zeros(3)
    found = fn.fill(array, 2)
    assert found["same"] is array
    assert found[3] == {1, 2}
    assert array.tolist() == [2, 2, 2]
    assert fn.double(array).tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    ("kind", "type_"), [("bread", "LookupError"), ("exit", "SystemExit"), (fn.UNSPOKEN, fn.UNSPOKEN)]
)
def test_what_it_raises_is_as_elsewhere(kind: str, type_: str) -> None:
    with pytest.raises(lz.RemoteError) as raised:
        fn.fail(kind)
    error = raised.value
    assert (error.type, error.facts["env"]) == (type_, "here")
    assert f"of here, in this process, raised {type_}" in error.message
    assert "placed_functions.py" in error.traceback
    assert "isolated.py" not in error.traceback
    assert error.__cause__ is not None
    assert fn.fail.last_report().served_by == ""
    with pytest.raises(lz.RemoteError):
        fn.fail.submit(kind).result()
    with pytest.raises(lz.InvalidArgument, match="too many positional"):
        fn.fail(1, 2)  # type: ignore[call-arg]


def test_submitted_ones_run_in_threads(tmp_path: Path) -> None:
    """As many as there would be workers; a call may submit another one of its function."""
    pair = fn.meet.options(workers=2)
    one, two = pair.submit(str(tmp_path), "a", "b"), pair.submit(str(tmp_path), "b", "a")
    assert len({one.result(), two.result(), threading.current_thread().name}) == 3
    report = one.report
    assert report is not None
    assert report.placement == "in_process"
    alone = fn.meet.submit(str(tmp_path), "c", "d")
    with pytest.raises(TimeoutError):
        alone.result(0.01)
    assert not alone.done()
    (tmp_path / "d").touch()
    assert alone.result()
    assert fn.outer(3) == 3
    assert fn.outer.submit(3).result() == 3


def test_objects_of_an_environment_stay_there() -> None:
    with fn.keep.options(keep=True)(7) as handle:
        size, where = fn.length({"x": (handle,)})
        assert size == 1
        assert where != os.getpid()
        assert "an object that lives in its environment" in fn.length.last_report().placement_reason
        with pytest.raises(lz.InvalidArgument, match="values of this process"):
            fn.length.options(placement="in_process")({"x": [handle]})
    assert fn.length({"x": ["ab"]}) == (2, os.getpid())


def test_what_cannot_be_placed_is_refused_where_it_is_decorated() -> None:
    place = lz.isolated(fn.HERE, placement="auto")
    for function in (fn.later, fn.items):
        with pytest.raises(lz.InvalidArgument, match="allowed: worker, for generators, coroutine functions"):
            place(function)
    with pytest.raises(lz.InvalidArgument, match="placement is for functions"):
        place(fn.Class)
    with pytest.raises(lz.InvalidArgument, match="with keep=True"):
        fn.pid.options(keep=True)
    with pytest.raises(lz.InvalidArgument, match="in several environments"):
        lz.isolated([fn.HERE, fn.ELSEWHERE], placement="auto")(fn.ten)
    with pytest.raises(lz.InvalidArgument, match="of one environment"):
        fn.pid.implementation(fn.ELSEWHERE)(fn.ten)
    with pytest.raises(lz.InvalidArgument, match="placement is 'here'; allowed: worker, auto, in_process"):
        fn.pid.options(placement="here")
