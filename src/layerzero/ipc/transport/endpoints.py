"""Where the sockets of this user's broker lie, and the checks on that folder."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from layerzero.ipc.errors import ConfigError
from layerzero.ipc.transport.control import SUN_PATH_MAX


@dataclass(frozen=True)
class Endpoints:
    """All names in one runtime folder. `zmq_path` carries the broker's incarnation: a client never reconnects to a
    later broker by accident."""

    folder: Path

    @property
    def control(self) -> Path:
        return self.folder / "broker.sock"

    @property
    def broker_lock(self) -> Path:
        """Locked by a broker for as long as it lives; holds its pid."""
        return self.folder / "broker.lock"

    def lock_id(self) -> tuple[int, int] | None:
        """Which file `broker_lock` is now; None when there is none. Another one: another broker may have the folder."""
        try:
            found = self.broker_lock.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    @property
    def start_lock(self) -> Path:
        """Locked by a client while it starts a broker."""
        return self.folder / "start.lock"

    @property
    def log(self) -> Path:
        return self.folder / "broker.log"

    def worker_log(self, backend: str) -> Path:
        return self.folder / f"worker-{backend}.log"

    def zmq_path(self, side: str, incarnation: str) -> Path:
        return self.folder / f"{side}-{incarnation}"


def default_runtime_dir(environ: Mapping[str, str]) -> Path:
    """XDG_RUNTIME_DIR/layerzero, or /tmp/layerzero-UID where there is no such folder."""
    base = environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "layerzero" if base else Path(f"/tmp/layerzero-{os.getuid()}")


def open_endpoints(folder: Path, *, is_shared: bool = False) -> Endpoints:
    """Create the folder if needed, owner-only, and check it. `is_shared`: it may be another user's, and open to others
    who cannot write there; then both sides must prove who they are. Raises ConfigError."""
    if len(str(folder)) + len("/client-0123456789abcdef") > SUN_PATH_MAX:
        raise ConfigError(
            f"runtime folder {str(folder)!r} is too long for unix sockets (at most {SUN_PATH_MAX} bytes with the "
            "socket's name); set LAYERZERO_RUNTIME_DIR to a shorter one"
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:  # a file, FIFO or socket is there, or the place is not ours
        raise ConfigError(
            f"runtime folder {str(folder)!r} cannot be made: {exc.strerror}. Remove what lies there, or set "
            "LAYERZERO_RUNTIME_DIR to another place"
        ) from exc
    info = folder.lstat()
    if is_shared:
        if not stat.S_ISDIR(info.st_mode) or info.st_mode & 0o002:
            raise ConfigError(
                f"runtime folder {str(folder)!r} must be a directory that not everybody can write to; it has mode "
                f"{stat.S_IMODE(info.st_mode):04o}. Repair it with chmod o-w"
            )
        return Endpoints(folder)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise ConfigError(
            f"runtime folder {str(folder)!r} must be a directory of user {os.getuid()} with mode 0700; it has owner "
            f"{info.st_uid} and mode {stat.S_IMODE(info.st_mode):04o}. Repair it with chmod 0700, or set "
            "LAYERZERO_RUNTIME_DIR"
        )
    return Endpoints(folder)
