"""lz.trace with a real broker: what is recorded of calls on each path, their data flow, scopes, bounds."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.backends.toy import KILL, RAISE, fault
from tests.process import placed_functions as fn
from tests.process.harness import Site, wait_until
from tests.process.planned import W, block, settled
from tests.process.planned import X as MATRIX
from tests.process.test_cli import USAGE, data
from tests.process.test_cli import lz as lz_command

import layerzero as lz
from layerzero.client.connection import observing
from layerzero.client.connection.arena import pool
from layerzero.client.session import repeats
from layerzero.client.traces.perfetto import to_perfetto

X = np.linspace(-3, 3, 8, dtype=np.float32)


@pytest.fixture
def connected(connected: Site) -> Iterator[Site]:
    connected.wait_ready("alpha", "beta")
    yield connected
    assert observing.recorder is None


def settle(x: Any = X) -> None:
    """Until the call goes over its lane."""
    wait_until(lambda: lz.silu(x) is not None and lz.last_report().path == "express")
    lz.silu(x)


def test_each_call_is_recorded_with_what_its_report_says(connected: Site) -> None:
    """Calls that repeat are made in C; the trace has them as all others, with the times of their reports."""
    settle()
    before_ns = time.perf_counter_ns()
    with lz.trace() as trace:
        reports = [lz.silu(X) is not None and lz.last_report() for _ in range(3)]
        lz.matmul(MATRIX, W, backend="beta")
    after_ns = time.perf_counter_ns()
    lz.silu(X)
    assert [call.name for call in trace.calls] == ["silu"] * 3 + ["matmul"]
    for call, report in zip(trace.calls, reports, strict=False):
        told = (report.kernel_id, report.backend, report.path, report.worker_pid, report.kernel_us, report.elapsed_us)
        assert told == (
            call.kernel_id,
            call.backend,
            call.path,
            call.worker_pid,
            call.kernel_ns / 1e3,
            call.elapsed_ns / 1e3,
        )
    if repeats.library is not None:
        assert {call.path for call in trace.calls[:3]} == {"express"}
    starts = [call.start_ns for call in trace.calls]
    assert [before_ns, *starts, after_ns] == sorted([before_ns, *starts, after_ns])
    last = trace.calls[3]
    assert [str(one) for one in (*last.inputs, *last.outputs)] == [
        "a 4x6:float32",
        "b 6x6:float32",
        "out 4x6:float32",
    ]
    assert (last.asked_backend, last.backend, last.device, last.error) == ("beta", "beta", "cpu", "")
    assert all(len(line) <= 80 for line in str(trace).splitlines())
    assert "silu" in str(trace)
    assert "4 calls in" in str(trace)


def test_failed_attempts_and_errors_are_told(connected: Site) -> None:
    deadly, refused = X.copy(), X.copy()
    deadly[0], refused[0] = fault(KILL, "alpha"), fault(RAISE)
    with lz.trace() as trace:
        lz.silu(deadly)
        with pytest.raises(lz.BackendError):
            lz.silu(refused)
        with pytest.raises(lz.InvalidArgument):
            lz.matmul(MATRIX, X)
    fell, failed, wrong = trace.calls
    assert [(one.backend, one.exit_signal) for one in fell.attempts if one.backend == "alpha"] == [("alpha", 9)]
    assert (fell.backend, fell.error) == ("beta", "")
    assert failed.error.startswith("BACKEND_ERROR: ")
    assert {one.backend for one in failed.attempts} == {"alpha", "beta", "gamma"}
    assert wrong.error.startswith("INVALID_ARGUMENT: matmul: ")
    assert [one.name for one in wrong.inputs] == ["a", "b"]
    assert "1 fell back; 2 errors" in str(trace).partition("\n")[0]


def test_data_flow_is_that_of_memory_and_ends_with_it(connected: Site) -> None:
    """Results, views of them, in-place results, memory that comes again for something else, and that of the caller."""
    cache_k, cache_v = lz.empty((2, 4, 1, 8)), lz.empty((2, 4, 1, 8))
    token = np.ones((1, 1, 8), np.float32)
    mine = np.empty_like(MATRIX)
    with lz.trace() as trace:
        a = lz.silu(MATRIX)  # 0
        b = lz.matmul(a, W)  # 1
        lz.silu(b[1:])  # 2: a part of it
        lz.matmul(W, b.T)  # 3
        lz.silu(a, out=mine)  # 4
        lz.silu(mine)  # 5
        lz.append_kv(token, token, cache_k, cache_v, np.zeros(1, np.int64))  # 6
        lz.append_kv(token, token, cache_k, cache_v, np.ones(1, np.int64))  # 7
        at = a.ctypes.data
        del a
        gc.collect()
        new = [lz.empty(MATRIX.shape) for _ in range(8)]
        new = [one for one in new if one.ctypes.data == at] or new[:1]
        new[0][...] = 1
        lz.silu(new[0])  # 8: what is there now was not made by a call
        sent = lz.submit(lz.silu, b)
        last = lz.silu(sent.result())  # 10
        del mine
        gc.collect()
    sources = [[(one.input, one.call, one.output) for one in call.sources] for call in trace.calls]
    assert sources[:3] == [[], [("a", 0, "out")], [("x", 1, "out")]]
    assert sources[3] == [("b", 1, "out")]
    assert sources[4:6] == [[("x", 0, "out")], [("x", 4, "out")]]
    assert sources[6] == []
    assert sources[7] == [("k_cache", 6, "k_cache"), ("v_cache", 6, "v_cache")]
    assert sources[8] == []
    assert sources[9:11] == [[("x", 1, "out")], [("x", 9, "out")]]
    assert last is not None
    assert [call.number for call in trace.contents.users(1)] == [2, 3, 9]
    assert "c1 -->|x| c2" in trace.mermaid()


def test_scopes_lie_in_each_other_by_thread_and_task(connected: Site) -> None:
    def layer(name: str) -> None:
        with lz.trace_scope(name):
            lz.silu(X)

    async def task(name: str) -> None:
        with lz.trace_scope(name):
            await asyncio.sleep(0)
            lz.silu(X)

    async def tasks() -> None:
        await asyncio.gather(task("one"), task("two"))

    with lz.trace_scope("unseen"):
        pass
    with lz.trace() as trace:
        with trace.scope("outer"):
            layer("inner")
            thread = threading.Thread(target=layer, args=("apart",), name="another")
            thread.start()
            thread.join()
            asyncio.run(tasks())
        lz.silu(X)
    assert sorted(call.scopes for call in trace.calls) == [
        (),
        ("apart",),
        ("outer", "inner"),
        ("outer", "one"),
        ("outer", "two"),
    ]
    others = [call for call in trace.calls if call.scopes == ("apart",)]
    assert [trace.contents.threads[call.thread].name for call in others] == ["another"]
    found = {one.name: one for one in trace.scopes}
    assert found["inner"].parent == found["outer"].number
    assert all(one.elapsed_ns is not None and one.elapsed_ns > 0 for one in trace.scopes)
    assert "inner     silu" in trace.text("scope")


class Module:
    """A module of torch as far as hooks go."""

    def __init__(self, call: Any, **parts: Module) -> None:
        self._call, self._parts = call, parts
        self._before: list[Any] = []
        self._after: list[Any] = []

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        yield prefix, self
        for name, part in self._parts.items():
            yield from part.named_modules(f"{prefix}.{name}".strip("."))

    def _add(self, to: list[Any], hook: Any) -> Any:
        to.append(hook)
        return type("Handle", (), {"remove": lambda _: to.remove(hook)})()

    def register_forward_pre_hook(self, hook: Any) -> Any:
        return self._add(self._before, hook)

    def register_forward_hook(self, hook: Any, *, always_call: bool) -> Any:
        return self._add(self._after, hook)

    def __call__(self, x: Any) -> Any:
        for hook in list(self._before):
            hook(self, (x,))
        try:
            return self._call(self, x)
        finally:
            for hook in list(self._after):
                hook(self, (x,), None)


def test_modules_of_a_model_are_scopes_while_the_trace_is_on(connected: Site) -> None:
    """Also after a forward that raised."""
    lower = Module(lambda _, x: lz.silu(x))
    model = Module(lambda self, x: self._parts["lower"](x), lower=lower)
    with lz.trace(model) as trace:
        model(X)
        with pytest.raises(lz.InvalidArgument):
            model("text")
        model(X)
    assert [call.scopes for call in trace.calls] == [("Module", "lower")] * 3
    assert [one.name for one in trace.scopes] == ["Module", "lower"] * 3
    assert not lower._before + lower._after + model._before + model._after


def test_the_newest_calls_are_kept_and_purging_forgets_them(connected: Site) -> None:
    settle()
    trace = lz.trace(most=3).start()
    with lz.trace() as other:
        for n in range(5):
            lz.silu(X[: n + 1])
    assert [call.inputs[0].spec.shape for call in trace.calls] == [(3,), (4,), (5,)]
    assert (trace.dropped, len(trace)) == (2, 3)
    assert "2 older ones were dropped" in str(trace)
    assert len(other.calls) == 5
    trace.purge()
    assert (trace.calls, trace.dropped, str(trace)) == ((), 0, "no calls were recorded")
    lz.silu(X)
    assert len(trace.calls) == 1
    trace.stop()
    trace.stop()
    lz.silu(X)
    assert len(trace.start().stop().calls) == 1
    with pytest.raises(lz.InvalidArgument, match="most is 0; allowed"):
        lz.trace(most=0)


def test_a_forked_child_has_no_trace_on(connected: Site) -> None:
    with lz.trace() as trace:
        lz.silu(X)
        pid = os.fork()
        if not pid:
            os._exit(2 * (observing.recorder is not None) + trace.is_on)
        assert os.waitpid(pid, 0)[1] == 0
        lz.silu(X)
        assert trace.is_on
    assert len(trace.calls) == 2
    assert not trace.is_on


def test_a_plan_is_a_scope_and_its_steps_are_calls(connected: Site) -> None:
    """Those that cross as one message have the times of their kernels, and feed each other."""
    plan = lz.plan(block)
    settled(plan, MATRIX)
    with lz.trace() as trace:
        plan(MATRIX)
    calls = trace.calls
    assert [(call.name, call.kind) for call in calls] == [("silu", "step"), ("matmul", "step"), ("silu", "step")]
    assert {call.scopes for call in calls} == {("plan block",)}
    assert [[(one.input, one.call) for one in call.sources] for call in calls] == [[], [("a", 0)], [("x", 1)]]
    assert all(call.kernel_ns > 0 and call.backend == "alpha" for call in calls)
    (scope,) = trace.scopes
    assert scope.elapsed_ns is not None
    assert scope.start_ns <= calls[0].start_ns
    assert calls[-1].end_ns <= scope.start_ns + scope.elapsed_ns


def test_functions_that_run_in_this_process_are_recorded(connected: Site) -> None:
    with lz.trace() as trace:
        fn.pid()
        lz.silu(fn.double(X))
    call, made, used = trace.calls
    assert [str(one) for one in (*made.inputs, *made.outputs)] == ["0 8:float32", "0 8:float32"]
    assert [(one.input, one.call) for one in used.sources] == [("x", 1)]
    assert (call.kind, call.path, call.backend, call.error) == ("function", "in_process", "this process", "")
    assert call.name == fn.pid.last_report().function
    assert "2 function calls" in str(trace)


def test_what_is_recorded_keeps_no_memory_of_the_callers(connected: Site) -> None:
    settle()
    gc.collect()
    slots = pool.stats()["slots"]
    trace = lz.trace().start()
    x = lz.share(X)
    y = lz.silu(x)
    with pytest.raises(lz.InvalidArgument):
        lz.matmul(x, y[:3])
    del x, y
    trace.stop()
    gc.collect()
    assert pool.stats()["slots"] == slots
    assert len(trace.calls) == 2


def test_a_saved_trace_is_the_same_when_it_is_loaded(connected: Site, tmp_path: Path) -> None:
    """Everything of it, with the bytes that were kept; it replaces what is there, and is its owner's alone."""
    deadly = X.copy()
    deadly[0] = fault(KILL, "alpha")
    with lz.trace(tensors=True) as trace, lz.trace_scope("outer"):
        y = lz.matmul(MATRIX[:, ::2].copy(), W[::2], backend="beta")
        lz.silu(lz.silu(y[1:]))
        lz.silu(deadly)
        fn.pid()
        with pytest.raises(lz.InvalidArgument):
            lz.matmul(MATRIX, X)
    path = tmp_path / "of a program.lztrace"
    path.write_text("old")
    trace.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    found, wanted = lz.load_trace(path), trace.contents
    for name in ("calls", "scopes", "dropped", "clock", "threads", "facts"):
        assert getattr(found, name) == getattr(wanted, name), name
    assert str(found) == str(trace)
    kept = found.calls[0].kept
    assert kept is not None
    assert np.frombuffer(found.memory[kept.results[0][2]], np.float32).tolist() == np.ravel(y).tolist()
    assert set(found.memory) == {digest for call in found.calls if call.kept for digest in call.kept.digests}


