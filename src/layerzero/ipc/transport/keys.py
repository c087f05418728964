"""Key pairs of CURVE, which encrypts tcp and says who is there. A folder of keys is one side's: its own pair, and the
public keys of those whom it accepts.

`own.secret` (mode 0600) and `own.key` hold the pair, `allowed/NAME.key` the others. Each file is one key, 40 characters
of Z85.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

import zmq

from layerzero.ipc.errors import ConfigError

_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


class Pair(NamedTuple):
    public: bytes
    secret: bytes


def make(folder: Path) -> Path:
    """A new pair for this side; returns the file of its public key. Raises ConfigError when there is one already."""
    public, secret = zmq.curve_keypair()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder / "own.secret", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{folder} has a key pair already; those who accept it would not accept another: remove own.secret first"
        ) from None
    except OSError as exc:
        raise ConfigError(f"no key pair can be written to {folder}: {exc.strerror}") from exc
    with os.fdopen(fd, "wb") as file:
        file.write(secret + b"\n")
    path = folder / "own.key"
    path.write_bytes(public + b"\n")
    return path


def own(folder: Path) -> Pair:
    """This side's pair. Raises ConfigError when there is none, or when others can read it."""
    path = folder / "own.secret"
    try:
        info = path.stat()
        secret = _read(path)
    except FileNotFoundError:
        raise ConfigError(f"there is no key pair in {folder}; run: lz keys make --keys {folder}") from None
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}; it must be user {os.getuid()}'s") from exc
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise ConfigError(
            f"{path} has owner {info.st_uid} and mode {stat.S_IMODE(info.st_mode):04o}; allowed: a file of user "
            f"{os.getuid()} with mode 0600"
        )
    return Pair(zmq.curve_public(secret), secret)


def allow(folder: Path, name: str, given: str) -> None:
    """Accept whoever has the pair of this public key: a file, or the key itself. Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r:.80} cannot name a key; allowed: {_NAME.pattern}")
    path = Path(given)
    key = _read(path) if path.is_file() else given.encode()
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{given!r:.80} is neither a file with a key nor a key: 40 characters of Z85")
    target = folder / "allowed" / f"{name}.key"
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.write_bytes(key + b"\n")
    except OSError as exc:
        raise ConfigError(f"{target} cannot be written: {exc.strerror}") from exc


def allowed(folder: Path) -> dict[str, bytes]:
    """The public keys that this side accepts, by name. Raises ConfigError."""
    return {path.stem: _read(path) for path in sorted((folder / "allowed").glob("*.key"))}


def _read(path: Path) -> bytes:
    key = path.read_bytes()[:256].strip()
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{path} holds no key: 40 characters of Z85")
    return key
