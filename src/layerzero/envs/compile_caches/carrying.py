"""Compilers' caches carried to other machines, between equal locks only: each signed, since a cache is code.

In a folder of them, which may be one that a whole fleet reads, each lies under NAME-ID/PLACE as in a store, in the form
of ipc/compile_caches/exported.py; `manifest.sig` is the Ed25519 signature of its manifest's bytes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from layerzero.envs import signing
from layerzero.envs.build.env import Env
from layerzero.envs.compile_caches import keeping
from layerzero.envs.manifest import EnvManifest
from layerzero.envs.probe.caches import compiled, note_compiled
from layerzero.envs.probe.probe import probe_key
from layerzero.ipc import files
from layerzero.ipc.compile_caches import exported as form
from layerzero.ipc.compile_caches import folder as folders
from layerzero.ipc.compile_caches import manifest as manifests
from layerzero.ipc.compile_caches.exported import Exported, File, Wrong
from layerzero.ipc.compile_caches.folder import InUse
from layerzero.ipc.errors import ConfigError
from layerzero.ipc.version import __version__

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAX_CACHES = 1000  # of one folder


@dataclass(frozen=True)
class Opened:
    """A cache in a folder of them, whose signature has been checked. `signer`: the name of the key; empty for nobody;
    `sha256`: of the manifest."""

    folder: Path
    exported: Exported
    signer: str
    sha256: str

    @property
    def label(self) -> str:
        about = self.exported.about
        return f"{about['name']}-{about['env']}/{about['place']}"


def export(env: Env, manifest: EnvManifest, target: Path, key: Ed25519PrivateKey | None) -> Exported | None:
    """Put what is sealed of an environment's caches into a folder of them, in the place of what it has of the same
    kind; None where nothing is sealed. Raises ConfigError."""
    if not env.place or manifests.read(env.cache) is None:
        return None
    folder = target / f"{env.name}-{env.id}" / env.place
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    signer = "" if key is None else signing.fingerprint(key.public_key())
    noted = probe_key(env, manifest)

    def described(listed: Sequence[File]) -> Exported:
        about = {"name": env.name, "env": env.id, "place": env.place, "lock": env.lock_hash, "signer": signer}
        return Exported({**about, "made_by": __version__}, noted, list(compiled(env, noted)), listed)

    try:
        folders.seal(env.cache, is_last=False)
        made, text = form.write(env.cache, draft, described)
        if not made.files:
            return None
        if key is not None:
            (draft / form.SIGNATURE).write_bytes(signing.sign(key, text))
        old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
        if folder.exists():
            folder.rename(old)
        draft.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except Wrong as exc:
        raise ConfigError(f"run lz cache verify, and warm it again: {env.cache} was not exported: {exc}") from exc
    except OSError as exc:
        raise ConfigError(f"name another folder: {folder} cannot be written: {exc.strerror}") from exc
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return made


def open_all(folder: Path, keys: Path, *, allows_unsigned: bool) -> Iterator[Opened]:
    """All caches in a folder of them. `keys`: the folder of keys. Raises ConfigError for one that is not signed by a
    key that is trusted, or is not what it must be; and where there is none."""
    found = sorted(folder.glob(f"[!.]*/[!.]*/{form.MANIFEST}"))[:MAX_CACHES]
    if not found:
        raise ConfigError(
            f"name a folder that lz cache export has written: {folder} has no NAME-ID/PLACE/manifest.json"
        )
    for path in found:
        yield open_one(path.parent, keys, allows_unsigned=allows_unsigned)


def open_one(folder: Path, keys: Path, *, allows_unsigned: bool = False) -> Opened:
    """Before its signature is known, nothing of it is parsed. Raises ConfigError."""
    try:
        if folder.is_symlink() or (folder / form.MANIFEST).is_symlink():
            raise _refused(folder, "it is a symbolic link")
        data = form.read(folder)
        signer = _signer(folder, data, keys, allows_unsigned=allows_unsigned)
        return Opened(folder, Exported.unpack(data), signer, hashlib.sha256(data).hexdigest())
    except Wrong as exc:
        raise _refused(folder, str(exc)) from exc
    except OSError as exc:
        raise _refused(folder, f"{exc.filename or form.MANIFEST}: {exc.strerror}") from exc


def _signer(folder: Path, data: bytes, keys: Path, *, allows_unsigned: bool) -> str:
    """Raises ConfigError, OSError."""
    try:
        signature = files.read(folder / form.SIGNATURE, signing.SIGNATURE_BYTES)
    except FileNotFoundError:
        if allows_unsigned:
            return ""
        text = "have it signed (lz cache export --key), or pass --allow-unsigned if you know by other means whose it is"
        raise ConfigError(f"{text}: {folder} has no signature, and nothing of it was taken over") from None
    trusted = signing.trusted(keys)
    name = signing.signer_of(data, signature, trusted)
    if name is None:
        known = ", ".join(trusted) or "none"
        text = (
            f"trust its key if it is to be trusted (lz lift trust FILE.pub --name NAME): {folder} is signed by nobody"
        )
        raise ConfigError(f"{text} known, or was changed since; trusted: {known}. Nothing of it was taken over")
    return name


def differs(opened: Opened, env: Env) -> str:
    """Why a cache is not for this environment; empty when it is."""
    about = opened.exported.about
    if (about["env"], about["lock"]) != (env.id, env.lock_hash):
        return f"it is of another lock: environment {about['env']:.40}; here it is {env.id}"
    if about["place"] != env.place:
        return f"it is for {about['place']:.120}; here compilers compile for {env.place or 'nothing'}"
    return ""


def take(opened: Opened, env: Env, manifest: EnvManifest) -> int:
    """Check every file and put what is lacking into the environment's caches: all of it, or nothing. What is noted to
    be compiled is added, where our code is the same. Returns how many files were new. Raises ConfigError."""
    if why := differs(opened, env):
        raise _refused(opened.folder, why)
    is_new = not env.cache.exists()
    try:
        folders.make(env.cache)
        with folders.alone(env.cache):
            found = folders.look(env.cache)
            is_new = is_new and not found.sealed and not found.unfit  # another process may have been before us
            if found.unfit:
                folders.set_aside(env.cache, found.unfit)
            try:
                count = form.take_over(opened.folder, opened.exported, env.cache)
            except BaseException:
                if is_new:
                    keeping.discard(env.cache)
                raise
            if opened.exported.units and opened.exported.key == probe_key(env, manifest):
                note_compiled(env, opened.exported.key, opened.exported.units)
        return count
    except InUse:
        raise ConfigError(f"end its workers first (lz down): a process uses {env.cache}") from None
    except Wrong as exc:
        raise _refused(opened.folder, str(exc)) from exc
    except OSError as exc:
        raise ConfigError(f"make room or a writable {env.cache}: nothing was taken over: {exc.strerror}") from exc


def shared(folder: Path, env: Env, keys: Path) -> Opened | None:
    """What a folder for the whole fleet has for an environment of whose caches nothing is here; None for nothing, or
    where they are here. Raises ConfigError for what is not to be trusted."""
    place = folder / f"{env.name}-{env.id}" / env.place
    if not env.place or manifests.manifest_path(env.cache).exists() or not (place / form.MANIFEST).exists():
        return None
    opened = open_one(place, keys)
    if why := differs(opened, env):
        raise _refused(place, why)
    return opened


def _refused(folder: Path, why: str) -> ConfigError:
    return ConfigError(f"export it again, or fetch it again from there: nothing of {folder} was taken over: {why}")