def test_kept_bytes_stay_within_their_bound(connected: Site) -> None:
    """Those of the newest calls; equal ones count once."""
    with lz.trace(tensors=20 * X.nbytes) as trace:
        for n in range(40):
            lz.silu(X + n)
            lz.silu(X + 39)
    assert sum(map(len, trace.contents.memory.values())) <= 20 * X.nbytes
    assert [call.kept is not None for call in trace.calls[-4:]] == [True] * 4
    assert trace.calls[0].kept is None
    assert trace.calls[0].why_not_kept == "newer calls have taken its room"
    with pytest.raises(lz.InvalidArgument, match=r"tensors is 0\.5; allowed"):
        lz.trace(tensors=0.5)  # type: ignore[arg-type]


def test_the_command_shows_a_saved_trace(connected: Site, tmp_path: Path) -> None:
    with lz.trace() as trace:
        lz.silu(lz.silu(X))
    trace.save(tmp_path / "a")
    shown = lz_command(connected, "trace", "show", str(tmp_path / "a"))
    assert shown.stdout.splitlines() == str(trace).splitlines()
    assert lz_command(connected, "trace", "export", str(tmp_path / "a")).returncode == 0
    assert to_perfetto(lz.load_trace(tmp_path / "a")) == (tmp_path / "a.pftrace").read_bytes()
    (tmp_path / "torch.json").write_text('{"traceEvents": []}')
    given = ("trace", "merge", str(tmp_path / "a"), str(tmp_path / "torch.json"), "-o", str(tmp_path / "both.json"))
    assert lz_command(connected, *given).returncode == 0
    named = [one["name"] for one in json.loads((tmp_path / "both.json").read_text())["traceEvents"] if one["ph"] == "X"]
    assert sorted(named) == ["alpha.silu", "alpha.silu", "silu (alpha)", "silu (alpha)"]


