"""breakpoint() in a function of an environment, and `lz attach`: through a real broker, from another process."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process import forks
from tests.process import isolated_functions as fn
from tests.process.function_site import serving
from tests.process.harness import ROOT, Site, wait_until

import layerzero as lz
from layerzero.ipc.functions.attach import FOLDER

BACKEND = fn.PLAIN.backend


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    forks.start_server()
    one = Site(tmp_path_factory.mktemp("store"))
    with serving(one, fn.PLAIN):
        yield one


def attach(site: Site, *name: str) -> subprocess.Popen[str]:
    with site.environment():
        return subprocess.Popen(
            [sys.executable, "-m", "layerzero.client.cli.app", "attach", *name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "LAYERZERO_RUNTIME_DIR": str(site.folder)},
        )


def waiting(site: Site) -> list[Path]:
    folder = site.folder / FOLDER
    return [path for path in folder.iterdir() if path.name.startswith(BACKEND)] if folder.exists() else []


def debug(site: Site, commands: str, function: Callable[..., Any], *args: Any) -> tuple[Any, str, str]:
    """A call, and what the debugger said; the future of it, and stdout and stderr of `lz attach`."""
    future = function.submit(*args)  # type: ignore[attr-defined]
    wait_until(lambda: waiting(site))
    out, err = attach(site, "plain").communicate(commands, timeout=60)
    return future, out, err


def test_a_function_at_a_breakpoint_is_debugged(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    future, out, err = debug(site, "p other * 10\nw\nother = 7\nc\n", fn.debugged, 4)
    assert future.result(60) == 7
    assert "\n50\n" in out.replace("(Pdb) ", "\n")
    assert "isolated_functions.py" in out
    assert f"attached to {BACKEND}." in err
    said = capfd.readouterr().err
    line = next(text for text in said.splitlines() if "at a breakpoint" in text)
    assert line.startswith("[plain] tests.process.isolated_functions.debugged is at a breakpoint, ")
    assert line.endswith(f"; run: lz attach {BACKEND}")
    assert waiting(site) == []
    assert stat.S_IMODE((site.folder / FOLDER).stat().st_mode) == 0o700


def test_breakpoints_in_a_loop_are_one_session(site: Site) -> None:
    future, out, _ = debug(site, "p number\nc\np number\nc\np number\nc\n", fn.debugged_in_a_loop, 3)
    assert future.result(60) == 3
    assert [text for text in out.replace("(Pdb) ", "\n").split() if text in "012"] == ["0", "1", "2"]


def test_steps_end_with_the_function(site: Site) -> None:
    """What serves it is stepped over."""
    future, out, _ = debug(site, "n\n" * 20, fn.debugged, 1)
    assert future.result(60) == 2
    assert "serving.py" not in out


def test_who_leaves_lets_it_go_on(site: Site) -> None:
    future, _, _ = debug(site, "", fn.debugged, 4)
    assert future.result(60) == 5
    future = fn.debugged.submit(5)
    wait_until(lambda: waiting(site))
    other = attach(site)
    assert other.stdout is not None
    assert other.stdout.read(1)
    other.kill()
    other.communicate()
    assert future.result(60) == 6


def test_quitting_ends_the_call(site: Site) -> None:
    future, _, _ = debug(site, "q\n", fn.debugged, 4)
    with pytest.raises(lz.RemoteError, match="BdbQuit"):
        future.result(60)
    assert fn.echo(1) == 1


def test_a_deadline_at_a_breakpoint_says_so(site: Site) -> None:
    """And leaves nothing that could be attached to."""
    with pytest.raises(lz.DeadlineExceeded, match="it was at a breakpoint: give it longer, with timeout_s="):
        fn.debugged.options(timeout_s=0.5)(4)
    _, err = attach(site, "plain").communicate(timeout=60)
    assert "no function waits at a breakpoint" in err
    assert waiting(site) == []


def test_one_of_several_is_named(site: Site) -> None:
    pair = fn.debugged.options(workers=2)
    futures = [pair.submit(number) for number in range(2)]
    wait_until(lambda: len(waiting(site)) == 2)
    _, err = attach(site).communicate("c\n", timeout=60)
    assert "several functions wait at breakpoints; name one of: " in err
    for name in (BACKEND, f"{BACKEND}.2"):
        _, err = attach(site, name).communicate("c\n", timeout=60)
        assert f"attached to {name}." in err
    assert sorted(future.result(60) for future in futures) == [1, 2]
    _, err = attach(site, "strange").communicate(timeout=60)
    assert "no function waits at a breakpoint" in err


def test_a_program_may_want_no_breakpoints(site: Site) -> None:
    """As Python has it: PYTHONBREAKPOINT=0. The function goes on, and says so."""
    code = (
        "import sys\nlz.connect(runtime_dir=sys.argv[1])\nfrom tests.process import isolated_functions as fn\n"
        "print(fn.debugged(1))"
    )
    os.environ["PYTHONBREAKPOINT"] = "0"
    try:
        other = site.python(code, stderr=subprocess.PIPE)
    finally:
        del os.environ["PYTHONBREAKPOINT"]
    out, err = other.communicate(timeout=60)
    assert out == "2\n"
    assert "breakpoint() passed over" in err
