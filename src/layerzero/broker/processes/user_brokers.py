"""Brokers of other users: each user who may connect (`--allow-uid`) gets a broker of his own, and so workers of his
own, which have no memory of anybody else. The broker that he came to starts it and tells him where it is.

They end with the broker that started them. Where workers register themselves there are none: those serve all users.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from layerzero.broker.io.poller import Poller
from layerzero.ipc.errors import BrokerLost, ConfigError, LayerZeroError, from_wire
from layerzero.ipc.logs import log
from layerzero.ipc.transport import control
from layerzero.ipc.transport.endpoints import Endpoints
from layerzero.ipc.transport.plain import unpack_body

START_TIMEOUT_S = 30.0
STOP_GRACE_S = 6.0  # a little more than a broker gives its workers
READY = b"1"  # what a broker writes when clients may connect; anything else is its error
Answer = Callable[[Path | LayerZeroError], None]


@dataclass(eq=False)
class _UserBroker:
    uid: int
    endpoints: Endpoints
    popen: subprocess.Popen[bytes]
    pidfd: int
    ready_fd: int  # -1 once it has said so
    started_s: float
    waiting: list[Answer] = field(default_factory=list)


class UserBrokers:
    """`note_change` is told when `is_empty` may be another. `stays`: they end with us alone, not with their last
    client."""

    def __init__(self, endpoints: Endpoints, poller: Poller, note_change: Callable[[], None], *, stays: bool) -> None:
        self._endpoints = endpoints
        self._poller = poller
        self._note_change = note_change
        self._stays = stays
        self._brokers: dict[int, _UserBroker] = {}

    @property
    def is_empty(self) -> bool:
        return not self._brokers

    def facts(self) -> list[dict[str, object]]:
        """For people: user, pid and folder of each."""
        return [
            {"uid": uid, "pid": broker.popen.pid, "runtime_dir": str(broker.endpoints.folder)}
            for uid, broker in sorted(self._brokers.items())
        ]

    def find(self, uid: int, answer: Answer) -> None:
        """Call `answer`, now or later, with the control socket of this user's broker, which is started if need be, or
        with why there is none."""
        broker = self._brokers.get(uid)
        if broker is None:
            try:
                broker = self._start(uid)
            except OSError as exc:
                answer(BrokerLost(f"no broker can be started for user {uid}: {exc.strerror or exc}"))
                return
            except LayerZeroError as exc:
                answer(exc)
                return
        if broker.ready_fd < 0:
            answer(broker.endpoints.control)
        else:
            broker.waiting.append(answer)

    def _start(self, uid: int) -> _UserBroker:
        endpoints = Endpoints(self._endpoints.folder / f"user-{uid}")
        _make_folder(endpoints.folder)
        ready_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        popen: subprocess.Popen[bytes] | None = None
        try:
            command = [sys.executable, "-P", "-m", "layerzero.broker", "--for-uid", str(uid)]
            command += ["--parent-pid", str(os.getpid())]
            command += ["--runtime-dir", str(endpoints.folder), "--ready-fd", str(write_fd)]
            with open(endpoints.log, "ab", opener=_private) as log_file:
                popen = subprocess.Popen(
                    [*command, *(["--stays"] if self._stays else [])],
                    stdin=subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=log_file,
                    cwd="/",
                    pass_fds=(write_fd,),
                    start_new_session=True,
                )
            broker = _UserBroker(uid, endpoints, popen, os.pidfd_open(popen.pid), ready_fd, time.monotonic())
        except BaseException:
            os.close(ready_fd)
            if popen is not None:
                popen.kill()
                popen.wait()
            raise
        finally:
            os.close(write_fd)
        self._brokers[uid] = broker
        self._poller.watch(ready_fd, lambda: self._hear(broker))
        self._poller.watch(broker.pidfd, lambda: self._end(broker))
        log("user_broker.started", uid=uid, pid=popen.pid)
        self._note_change()
        return broker

    def _hear(self, broker: _UserBroker) -> None:
        """It is ready, or says why it cannot be; one that says nothing ends without a word."""
        word = b""
        with suppress(OSError):
            word = os.read(broker.ready_fd, 1 << 16)
        self._forget_ready_fd(broker)
        if word == READY:
            self._answer_all(broker, broker.endpoints.control)
        elif word:
            try:
                error = from_wire(unpack_body(word))
            except LayerZeroError as exc:
                error = exc
            self._answer_all(broker, error)

    def _forget_ready_fd(self, broker: _UserBroker) -> None:
        if broker.ready_fd >= 0:
            self._poller.unwatch(broker.ready_fd)
            os.close(broker.ready_fd)
            broker.ready_fd = -1

    @staticmethod
    def _answer_all(broker: _UserBroker, found: Path | LayerZeroError) -> None:
        waiting, broker.waiting = broker.waiting, []
        for answer in waiting:
            answer(found)

    def _end(self, broker: _UserBroker) -> None:
        if not control.is_readable(broker.pidfd):
            return  # an event of another descriptor that had this number before
        if broker.ready_fd >= 0:
            self._hear(broker)  # its last word
        code = self._let_go(broker)
        text = f"the broker for user {broker.uid} did not start (exit code {code}); see {broker.endpoints.log}"
        self._answer_all(broker, BrokerLost(text))
        self._note_change()

    def _let_go(self, broker: _UserBroker) -> int:
        """Of one that has ended. Returns its exit code."""
        self._forget_ready_fd(broker)
        self._poller.unwatch(broker.pidfd)
        os.close(broker.pidfd)
        del self._brokers[broker.uid]
        code = broker.popen.wait()
        log("user_broker.ended", uid=broker.uid, exit_code=code)
        return code

    def look(self, now_s: float) -> None:
        """Kill those that do not start."""
        for broker in self._brokers.values():
            if broker.ready_fd >= 0 and now_s > broker.started_s + START_TIMEOUT_S:
                broker.popen.kill()

    def close(self) -> None:
        """End all: what runs is finished. Returns when they have ended."""
        for broker in self._brokers.values():
            broker.popen.terminate()
        end_s = time.monotonic() + STOP_GRACE_S
        for broker in list(self._brokers.values()):
            if not control.is_readable(broker.pidfd, end_s - time.monotonic()):
                broker.popen.kill()
            self._let_go(broker)


def _make_folder(folder: Path) -> None:
    """Ours, and open to the user, who finds his sockets there by name. Raises ConfigError, OSError."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o711)
    info = folder.lstat()
    if folder.is_symlink() or not folder.is_dir() or info.st_uid != os.getuid():
        raise ConfigError(f"remove {folder}: the folder of a user's broker must be the broker's own, and no link")
    folder.chmod(0o711)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