# --- again


def test_calls_are_made_again_with_the_bytes_that_were_kept(connected: Site) -> None:
    """On the backend of then, on others, on all; a result that is not the recorded one is seen."""
    cache_k, cache_v = lz.empty((2, 4, 1, 8)), lz.empty((2, 4, 1, 8))
    cache_k[...] = cache_v[...] = 0
    token = np.arange(8, dtype=np.float32).reshape(1, 1, 8)
    with lz.trace(tensors=True) as trace, lz.trace() as other:
        y = lz.matmul(MATRIX, W)
        lz.silu(lz.share(y)[:, ::2])
        lz.append_kv(token, token, cache_k, cache_v, np.full(1, 2))
        fn.pid()
        lz.null()
        before = len(other.calls)
        found = trace.run()
        assert len(other.calls) == before  # what is made again is not recorded
    assert [(one.number, one.backend, one.arguments, one.outcome) for one in found.calls] == [
        (0, "alpha", "kept", "ok"),
        (1, "alpha", "kept", "ok"),
        (2, "alpha", "kept", "ok"),
    ]
    assert {(one.difference, one.reference, one.is_wrong) for one in found.calls} == {(0.0, "recorded", False)}
    assert str(found).splitlines()[:3] == [
        "3 calls made again: 3 with the same numbers",
        "left out: 1, functions: their code and their objects are not in a trace",
        "left out: 1, calls without arguments",
    ]
    everywhere = trace.run(env="all", times=2)
    assert [one.backend for one in everywhere.calls] == ["alpha", "beta", "gamma"] * 2 + ["alpha", "beta"]
    assert everywhere.is_right
    contents = trace.contents
    kept = contents.calls[0].kept
    assert kept is not None
    bent = np.frombuffer(contents.memory[kept.results[0][2]], np.float32) * 1.01
    memory = {**contents.memory, kept.results[0][2]: bent.tobytes()}
    wrong = replace(contents, memory=memory).run(["beta", "gamma"])
    assert [(one.number, one.is_wrong) for one in wrong.calls] == [(0, True), (0, True), (1, False), (1, False),
                                                                   (2, False), (2, False)]  # fmt: skip
    assert "WRONG" in str(wrong).splitlines()[4]
    assert all(len(line) <= 80 for line in str(wrong).splitlines())
    with pytest.raises(lz.InvalidArgument, match="no backend is called 'delta'; known: "):
        trace.run("delta")
    with pytest.raises(lz.InvalidArgument, match="env is 'some'; allowed: all"):
        trace.run(env="some")


