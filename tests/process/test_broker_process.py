"""How a broker process begins and ends: its lock, and an end that waits for nothing."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.process.harness import Site, processes, wait_ended, wait_until

import layerzero as lz
from layerzero.broker import run

LOADS_FOR_EVER = "import threading\ndef load():\n    threading.Event().wait()\n"


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[Callable[[], int]]:
    """Open the lock file anew, as another process would."""
    opened: list[int] = []

    def open_again() -> int:
        opened.append(os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT))
        return opened[-1]

    yield open_again
    for fd in opened:
        os.close(fd)


def test_a_broker_starts_although_somebody_just_looks_at_its_lock(
    lock: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lz status` of another terminal holds the lock for a moment to see who has it; that is no broker."""
    visitor = lock()
    fcntl.flock(visitor, fcntl.LOCK_SH)
    monkeypatch.setattr(run.time, "sleep", lambda _: fcntl.flock(visitor, fcntl.LOCK_UN))
    assert run._lock(lock())


def test_a_second_broker_gives_up_on_the_lock(lock: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two brokers would fight for the same sockets."""
    fcntl.flock(lock(), fcntl.LOCK_EX)
    waits: list[float] = []
    monkeypatch.setattr(run.time, "sleep", waits.append)
    assert not run._lock(lock())
    assert 0.5 < sum(waits) < 5


def test_a_broker_that_probes_ends_at_once(new_site: Callable[..., Site]) -> None:
    """A probe may take minutes; its thread must not keep the process, its lock and its name."""
    site = new_site(start_timeout_s=600)
    site.add_backend("endless", provider=LOADS_FOR_EVER)
    pid = site.connect().broker_pid
    call = lz.submit("null", backend="endless")
    wait_until(lambda: any("layerzero.workers.probe" in command for command in processes(site.folder).values()))
    os.kill(pid, signal.SIGTERM)
    wait_ended(pid)
    wait_until(lambda: processes(site.folder) == {})
    with pytest.raises(lz.BrokerLost):
        call.result()
    assert site.connect().broker_pid != pid


def test_a_signal_that_another_thread_gets_ends_the_broker_all_the_same(new_site: Callable[..., Site]) -> None:
    """The system picks the thread; the one that must act may be asleep for an hour."""
    site = new_site()
    site.connect()
    site.wait_ready("alpha")
    for _ in range(2):  # the first run of a kernel warms up, and is not stored
        lz.null(backend="alpha")
    wait_until(lambda: lz.status()["times"]["stored"] > 0)  # nothing is left that would wake it soon
    pid = site.broker_pid
    assert pid is not None
    others = [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir() if int(entry.name) != pid]
    assert ctypes.CDLL(None).tgkill(pid, max(others), signal.SIGTERM) == 0
    wait_ended(pid)


def test_a_signal_ends_a_broker_in_order_from_when_it_says_that_it_is_ready(new_site: Callable[..., Site]) -> None:
    """Else it leaves sockets, and a lock that a watchdog takes for a crash's. Its word is held up by a full pipe."""
    site = new_site()
    ready, told = os.pipe2(os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(told, b"." * 4096)
    os.set_blocking(told, True)
    command = [sys.executable, "-m", "layerzero.broker", "--runtime-dir", str(site.folder), "--ready-fd", str(told)]
    broker = subprocess.Popen(
        [*command, "--stays"], pass_fds=[told], stderr=subprocess.PIPE, env={**os.environ, **site.environ}
    )
    with broker:
        assert broker.stderr is not None
        for line in broker.stderr:
            if b"broker.started" in line:
                break
        broker.send_signal(signal.SIGTERM)
        os.set_blocking(ready, True)
        os.close(told)
        while os.read(ready, 65536):  # until the broker has closed its end
            pass
        os.close(ready)
        broker.stderr.read()
    assert broker.returncode == 0
    assert [path.name for path in site.folder.iterdir() if path.is_socket()] == []
    assert (site.folder / "broker.lock").read_bytes() == b"ended"
