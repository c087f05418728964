"""The lock of a kernel repository: the commit, and every file of one of its builds with size and SHA-256.

It lies beside the environment's other locks, NAME.VARIANT.hub.json; NAME.VARIANT.hub.sig is the Ed25519 signature of
its bytes. What it does not name is not taken.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from layerzero.envs import signing
from layerzero.envs.hub.repository import Repository
from layerzero.envs.manifest import BUILD_PATTERN, COMMIT_PATTERN, REPOSITORY_PATTERN, EnvManifest, VariantName
from layerzero.ipc import files
from layerzero.ipc.errors import ConfigError, EnvError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAX_LOCK_BYTES = 1 << 20
MAX_FILES = 4096
MAX_FILE_BYTES = 2 << 30
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.+-]*"


class HubFile(BaseModel):
    """`path`: below the folder of the build."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    path: Annotated[str, Field(pattern=rf"^{_PART}(/{_PART})*$", max_length=400)]
    size: Annotated[int, Field(ge=0, le=MAX_FILE_BYTES)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Content(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: Literal["layerzero hub kernels"] = "layerzero hub kernels"
    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    repository: Annotated[str, Field(pattern=REPOSITORY_PATTERN)]
    revision: Annotated[str, Field(pattern=COMMIT_PATTERN)]
    build: Annotated[str, Field(pattern=BUILD_PATTERN)]
    files: Annotated[list[HubFile], Field(min_length=1, max_length=MAX_FILES)]

    @model_validator(mode="after")
    def _once(self) -> _Content:
        if len({file.path for file in self.files}) != len(self.files):
            raise ValueError("a file is listed twice")
        return self


@dataclass(frozen=True)
class HubLock:
    """A lock as it was read or written. `data`: its bytes, which are what is signed."""

    path: Path
    variant: VariantName
    data: bytes
    content: _Content

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.content.files)

    def __str__(self) -> str:
        return f"{self.content.repository} at {self.content.revision[:12]}, build/{self.content.build}"


def lock_path(manifest: EnvManifest, variant: str) -> Path:
    """Of one variant, for all Pythons."""
    path = manifest.lock_path(variant)
    return path.with_name(f"{manifest.name}.{variant}.hub.json")


def signature_path(lock: Path) -> Path:
    return lock.with_suffix(".sig")


def lock_command(manifest: EnvManifest, variant: str) -> str:
    where = f" --manifests {manifest.folder}" if manifest.folder is not None else ""
    return f"lz env lock {manifest.name}{where} --variant {variant}"


def read(manifest: EnvManifest, variant: VariantName) -> HubLock | None:
    """The lock that pins the manifest's kernels; None for a manifest without any. Raises EnvError where they are not
    pinned, or where the lock is of another repository, revision or build."""
    if manifest.hub is None:
        return None
    path, repair = lock_path(manifest, variant), lock_command(manifest, variant)
    hub, build = manifest.hub, manifest.hub.build_of(variant, manifest.path)
    try:
        data = files.read(path, MAX_LOCK_BYTES)
        found = HubLock(path, variant, data, _Content.model_validate_json(data))
    except FileNotFoundError:
        cause = f"{hub.repository} is not pinned: {path} does not exist"
        raise _unusable(manifest, cause, repair) from None
    except OSError as exc:
        raise _unusable(manifest, f"{path} cannot be read: {exc.strerror}", repair) from exc
    except ValidationError as exc:
        error = exc.errors()[0]
        where = ".".join(map(str, error["loc"])) or "text"
        raise _unusable(manifest, f"{path} is no lock of kernels: {where}: {error['msg']}"[:500], repair) from exc
    pinned = found.content
    for key, wanted, has in (
        ("repository", hub.repository, pinned.repository),
        ("revision", hub.revision if hub.is_pinned else pinned.revision, pinned.revision),
        ("build", build, pinned.build),
    ):
        if wanted != has:
            raise _unusable(manifest, f"{path} is of {key} {has}, hub.{key} of the manifest is {wanted}", repair)
    return found


def write(
    manifest: EnvManifest, variant: VariantName, repository: Repository, key: Ed25519PrivateKey | None
) -> HubLock | None:
    """Pin the kernels of a variant as they are in `repository` now, signed with `key`; None for a manifest without
    kernels. An older signature goes. Raises EnvError, ConfigError."""
    if manifest.hub is None:
        return None
    build = manifest.hub.build_of(variant, manifest.path)
    with repository.opened(manifest.name, manifest.hub, build) as opened:
        listed = [
            HubFile(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest())
            for path, data in opened.files(MAX_FILES, MAX_FILE_BYTES)
        ]
        try:
            content = _Content.model_validate(
                {
                    "repository": manifest.hub.repository,
                    "revision": opened.revision,
                    "build": build,
                    "files": listed,
                }
            )
        except ValidationError as exc:
            error = exc.errors()[0]
            cause = f"{opened.folder}: {error['msg']} ({str(error['input'])[:200]})"
            raise _unusable(manifest, cause, lock_command(manifest, variant)) from exc
    path = lock_path(manifest, variant)
    data = content.model_dump_json(by_alias=True, indent=1).encode() + b"\n"
    signature_path(path).unlink(missing_ok=True)
    _replace(path, data)
    if key is not None:
        _replace(signature_path(path), signing.sign(key, data))
    return HubLock(path, variant, data, content)


def signer(manifest: EnvManifest, lock: HubLock, keys: Path, *, allows_unsigned: bool) -> str:
    """Whose signature the lock has: the name of a trusted key (`lz lift trust`). Empty where it has none and need not:
    `allows_unsigned`, or sources that were allowed by their hash, which has the lock in it. Raises EnvError."""
    if manifest.source is not None:
        return ""
    path = signature_path(lock.path)
    try:
        signature = files.read(path, signing.SIGNATURE_BYTES)
    except FileNotFoundError:
        if allows_unsigned:
            return ""
        repair = f"{lock_command(manifest, lock.variant)} --key FILE"
        cause = (
            f"the kernels of {lock} are signed by nobody. Have their lock signed, or pass --allow-unsigned if you know "
            "by other means that they are to be trusted"
        )
        raise _unusable(manifest, cause, repair) from None
    except OSError as exc:
        raise _unusable(manifest, f"{path} cannot be read: {exc.strerror}", f"remove {path}") from exc
    trusted = signing.trusted(keys)
    name = signing.signer_of(lock.data, signature, trusted)
    if name is None:  # of no use to anybody: --allow-unsigned is for locks without one
        known = ", ".join(trusted) or "none"
        cause = f"{lock.path} is signed by a key that is not trusted, or was changed since; trusted: {known}"
        raise _unusable(manifest, cause, "lz lift trust FILE.pub --name NAME")
    return name


def _unusable(manifest: EnvManifest, cause: str, repair: str) -> EnvError:
    text = f"run {repair}: environment {manifest.name} cannot have its kernels: {cause}"
    return EnvError(text, env=manifest.name, cause=cause, repair=repair)


def _replace(path: Path, data: bytes) -> None:
    try:
        files.put(path, data)
    except OSError as exc:
        raise ConfigError(f"make {path.parent} writable: {path} cannot be written: {exc.strerror or exc}") from exc