def test_without_bytes_calls_are_made_again_with_what_the_run_gives(connected: Site) -> None:
    """Parts of results are the same parts; what no call has made is random; another backend has the same arguments."""
    with lz.trace() as trace:
        y = lz.matmul(MATRIX, W)
        lz.matmul(y.T[1:], y)
        lz.silu(y[2:, 1:3])
    given: dict[int, list[Any]] = {}
    session = lz.session()
    run = session.run

    def note(request: Any, **options: Any) -> Any:
        result = run(request, **options)
        given.setdefault(len(given), [*(np.array(arg) for arg in request.args), np.array(result)])
        return result

    session.run = note  # type: ignore[method-assign]
    try:
        found = trace.run("beta", seed=3)
    finally:
        del session.run
    assert [(one.arguments, one.backend, one.reference) for one in found.calls] == [
        ("random", "beta", "alpha"),
        ("flow", "beta", "alpha"),
        ("flow", "beta", "alpha"),
    ]
    assert found.is_right
    (a, b, y_again), _, (left, right, _), _, (part, _), _ = given.values()
    np.testing.assert_allclose(y_again, a.astype(np.float64) @ b, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(left, y_again.T[1:])
    np.testing.assert_array_equal(right, y_again)
    np.testing.assert_array_equal(part, y_again[2:, 1:3])


def test_what_a_worker_died_of_is_an_outcome(connected: Site) -> None:
    deadly = X.copy()
    deadly[0] = fault(KILL, "alpha")
    with lz.trace(tensors=True) as trace:
        lz.silu(deadly)
    assert trace.calls[0].backend == "beta"
    found = trace.run("alpha")
    assert [(one.outcome, one.is_right) for one in found.calls] == [("signal 9", False)]
    assert "1 failed" in str(found)
    assert trace.run().is_right
    with pytest.raises(lz.InvalidArgument, match="not both"):
        trace.run("alpha", env="all")


@pytest.mark.long
def test_the_command_makes_calls_again_by_a_broker_of_its_own(connected: Site, tmp_path: Path) -> None:
    with lz.trace(tensors=True) as trace:
        lz.silu(lz.silu(X))
    trace.save(tmp_path / "a")
    found = lz_command(connected, "trace", "run", str(tmp_path / "a"), "-b", "beta", "--json")
    assert [(one["backend"], one["difference"]) for one in data(found)["calls"]] == [("beta", 0.0)] * 2
    connected.connect()
    wrong = lz_command(connected, "trace", "run", str(tmp_path / "a"), "-b", "delta")
    assert wrong.returncode == USAGE
    both = lz_command(connected, "trace", "run", str(tmp_path / "a"), "-b", "beta", "--env", "all")
    assert both.returncode == USAGE
    assert "name --env all or --backend NAME, not both" in both.stderr
