"""client/cli/broker.py: `lz down` ends the broker that it means, and has ended it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from layerzero.client.cli import broker
from layerzero.client.connection import start
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.transport.endpoints import Endpoints

STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True));"
    " print('up', flush=True); signal.pthread_sigmask(signal.SIG_BLOCK, []);\n"
    "while True: signal.pause()"
)


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    """A process that says so when it is asked to end, and goes on."""
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def pids(monkeypatch: pytest.MonkeyPatch, *found: int | None) -> None:
    """What the lock of the runtime folder says, look by look."""
    left = list(found)
    monkeypatch.setattr(start, "broker_pid", lambda where: left.pop(0))


def test_a_broker_that_does_not_end_is_not_called_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: subprocess.Popen[str]
) -> None:
    """Who starts the next one would meet its lock."""
    pids(monkeypatch, other.pid, other.pid, other.pid, other.pid)
    monkeypatch.setattr(broker, "STOP_TIMEOUT_S", 0.01)
    with pytest.raises(LayerZeroError, match="has not ended within"):
        broker.stop(Endpoints(tmp_path), force=False)
    assert other.stdout is not None
    assert other.stdout.readline() == "asked\n"
    monkeypatch.setattr(broker, "STOP_TIMEOUT_S", 60.0)
    assert broker.stop(Endpoints(tmp_path), force=True) == other.pid


def test_a_process_that_has_got_a_dead_brokers_number_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: subprocess.Popen[str]
) -> None:
    """It would be killed for nothing."""
    pids(monkeypatch, other.pid, None)
    assert broker.stop(Endpoints(tmp_path), force=True) is None
    assert other.poll() is None
