"""A node's broker: started as any other, held by a connection, and started again when it dies."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import threading
import time
from pathlib import Path

from layerzero.client.connection import node, start
from layerzero.client.session.session import Session
from layerzero.ipc.errors import BrokerLost, LayerZeroError
from layerzero.ipc.logs import log
from layerzero.ipc.transport import control
from layerzero.ipc.version import __version__

BACKOFF_S, BACKOFF_MAX_S = 0.1, 5.0  # doubles with each death that follows soon
CALM_S = 60.0  # a broker that has lived so long had no part in the deaths before
STOP_S = 10.0
LOCK_S = 10.0  # so long the agent before may take to end


class NodeBroker:
    """Of one node. The broker ends with its last client, and the agent is one: it outlives an agent that is killed as
    long as programs need it, and nothing of it is left on a node whose Ray is gone."""

    def __init__(self, folder: Path) -> None:
        """Raises LayerZeroError when another agent has the folder. A broker that cannot be started is a `problem`, and
        is tried again."""
        self.where = start.endpoints(folder)
        self.restarts = 0
        self.problem = ""
        self._session: Session | None = None
        self._changed = threading.Condition()
        self._lock_fd = _locked(node.lock_of(folder))
        self._told, self._tell = os.pipe2(os.O_CLOEXEC)
        self._connect()
        self._watcher = threading.Thread(target=self._keep, name="broker-watch", daemon=True)
        self._watcher.start()

    def session(self, within_s: float = start.START_TIMEOUT_S) -> Session:
        """A connection to the broker that runs; waits for one that is being started. Raises BrokerLost."""
        until_s = time.monotonic() + within_s
        with self._changed:
            while (found := self._session) is None or not found.is_alive:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise BrokerLost(f"the broker of this node does not run: {self.problem or 'it is being started'}")
                self._changed.wait(min(left_s, BACKOFF_S))
            return found

    def stop(self) -> None:
        """End the broker, which finishes what it runs, and let go of the folder."""
        os.write(self._tell, b"x")
        self._watcher.join()
        with self._changed:
            session, self._session = self._session, None
        if session is not None:
            _end(session.broker_pid)
            session.close()
        node.lock_of(self.where.folder).unlink(missing_ok=True)
        for fd in (self._lock_fd, self._told, self._tell):
            os.close(fd)

    def _connect(self) -> bool:
        """Whether a broker runs now, and there is a connection to it."""
        try:
            start.ensure_broker(self.where, stays=False)
            made = Session(self.where.control, __version__, start.secret_key())
        except (LayerZeroError, OSError) as exc:
            self.problem = str(exc)
            log("agent.no_broker", folder=str(self.where.folder), detail=self.problem)
            return False
        with self._changed:
            self._session, self.problem = made, ""
            self._changed.notify_all()
        log("agent.broker", folder=str(self.where.folder), pid=made.broker_pid)
        return True

    def _keep(self) -> None:
        """Until `stop`: another broker for each that dies."""
        delay_s = BACKOFF_S
        while True:
            began_s = time.monotonic()
            if self._session is not None:
                if self._is_told_before(self._session.broker_pid):
                    return
                self._session.close()
                self.restarts += 1
            delay_s = BACKOFF_S if time.monotonic() - began_s > CALM_S else min(2 * delay_s, BACKOFF_MAX_S)
            while True:
                if select.select([self._told], [], [], delay_s)[0]:
                    return
                if self._connect():
                    break
                delay_s = min(2 * delay_s, BACKOFF_MAX_S)

    def _is_told_before(self, pid: int) -> bool:
        """False when that broker has ended."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        try:
            poll = select.poll()
            for fd in (pidfd, self._told):
                poll.register(fd, select.POLLIN)
            return self._told in {fd for fd, _ in poll.poll()}
        finally:
            os.close(pidfd)


def _end(pid: int) -> None:
    """Tell a broker to end, and wait for that."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        if not control.is_readable(pidfd, STOP_S):
            raise LayerZeroError(f"the broker (pid {pid}) has not ended within {STOP_S:g} s; it waits for its calls")
    except ProcessLookupError:
        return
    finally:
        os.close(pidfd)


def _locked(path: Path) -> int:
    """The lock of the folder's agent. The kernel lets go of it when this process ends."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until_s = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until_s:
                os.close(fd)
                raise LayerZeroError(f"another agent has {path.parent}: lz cluster down, then lz cluster up") from None
            time.sleep(BACKOFF_S)
        else:
            os.ftruncate(fd, 0)
            os.write(fd, str(os.getpid()).encode())
            return fd
