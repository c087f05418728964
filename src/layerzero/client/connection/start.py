"""Find this user's broker, or start one with this process's environment."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, NoReturn

from layerzero.ipc import version
from layerzero.ipc.errors import BrokerLost, ConfigError, from_wire
from layerzero.ipc.transport import control, secret
from layerzero.ipc.transport.endpoints import Endpoints, default_runtime_dir, open_endpoints
from layerzero.ipc.transport.plain import unpack_body
from layerzero.ipc.vocabulary import policy, variables

START_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 2.0
ENDED = b"ended"  # what a broker writes over its pid in the lock file before it ends
READY = b"1"  # what a broker writes when clients may connect; anything else is its error


def runtime_dir() -> Path:
    """Where this user's broker has its sockets: LAYERZERO_RUNTIME_DIR, or the platform's runtime folder."""
    given = os.environ.get("LAYERZERO_RUNTIME_DIR")
    return Path(given) if given else default_runtime_dir(os.environ)


def policy_layers() -> list[dict[str, Any]]:
    """What this process's variables ask of selection."""
    return policy.variables(os.environ, policy.PER_CALL)


def shows_progress() -> bool:
    """Whether a person looks at stderr, and LAYERZERO_PROGRESS does not say no."""
    is_wanted = os.environ.get("LAYERZERO_PROGRESS", "1").lower() not in ("0", "false", "no", "off")
    return is_wanted and sys.stderr is not None and sys.stderr.isatty()


def secret_key(path: Path | None = None) -> bytes | None:
    """The secret of the broker's stack, from a file or from the one that LAYERZERO_SECRET_FILE names; None without.
    Raises ConfigError."""
    given = path or os.environ.get("LAYERZERO_SECRET_FILE")
    return secret.read(Path(given)) if given else None


def endpoints(folder: Path | None = None, *, is_shared: bool | None = None) -> Endpoints:
    """Raises ConfigError. `is_shared`: whether a secret makes sure who is there; default: whether the environment names
    one."""
    if str(folder or runtime_dir()).startswith("tcp:"):
        raise ConfigError(
            f"{str(folder or runtime_dir())!r:.80}: calls need a folder of unix sockets, which carry memory as file "
            "descriptors; over tcp a broker answers questions alone: lz status --remote tcp://ADDRESS:PORT"
        )
    shared = bool(os.environ.get("LAYERZERO_SECRET_FILE")) if is_shared is None else is_shared
    return open_endpoints(folder if folder is not None else runtime_dir(), is_shared=shared)


def is_foreign(where: Endpoints) -> bool:
    """Whether the broker that listens is in another pid namespace: its pid means nothing here, or another process."""
    try:
        sock = control.connect(where.control, timeout_s=CONNECT_TIMEOUT_S)
    except OSError:
        return False
    with sock:
        return control.peer_credentials(sock)[0] == 0


def broker_pid(where: Endpoints) -> int | None:
    """Pid, in its own namespace, of the broker that holds the lock, or None when there is none."""
    try:
        fd = os.open(where.broker_lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.read(fd, 32).decode(errors="replace").strip()
            return int(text) if text.isdigit() else None
        return None
    finally:
        os.close(fd)


def has_ended_by_itself(where: Endpoints) -> bool:
    """Whether the broker that had the lock last ended as it was told to, and was not killed."""
    try:
        return where.broker_lock.read_bytes() == ENDED
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _start_lock(where: Endpoints) -> Iterator[None]:
    """One starter at a time; the kernel lets go of the lock if this process dies."""
    fd = os.open(where.start_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def ensure_broker(where: Endpoints, *, stays: bool) -> bool:
    """Start a broker unless one runs. Returns True when this call started it. Raises ConfigError when its settings
    are wrong, BrokerLost when it does not come up for another reason, with the end of its log."""
    with _start_lock(where):
        if broker_pid(where) is not None:
            return False
        _start(where, stays=stays)
        return True


def wait_for_end(where: Endpoints, timeout_s: float) -> None:
    """Return when the broker that holds the lock has ended, or after `timeout_s`."""
    try:
        fd = os.pidfd_open(broker_pid(where) or 0)
    except OSError:  # it has ended already
        return
    try:
        control.is_readable(fd, timeout_s)
    finally:
        os.close(fd)


def _start(where: Endpoints, *, stays: bool) -> None:
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    with open(where.log, "ab", opener=lambda p, f: os.open(p, f, 0o600)) as log:
        log_start = log.tell()
        command = [sys.executable, "-P", "-m", "layerzero.broker", "--daemon", "--ready-fd", str(write_fd)]
        command += ["--runtime-dir", str(where.folder), *(["--stays"] if stays else [])]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=environment(),
            pass_fds=(write_fd,),
            start_new_session=True,
        )
    os.close(write_fd)
    process.wait()  # it leaves the broker behind as a daemon, so that nobody has a zombie to reap
    with os.fdopen(read_fd, "rb") as ready:
        os.set_blocking(read_fd, False)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if control.is_readable(ready.fileno(), deadline_s - time.monotonic()):
                word = ready.read()
                if word == READY:
                    return
                if word:
                    raise from_wire(unpack_body(word))
                break
    tail = where.log.read_bytes()[log_start:][-1500:].decode(errors="replace").strip()
    raise BrokerLost(f"the broker did not start; the end of {where.log}:\n{tail}")


def become_broker() -> NoReturn:
    """Go on as a broker that stays, in the foreground: logs to stderr, ends on SIGTERM. Works as pid 1."""
    command = [sys.executable, "-P", "-m", "layerzero.broker", "--stays", "--runtime-dir", str(runtime_dir())]
    os.execve(sys.executable, command, environment())


def environment(keep: Container[str] | None = None, **changes: str) -> dict[str, str]:
    """What a process of ours is started with: our environment, and the folder that this very package was imported from.
    keep: the only LAYERZERO_ variables that it gets of ours; all of them if left out. changes: further variables."""
    found = {k: v for k, v in os.environ.items() if keep is None or k in keep or not k.startswith("LAYERZERO_")}
    for name in (f"LAYERZERO_{name.upper()}" for name in variables.PATHS):
        if found.get(name):  # a broker runs in another folder
            found[name] = os.pathsep.join(os.path.abspath(path) for path in found[name].split(os.pathsep) if path)
    root = str(Path(version.__file__).parents[2])
    found["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [found.get("PYTHONPATH")])])
    return found | changes
