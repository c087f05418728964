"""The secret of a stack: who has its file may connect. It never travels; both sides prove that they know it.

Each side sends 32 random bytes and gets HMAC-SHA256 over both, under the secret, with words in front that no proof for
another purpose has.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from layerzero.ipc.errors import ConfigError

NONCE_BYTES = 32
MIN_BYTES = 16


@dataclass(frozen=True)
class Handshake:
    """One connection's proofs. `role` is bound in, so that a proof of one role is none of another."""

    secret: bytes
    role: str
    peer_nonce: bytes
    broker_nonce: bytes

    def _mac(self, side: bytes) -> bytes:
        text = b"\0".join((b"layerzero control 1", side, self.role.encode()))
        return hmac.digest(self.secret, text + b"\0" + self.peer_nonce + self.broker_nonce, hashlib.sha256)

    @property
    def peer_mac(self) -> bytes:
        return self._mac(b"peer")

    @property
    def broker_mac(self) -> bytes:
        return self._mac(b"broker")


def is_equal(one: bytes, other: bytes) -> bool:
    """In a time that does not tell where they differ."""
    return hmac.compare_digest(one, other)


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def create(path: Path) -> None:
    """Write a new secret for its owner only. Raises ConfigError when the file is there already or cannot be made."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} is there already; a new secret there would lock out those who use it: remove it first"
        ) from None
    except OSError as exc:
        raise ConfigError(f"the secret file {path} cannot be written: {exc.strerror}") from exc
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_hex(32) + "\n")


def read(path: Path) -> bytes:
    """The secret in a file that nobody else can read, or that root put there. Raises ConfigError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would have us wait
        with os.fdopen(fd, "rb") as file:
            info = os.fstat(fd)
            text = file.read(4097).strip()
    except OSError as exc:
        raise ConfigError(f"the secret file {path} cannot be read: {exc.strerror}; lz keys secret makes one") from exc
    mode, owner = stat.S_IMODE(info.st_mode), info.st_uid
    is_ours = owner == os.getuid()
    if not stat.S_ISREG(info.st_mode) or owner not in (os.getuid(), 0) or mode & (0o077 if is_ours else 0o022):
        raise ConfigError(
            f"the secret file {path} has owner {owner} and mode {mode:04o}; allowed: a file of user {os.getuid()} that "
            "no one else can read (chmod 0600), or one of root's that no one else can write"
        )
    if not MIN_BYTES <= len(text) <= 4096:
        raise ConfigError(
            f"the secret file {path} holds {len(text)} bytes; allowed: {MIN_BYTES} to 4096; lz keys secret makes one"
        )
    return text
