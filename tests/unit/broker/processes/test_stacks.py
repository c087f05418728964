"""Where a worker hangs is told by py-spy, which sends it no signal: when it is asked, and what stands for an answer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from layerzero.broker.processes import stacks
from layerzero.ipc.shm import memory

REAL = stacks.find(os.environ.get("PATH", ""))


@dataclass
class Worker:
    page: memory.ControlPage
    pid: int = 4711
    look: stacks.Look | None = None


@pytest.fixture
def worker() -> Iterator[Worker]:
    fd = memory.create_memfd("page", memory.PAGE_BYTES)
    page = memory.ControlPage(fd, writable=True)
    yield Worker(page)
    page.close()
    os.close(fd)


@pytest.fixture
def spy(tmp_path: Path) -> Callable[[str], str]:
    """A py-spy that does this."""

    def make(script: str) -> str:
        path = tmp_path / "py-spy"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return make


def test_a_call_is_looked_at_when_it_takes_long_and_then_ever_more_seldom(
    worker: Worker, spy: Callable[[str], str]
) -> None:
    watch = stacks.StackWatch(1.0, spy('echo "$*"'))
    seen = []
    worker.page.write(7, 1)
    for now_s in range(20):
        worker.look = None
        watch.look_at(worker, now_s)
        if worker.look is not None:
            assert (worker.look.executing, worker.look.lasted_s) == (7, now_s)
            assert worker.look.text == "dump --nonblocking --pid 4711"
            seen.append(now_s)
    assert seen == [1, 2, 4, 8, 16]


def test_another_call_begins_anew_and_one_that_rests_is_left_alone(worker: Worker, spy: Callable[[str], str]) -> None:
    watch = stacks.StackWatch(1.0, spy("echo here"))
    for now_s, executing in enumerate([7, 8, 9, 0, 0, 0]):
        worker.page.write(executing, 1)
        watch.look_at(worker, now_s)
    assert worker.look is None


def test_of_one_that_has_ended_nothing_is_asked(spy: Callable[[str], str]) -> None:
    fd = memory.create_memfd("page", memory.PAGE_BYTES)
    page = memory.ControlPage(fd, writable=True)
    os.close(fd)
    page.close()
    ended = Worker(page)
    stacks.StackWatch(1.0, spy("echo here")).look_at(ended, 0.0)
    assert ended.look is None


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("echo Permission Denied: sudo >&2; exit 1", r"none: py-spy may not look .*kernel\.yama\.ptrace_scope"),
        ("echo no such thing >&2; exit 3", "none: py-spy ended with 3: no such thing"),
        ("exit 3", "none: py-spy ended with 3: without a word"),
        ("exec sleep 9", "none: py-spy had not answered within 0.05 s"),
        ("yes frame", "(frame\n){500}"),
    ],
    ids=["may not", "cannot", "dumb", "slow", "talks too much"],
)
def test_why_there_are_none_is_said(
    spy: Callable[[str], str], script: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script.startswith("exec sleep"):
        monkeypatch.setattr(stacks, "SPY_S", 0.05)
    script = "yes frame | head -c 1000000" if script.startswith("yes") else script
    said = stacks.dump(spy(script), 4711)
    assert len(said) <= stacks.MAX_TEXT_BYTES
    assert re.match(text, said)


def test_a_program_that_is_not_there_is_named() -> None:
    assert stacks.dump("/nowhere/py-spy", 4711).startswith("none: py-spy cannot be started: ")


@pytest.mark.skipif(REAL is None, reason="py-spy is not installed: pip install 'layerzero-broker[stacks]'")
def test_the_real_one_names_the_line_and_disturbs_no_wait() -> None:
    """A signal would end the pause that the process is in."""
    code = "import signal\ndef here():\n    print('paused', flush=True)\n    signal.pause()\n    print('woken')\nhere()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        said = stacks.dump(REAL or "", process.pid)
        process.send_signal(signal.SIGKILL)
        assert process.stdout.read() == ""
    assert "here (<string>:4)" in said or said.startswith("none: py-spy may not look"), said
