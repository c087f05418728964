"""Traces that programs write because policy wants them, or `lz trace on`: of the calls that are meant and no others."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.process.harness import Site, made_on, wait_until
from tests.process.test_cli import data
from tests.process.test_cli import lz as command
from tests.process.test_express import X

import layerzero as lz
from layerzero.client.connection import observing
from layerzero.client.traces import wanted

CALLS = (
    "import numpy as np\n"
    "lz.connect()\n"
    "x = np.ones(8, np.float32)\n"
    "for n in range(200): lz.silu(x)\n"
    "for n in range(100): lz.silu(x, backend='beta')\n"
    "print(lz.last_report().path)\n"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAYERZERO_TRACE_DIR", str(tmp_path / "traces"))
    return tmp_path / "traces"


def test_policy_wants_a_share(new_site: Callable[..., Site], folder: Path) -> None:
    """Of alpha's calls one in four, of beta's none; a program that knows nothing of it writes its file at its end."""
    site = new_site()
    site.environ["LAYERZERO_TRACE_DIR"] = str(folder)
    site.set_policy(
        "traces:\n"
        "- {kernel: 'alpha.*', op: silu, process: '*train*', share: 0.25}\n"
        "- {kernel: 'beta.*', process: '*serve*', share: 1}\n"
        "backend_isolation: subprocess\n"
    )
    site.start().connect()
    site.wait_ready("alpha", "beta")
    script = folder.with_name("train.py")
    script.write_text(f"import layerzero as lz\n{CALLS}")
    program = site.python(f"import os, sys\nos.execv(sys.executable, [sys.executable, {str(script)!r}])")
    out, _ = program.communicate(timeout=120)
    assert (program.returncode, out.split()) == (0, ["express"])
    [path] = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    calls = lz.load_trace(path).calls
    assert {call.kernel_id for call in calls} == {"alpha.silu"}
    assert {"broker", "express"} >= {call.path for call in calls} >= {"express"}
    assert 20 <= len(calls) <= 85  # 199 of 25 %: beyond either with a chance of one in a million


def test_it_is_switched_on_and_off_while_programs_run(new_site: Callable[..., Site], folder: Path) -> None:
    site = new_site()
    site.start().connect()
    site.wait_ready("alpha", "beta")
    made_on("express", lambda: lz.silu(X))
    assert observing.recorder is None
    told = data(command(site, "trace", "on", "*.silu", "--json", LAYERZERO_TRACE_DIR=str(folder)))
    assert told == {"traces": {"*.silu": 1.0}, "folder": str(folder)}
    wait_until(lambda: lz.silu(X) is not None and observing.recorder is not None)
    made_on("express", lambda: lz.silu(X))
    assert lz.session().ask("tracing", traces={}) == {"traces": {}}
    wait_until(lambda: lz.silu(X) is not None and observing.recorder is None)
    wait_until(lambda: [*folder.glob("*.lztrace")])
    [row] = data(command(site, "trace", "list", "--json", LAYERZERO_TRACE_DIR=str(folder)))["traces"]
    calls = lz.load_trace(row["file"]).calls
    assert {call.name for call in calls} == {"silu"}
    assert "express" in {call.path for call in calls}
    with pytest.raises(lz.InvalidArgument, match="did you mean"):
        lz.session().ask("tracing", traces={"alpha.sillu": 1})


def test_what_is_switched_off_and_on_at_once_is_recorded(no_leaks: None, folder: Path) -> None:
    """In a file of its own: the one before ends in its own time."""

    class SomeRoute:
        """Stands for a route, of which it is its identity that counts."""

    ours, route = wanted.Wanted(), SomeRoute()
    ours.take(route, 1.0)  # type: ignore[arg-type]
    first, path = ours._trace, ours._path
    ours.take(route, 0.0)  # type: ignore[arg-type]
    ours.take(route, 1.0)  # type: ignore[arg-type]
    assert first is not None
    wait_until(lambda: not first.is_on)
    assert ours._trace is not None
    assert ours._trace.is_on
    assert ours._path != path
    ours.take(route, 0.0)  # type: ignore[arg-type]
    wait_until(lambda: ours._trace is not None and not ours._trace.is_on)


def test_files_are_bounded(folder: Path) -> None:
    folder.mkdir()
    for n in range(wanted.MOST_FILES + 3):
        (folder / f"{n:03}.lztrace").write_text(json.dumps(n))
    (folder / "mine.txt").write_text("not ours")
    wanted.keep_within(folder)
    left = sorted(one.name for one in folder.iterdir())
    assert "mine.txt" in left
    assert len(left) <= wanted.MOST_FILES + 1
