"""lz.jit: a call as an object that keeps to a kernel, and turns to another one when it must. Against a real broker."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process.harness import Site

import layerzero as lz
from layerzero.ipc.errors import InvalidArgument, NoBackend

X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)
W = np.ones((6, 6), np.float32)
SPEC = lz.TensorSpec.contiguous("float32", (4, 6))


def silu(a: Any) -> Any:
    return a / (1 + np.exp(-a))


def test_an_executor_is_a_call_that_was_chosen(connected: Site) -> None:
    run = lz.jit("silu", SPEC)
    assert (run.op, run.kernel_id, run.backend, run.specs) == ("silu", "alpha.silu", "alpha", {"input": SPEC})
    assert run.report is None
    out = np.empty_like(X)
    for _ in range(3):
        assert np.allclose(run(X), silu(X))
        assert run(X, out=out) is out
        assert np.allclose(run(input=X[::-1]), silu(X[::-1]))
    lz.matmul(X, W)
    assert run.report is not None
    assert run.report.kernel_id == "alpha.silu"
    assert "prefer alpha.silu" in str(run.explain())
    assert run.changes == ()
    assert repr(run) == "<lz.Executor of silu(4x6:float32) by alpha.silu>"


def test_arrays_are_given_in_order_or_by_name_and_the_rest_is_fixed(connected: Site) -> None:
    run = lz.jit(lz.matmul, X, W)
    for result in (run(X, W), run(X, b=W), run(b=W, a=X)):
        assert np.allclose(result, X @ W)
    plan = lz.dry_run(run, X, W)  # it is asked, and nothing runs
    assert [call.kernel_id for call in plan.calls] == ["alpha.matmul"]


def test_a_backend_is_wished_for_and_not_an_argument(connected: Site) -> None:
    """The refusal says how."""
    with pytest.raises(InvalidArgument, match=r"leave out backend: an executor chooses.*with lz\.prefer\(NAME\)"):
        lz.jit("matmul", X, W, backend="beta")
    with lz.prefer("beta"):
        run = lz.jit("matmul", X, W)
    assert run.kernel_id == "beta.matmul"
    assert np.allclose(run(X, W), X @ W)
    assert (run.kernel_id, run.changes) == ("beta.matmul", ())


@pytest.mark.parametrize(
    ("args", "named", "why"),
    [
        ((X.T.copy(), W), {}, r"a is 6x4:float32; this executor was made for 4x6:float32"),
        ((X.astype(np.float64), W), {}, r"a is 4x6:float64"),
        ((X,), {}, r"1 arrays were given; allowed: a, b"),
        ((X, W, W), {}, r"3 arrays were given"),
        ((X,), {"c": W}, r"'c' is no array of it"),
        ((X, W), {"a": X}, r"'a' is no array of it, or was given twice"),
        ((X, "text"), {}, r"str"),
    ],
)
def test_what_it_was_not_made_for_is_refused(
    connected: Site, args: tuple[Any, ...], named: dict[str, Any], why: str
) -> None:
    run = lz.jit("matmul", X, W)
    run(X, W)
    with pytest.raises(InvalidArgument, match=why):
        run(*args, **named)
    assert np.allclose(run(X, W), X @ W)


def test_buffers_without_a_shape_are_looked_at_each_time(connected: Site) -> None:
    """An array of the standard library tells neither shape nor dtype before it is described."""
    run = lz.jit("silu", np.zeros(3, np.float32))
    data = memoryview(np.zeros(3, np.float32).tobytes()).cast("f")
    run(data)
    with pytest.raises(InvalidArgument, match="made for 3"):
        run(memoryview(bytes(16)).cast("f"))


def test_it_keeps_to_its_kernel_and_turns_when_policy_does(connected: Site) -> None:
    run = lz.jit("silu", SPEC)
    with lz.avoid("alpha"):
        assert np.allclose(run(X), silu(X))
    assert run.kernel_id == "beta.silu"
    (change,) = run.changes
    assert str(change) == "alpha.silu -> beta.silu: the broker has chosen it"
    run(X)
    assert run.report is not None
    assert run.report.kernel_id == "beta.silu"  # though the broker would take alpha again
    assert run.refresh()
    assert run.kernel_id == "alpha.silu"
    assert not run.refresh()
    assert len(run.changes) == 2


def test_a_worker_that_dies_ends_no_call_and_the_next_kernel_is_kept_to_also_by_another_broker(
    new_site: Callable[..., Site],
) -> None:
    site, other = new_site(failpoints="alpha:executing=kill@2", backoff_s=600, backoff_max_s=600), new_site()
    site.start().connect()
    run = lz.jit("silu", SPEC)
    for _ in range(4):
        assert np.allclose(run(X), silu(X))
    assert run.kernel_id == "beta.silu"
    (change,) = run.changes
    assert (change.old, change.new) == ("alpha.silu", "beta.silu")
    assert "alpha: " in change.why
    lz.disconnect()
    other.start().connect()
    assert np.allclose(run(X), silu(X))
    assert (run.kernel_id, len(run.changes)) == ("beta.silu", 1)
    assert run.report is not None


def test_another_process_loads_it_with_its_choice(connected: Site, tmp_path: Path) -> None:
    with lz.prefer("beta"):
        run = lz.jit("matmul", X, W)
    assert run.kernel_id == "beta.matmul"
    run.export(tmp_path / "mm.json")
    code = (
        "import sys, numpy as np; lz.connect(runtime_dir=sys.argv[1])\n"
        f"run = lz.Executor.load({str(tmp_path / 'mm.json')!r})\n"
        "x, w = np.ones((4, 6), np.float32), np.ones((6, 6), np.float32)\n"
        "print(run(x, w)[0, 0], run.report.kernel_id, run.changes)\n"
    )
    with connected.python(code) as process:
        assert process.stdout is not None
        assert process.stdout.read() == "6.0 beta.matmul ()\n"


def test_a_kernel_that_is_not_there_is_told_and_replaced(connected: Site, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    lz.jit("silu", SPEC).export(path)
    value = json.loads(path.read_text())
    path.write_text(json.dumps({**value, "kernel": "elsewhere.silu"}))
    run = lz.Executor.load(path)
    assert run.kernel_id == "alpha.silu"
    assert str(run.changes[0]) == "elsewhere.silu -> alpha.silu: elsewhere.silu cannot serve it (unknown here)"


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "other"},
        {"schema": 2},
        {"op": "no_such_op"},
        {"op": ["silu"]},
        {"arrays": {"input": ["float32", [4, -6], [6, 1]]}},
        {"arrays": {"other": ["float32", [4, 6], [6, 1]]}},
        {"arrays": None},
        {"params": {"backend": "alpha"}},
        {"kernel": 7},
        {"device": "../x"},
    ],
)
def test_a_file_that_is_none_is_refused(connected: Site, tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "x.json"
    lz.jit("silu", SPEC).export(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InvalidArgument, match="export it again"):
        lz.Executor.load(path)


def test_files_that_cannot_be_read_and_calls_that_nobody_serves_are_told(connected: Site, tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text('{"kind"')
    with pytest.raises(InvalidArgument, match="export it again"):
        lz.Executor.load(tmp_path / "cut.json")
    with pytest.raises(InvalidArgument, match="name a file"):
        lz.Executor.load(tmp_path / "nothing.json")
    with pytest.raises(NoBackend, match="nobody serves silu"):
        with lz.avoid("*"):
            lz.jit("silu", SPEC)
