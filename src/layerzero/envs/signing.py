"""Signatures on exported lifted calls, and on locks of kernels of the hub: Ed25519, by the library `cryptography`.
That is only needed here.

A private key is a PEM file (PKCS 8) of its owner alone, its public key another beside it with `.pub` at the end. The
public keys that an operator trusts are `signers/NAME.pub` in the folder of keys. `openssl` reads all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from layerzero.ipc import files
from layerzero.ipc.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

MAX_BYTES = 4096  # of a key's file
SIGNATURE_BYTES = 64
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_INSTALL = "pip install 'layerzero-broker[sign]'"


def _library() -> None:
    """Raises ConfigError where there is none."""
    try:
        import cryptography.hazmat.primitives.asymmetric.ed25519  # noqa: F401
    except ImportError as exc:
        raise ConfigError(f"signatures need the package cryptography: {_INSTALL}") from exc


def make(path: Path) -> str:
    """A new private key at `path`, and its public key at `path`.pub. Returns its fingerprint. Raises ConfigError when
    there is a file already."""
    _library()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    key = Ed25519PrivateKey.generate()
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        text = f"choose another file: {path} is there already, and who trusts its key would not trust a new one"
        raise ConfigError(text) from None
    except OSError as exc:
        raise ConfigError(f"choose another file: {path} cannot be written: {exc.strerror}") from exc
    with os.fdopen(fd, "wb") as file:
        file.write(secret)
    public_path(path).write_bytes(public)
    return fingerprint(key.public_key())


def public_path(path: Path) -> Path:
    """Where the public key of the private one at `path` lies."""
    return path.with_name(f"{path.name}.pub")


def read_private(path: Path) -> Ed25519PrivateKey:
    """Raises ConfigError for a file that is none, or that others can read."""
    _library()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        info = path.stat()
        data = files.read(path, MAX_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"make a key first: lz lift key {path}; that file is not there") from None
    except OSError as exc:
        raise ConfigError(f"name a file with a private key: {path} cannot be read: {exc.strerror}") from exc
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        mode = f"owner {info.st_uid} and mode {stat.S_IMODE(info.st_mode):04o}"
        raise ConfigError(f"chmod 600 {path}: it has {mode}; allowed: a file of user {os.getuid()} with mode 0600")
    try:
        key = load_pem_private_key(data, None)
    except (ValueError, TypeError) as exc:
        raise ConfigError(f"name a file that lz lift key has made: {path} holds no private key") from exc
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"name a file that lz lift key has made: {path} holds a key of another kind than Ed25519")
    return key


def trust(folder: Path, name: str, given: Path) -> str:
    """Trust whoever has the private key of this public one. Returns its fingerprint. Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"choose another name: {name!r:.80} cannot name a key; allowed: {_NAME.pattern}")
    key = _read_public(given)
    target = folder / "signers" / f"{name}.pub"
    try:
        data = files.read(given, MAX_BYTES)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        draft.write_bytes(data)
        draft.replace(target)
    except OSError as exc:
        raise ConfigError(f"name another folder of keys: {target} cannot be written: {exc.strerror}") from exc
    return fingerprint(key)


def distrust(folder: Path, name: str) -> bool:
    """Trust that key no more. Returns whether it was trusted."""
    if not _NAME.fullmatch(name):
        return False
    try:
        (folder / "signers" / f"{name}.pub").unlink()
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise ConfigError(f"remove {folder / 'signers' / name}.pub: {exc.strerror}") from exc
    return True


def trusted(folder: Path) -> dict[str, Ed25519PublicKey]:
    """The public keys that are trusted, by name. Raises ConfigError for a file that holds none."""
    return {path.stem: _read_public(path) for path in sorted((folder / "signers").glob("*.pub"))}


def sign(key: Ed25519PrivateKey, data: bytes) -> bytes:
    return key.sign(data)


def signer_of(data: bytes, signature: bytes, keys: dict[str, Ed25519PublicKey]) -> str | None:
    """The name of the key whose signature this is; None if it is none of them."""
    _library()
    from cryptography.exceptions import InvalidSignature

    for name, key in keys.items():
        with contextlib.suppress(InvalidSignature):
            key.verify(signature, data)
            return name
    return None


def fingerprint(key: Ed25519PublicKey) -> str:
    """Of a public key, for people: SHA-256 of its 32 bytes, the first 32 hexadecimal digits."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.Raw, PublicFormat.Raw)).hexdigest()[:32]


def _read_public(path: Path) -> Ed25519PublicKey:
    _library()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(files.read(path, MAX_BYTES))
    except OSError as exc:
        raise ConfigError(f"name a file with a public key: {path} cannot be read: {exc.strerror}") from exc
    except (ValueError, TypeError) as exc:
        raise ConfigError(f"name a file with a public key, FILE.pub of lz lift key: {path} holds none") from exc
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"name a public key of Ed25519, FILE.pub of lz lift key: {path} holds another kind")
    return key
