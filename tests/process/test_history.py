"""A broker's history: kept by a process beside it, and shown later by `lz top` and `lz report`."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.backends.toy import KILL
from tests.process.harness import Site, wait_ended, wait_until
from tests.process.test_cli import command as arguments
from tests.process.test_cli import lz as command
from tests.process.test_express import X, bad, settle

import layerzero as lz
from layerzero.client.history.history_file import HistoryFile, path_of
from layerzero.client.history.sample import Sample
from layerzero.ipc.errors import InvalidArgument

Make = Callable[..., Site]


def kept(path: Path) -> Sample:
    """All that is in it."""
    found = Sample()
    try:
        file = HistoryFile.read(path)
    except InvalidArgument:
        return found
    now = time.time()
    for one in file.between(now - 600, now + 5):
        found.add(one.sample)
    file.close()
    return found


@pytest.fixture
def site(new_site: Make, tmp_path: Path) -> Site:
    made = new_site(history=1)
    made.use_store(tmp_path)
    made.start().connect()
    return made


def file_of(site: Site) -> Path:
    return path_of(Path(site.environ["LAYERZERO_STORE"]), site.folder)


def test_calls_and_a_death_are_kept_and_shown(site: Site, tmp_path: Path) -> None:
    """Every call once, whichever way it took; then by the commands, without a broker, too."""
    site.wait_ready("alpha", "beta")
    settle()
    for _ in range(50):
        lz.silu(X)
    lz.silu(bad(KILL, "alpha"))
    told = sum(row["calls"] for row in lz.status()["calls"])
    file = file_of(site)
    wait_until(lambda: kept(file).total().count == told)
    found = kept(file)
    assert found.fallbacks == {("silu", "alpha", "BACKEND_ERROR"): 1}
    assert found.restarts["alpha", "crash"] == 1
    assert {found.workers[name].state for name in ("alpha", "beta")} <= {"ready", "backoff", "probing", "starting"}
    assert found.workers["beta"].memory_bytes > 1 << 20

    pid = site.broker_pid
    assert pid is not None
    lz.disconnect()
    os.kill(pid, signal.SIGTERM)
    wait_ended(pid)
    printed = command(site, "report", "--last", "10min").stdout
    assert re.search(r"\b1 fallbacks, 0 errors", printed)
    assert "express" in printed
    page = tmp_path / "report.html"
    assert command(site, "report", "--last", "10min", "--html", str(page)).returncode == 0
    text = page.read_text()
    assert f"{told:,} calls ended well" in text
    assert not re.search(r"<script|https?://", text)
    span = HistoryFile.read(file).span()
    assert span is not None
    back = command(site, "top", "--at", time.strftime("%H:%M:%S", time.localtime(span[1])))
    assert (back.returncode, "alpha" in back.stdout) == (0, True)
    assert "nothing was kept" in command(site, "top", "--at", "2001-01-01 00:00").stderr
    for long in ("99999999d", "99999999999999d"):  # as far back as there is something
        begins = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(span[0]))
        assert command(site, "report", "--last", long).stdout.startswith(begins)
    assert "--at TIME" in command(site, "top", "--once", "--history", str(file)).stderr
    own, theirs = pty.openpty()  # with a terminal likewise: it would show the broker
    shown = subprocess.run(
        **arguments(site, ("top", "--history", str(file)), TERM="xterm"),
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(own)
    os.close(theirs)
    assert "--at TIME" in shown.stderr


def test_looking_on_keeps_no_broker(new_site: Make, tmp_path: Path) -> None:
    """One that a program has started ends with the program, although its recorder and its exporter are clients."""
    site = new_site(history=1, metrics=f"unix:{tmp_path}/metrics.sock")
    site.use_store(tmp_path)
    site.connect()
    lz.silu(X)
    file = file_of(site)
    wait_until(lambda: kept(file).total().count > 0)
    [recorder] = [one["pid"] for one in site.events("history.started")]
    pid = site.broker_pid
    assert pid is not None
    lz.disconnect()
    wait_ended(pid)
    wait_ended(recorder)


def test_a_recorder_that_dies_is_started_again(site: Site) -> None:
    """The housekeeping sees it; what was kept stays."""
    file = file_of(site)
    wait_until(lambda: kept(file).seconds > 0)
    [started] = site.events("history.started")
    os.kill(started["pid"], signal.SIGKILL)
    wait_until(lambda: len(site.events("history.started")) == 2)
    before = kept(file).total().count
    lz.silu(X)
    wait_until(lambda: kept(file).total().count > before)


def test_top_without_a_broker_says_what_to_do(new_site: Make) -> None:
    """As the other commands do."""
    found = command(new_site(), "top", "--once")
    assert (found.returncode, "lz up" in found.stderr) == (3, True)
