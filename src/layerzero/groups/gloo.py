"""Calls of all ranks by torch's gloo: each rank has a process of torch's environment, with an isolated object."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from layerzero.client.facade import default_session
from layerzero.envs.build.build import find, resolve
from layerzero.envs.functions import default_store
from layerzero.functions.environment import FunctionEnv, env
from layerzero.functions.objects import IsolatedClass
from layerzero.functions.options import Options
from layerzero.groups import faults
from layerzero.groups.choices import START_S
from layerzero.groups.inside import lz_gloo
from layerzero.groups.peers import Peers
from layerzero.ipc.errors import (
    BackendError,
    BrokerLost,
    ConfigError,
    DeadlineExceeded,
    EnvError,
    LayerZeroError,
    NotConnected,
    RemoteError,
)
from layerzero.ipc.functions.frames import Code
from layerzero.ipc.functions.surface import surface_of
from layerzero.ipc.transport import control

_BLAME_S = 0.5  # so long a rank whose gloo failed waits for the one that knows why
_WORD_S = 0.25
_FILE = Path(lz_gloo.__file__)


def environment() -> FunctionEnv:
    """The store's environment of torch, as one that runs functions. Raises EnvError where it is not built."""
    try:
        built = find(resolve("torch"), store=default_store(os.environ))
    except ConfigError as exc:
        raise EnvError(exc.message) from exc
    if not built.is_built:
        raise EnvError("run: lz env build torch\nbackend gloo of groups is torch's, which is not built", env="torch")
    return env("groups-gloo", from_interpreter=built.prefix)


class Gloo:
    """This rank's process of a group's gloo. `copies` are those of the last call."""

    def __init__(self, runtime: Path, group: str, generation: int, rank: int, where: FunctionEnv | None) -> None:
        self._path = runtime / "groups" / f"{group}.{generation}.gloo"
        self._rank, self._where = rank, where
        self._object: Any = None
        self._class: Any = None
        self._process: int | None = None  # a descriptor, which its end makes readable
        self.copies: tuple[Any, ...] = ()

    @property
    def is_started(self) -> bool:
        return self._object is not None

    def why_not(self) -> str:
        """Why it cannot be started here, with the command; empty where it can."""
        try:
            where = self._where or environment()
            unready = where.unready()
            if unready is not None and self._where is None and "not built" in str(unready.facts.get("cause")):
                where.build(quiet=True)  # torch is there: it is looked at, nothing is installed
                unready = where.unready()
            default_session.session()
        except LayerZeroError as exc:
            return exc.message
        self._where = where
        return "" if unready is None else unready.message

    def place(self) -> str:
        """It is on no GPU."""
        return ""

    def start(self, peers: Peers, size: int, until_s: float) -> None:
        """With all other ranks. Raises GroupBroken."""
        assert self._where is not None
        options = Options(timeout_s=START_S, process="own")
        self._class = IsolatedClass(lz_gloo.Rank, surface_of(lz_gloo.Rank), self._where, options, _code(), "error")
        pids = [pid for pid in (*peers.pids.values(), os.getpid()) if pid > 0]
        arguments = (str(self._path), self._rank, size, pids, START_S / 2)
        self._object = self._do(peers, lambda: self._class(*arguments), until_s)
        with contextlib.suppress(OSError):  # a kernel that has none: the broker's word is waited for
            self._process = os.pidfd_open(self._do(peers, self._object.pid, until_s))

    def started(self) -> None:
        """By all ranks: the file has done its work."""
        self._path.unlink(missing_ok=True)

    def run(self, peers: Peers, method: str, *args: Any, until_s: float) -> Any:
        """The result's bytes. Raises GroupBroken."""
        proxy = self._object
        timeout_s = max(until_s - time.monotonic(), 0.001) + 1.0  # this rank's own deadline comes first

        def call() -> Any:
            value = getattr(proxy, method).options(timeout_s=timeout_s)(*args)
            self.copies = self._class.last_report().copies
            return value

        return self._do(peers, call, until_s)

    def wait(self, peers: Peers, until_s: float) -> None:
        """Its calls have ended when they return."""

    def void(self) -> int:
        """As of NCCL, whose calls may not have."""
        return 0

    def drop(self) -> Any:
        """Let the process end, at the latest when the call ends that it is in; nobody waits for it. Gives its proxy."""
        self._path.unlink(missing_ok=True)
        if self._process is not None:
            os.close(self._process)
        proxy, self._object, self._process = self._object, None, None
        return proxy  # an object whose proxy was collected is released

    def close(self) -> None:
        proxy = self.drop()
        if proxy is not None:
            with contextlib.suppress(LayerZeroError):
                proxy.close()

    def _do(self, peers: Peers, work: Callable[[], Any], until_s: float) -> Any:
        """What `work` gives, in a thread, while this one hears of the other ranks. Raises GroupBroken."""
        ended: list[tuple[Any, BaseException | None]] = []
        reader, writer = os.pipe2(os.O_CLOEXEC)

        def run() -> None:
            try:
                ended.append((work(), None))
            except BaseException as exc:
                ended.append((None, exc))
            finally:
                os.close(writer)

        threading.Thread(target=run, name="gloo", daemon=True).start()
        try:
            peers.wait_for([reader] if self._process is None else [reader, self._process], until_s)
            if not ended:  # the process has gone; with the broker, as the call itself says then
                control.is_readable(reader, _WORD_S)
        finally:
            os.close(reader)
        value, error = ended[0] if ended else (None, BackendError("it has ended"))
        if error is None:
            return value
        raise self._understood(peers, error) from error

    def _understood(self, peers: Peers, error: BaseException) -> BaseException:
        """What has become of the group, where a rank's process or gloo itself failed."""
        what: dict[str, Any] = {
            "group": peers.name,
            "generation": peers.generation,
            "ranks": [self._rank],
            "doing": peers.doing,
        }
        said = str(error).partition("\n")[0]
        if isinstance(error, (BrokerLost, NotConnected)):
            return faults.broken(faults.BROKER_LOST, f"lz.connect() first: rank {self._rank}'s broker is gone", **what)
        if isinstance(error, BackendError) and not isinstance(error, DeadlineExceeded):
            return faults.broken(faults.WORKER_DIED, f"rank {self._rank}'s process of gloo has died: {said}", **what)
        if isinstance(error, (RemoteError, DeadlineExceeded)):
            told = peers.hear_fault(_BLAME_S)
            if told is not None:
                return told
        return faults.broken(faults.FAILED, f"gloo of rank {self._rank} failed: {said}", **what)


def _code() -> Code:
    """A file of its own, below no package: in torch's environment there is no layerzero.groups."""
    digest = hashlib.sha256(_FILE.read_bytes()).hexdigest()
    return Code(_FILE.stem, "Rank", str(_FILE), digest, str(_FILE.parent), False)
