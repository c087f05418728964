"""What is declared of a version beside its backend: manifest, descriptor and provider in a folder of the store, made of
those of the backend, its template. They are made anew when the template has changed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from layerzero.capabilities.descriptor import MAX_BYTES, DescriptorError, read_text
from layerzero.envs import manifest as manifests
from layerzero.envs.build import store as locks
from layerzero.envs.manifest import EnvManifest, Problem, VariantName
from layerzero.ipc import files
from layerzero.ipc.errors import ConfigError

MAX_KERNEL_NAME = 64
_MADE_OF = re.compile(r"^# made of (sha256:[0-9a-f]{64})$", re.MULTILINE)
_WORD = re.compile(r"([a-z0-9][a-z0-9_.-]*)@([0-9][a-z0-9.]*)")


@dataclass(frozen=True)
class Wanted:
    """A version as a user types it: onnxruntime@1.16, which any release of 1.16 satisfies."""

    backend: str
    version: str

    @classmethod
    def of(cls, word: str) -> Wanted | None:
        """None for what names no version."""
        match = _WORD.fullmatch(word)
        with suppress(InvalidVersion):
            return None if match is None else cls(match[1], str(Version(match[2]).public))
        return None

    def is_met_by(self, version: str) -> bool:
        """Whether it is this release, or one of this series."""
        return version == self.version or version.startswith(f"{self.version}.")


@dataclass(frozen=True)
class Declared:
    """A version that has everything but its lock: `python` as "3.11"; `requirements` of the one variant."""

    base: str
    version: str
    python: str
    variant: VariantName
    requirements: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.base}@{self.version}"


def folder(store: Path) -> Path:
    return store.absolute() / "versions"


def folders(store: Path, named: Sequence[Path]) -> tuple[Path, ...]:
    """Those that were `named`, and this one where there is one."""
    ours = folder(store)
    is_known = any(path.absolute() == ours for path in named)
    return (*named, ours) if ours.is_dir() and not is_known else tuple(named)


def names(store: Path, wanted: Wanted) -> list[str]:
    """What is declared that satisfies `wanted`, the newest first."""
    found = [path.stem.partition("@")[2] for path in folder(store).glob(f"{wanted.backend}@*.toml")]
    fitting = sorted(filter(wanted.is_met_by, found), key=Version, reverse=True)
    return [f"{wanted.backend}@{version}" for version in fitting]


def write(declared: Declared, base: EnvManifest, store: Path) -> EnvManifest:
    """Write it, and read it back. Raises ConfigError."""
    ours = folder(store)
    try:
        ours.mkdir(parents=True, exist_ok=True)
        with locks.locked(ours / declared.name):
            files.put(ours / f"{declared.name}.json", _descriptor(declared, base))
            files.put(ours / f"{declared.name}.py", _provider(declared, base))
            files.put(ours / f"{declared.name}.toml", _manifest(declared, base))
    except OSError as exc:
        raise ConfigError(f"{ours} cannot be written to: {exc.strerror or exc}; set LAYERZERO_STORE") from exc
    return manifests.load(ours / f"{declared.name}.toml")


def remove(name: str, store: Path) -> bool:
    """Forget a version: `lz env gc` removes its environment. Whether there was one."""
    ours = folder(store)
    if Wanted.of(name) is None or not (ours / f"{name}.toml").is_file():
        return False
    with locks.locked(ours / name):
        for path in (*(ours / f"{name}{suffix}" for suffix in (".toml", ".json", ".py")), *ours.glob(f"{name}.*.txt")):
            path.unlink(missing_ok=True)
    return True


def renew(found: dict[str, EnvManifest], store: Path) -> list[Problem]:
    """Make anew, in `found` and on disk, what is declared of templates that have changed since; take out, as problems,
    those whose template is gone."""
    ours, problems = folder(store), []
    for name, manifest in list(found.items()):
        if manifest.version_of is None or manifest.path.parent.absolute() != ours:
            continue
        base = found.get(manifest.version_of)
        try:
            if base is None:
                text = f"{manifest.path}: backend {manifest.version_of!r} is not here, of which it is a version"
                raise ConfigError(f"{text}: name its folder of manifests, or run: lz env remove {name}")
            match = _MADE_OF.search(manifest.path.read_text(encoding="utf-8"))
            if match is None or match[1] != _hash(base):
                ((variant, content),) = manifest.variants.items()
                version = name.partition("@")[2]
                declared = Declared(base.name, version, str(manifest.python), variant, content.requirements)
                found[name] = write(declared, base, store)
        except (ConfigError, OSError, ValueError) as exc:
            del found[name]
            problems.append(Problem(name, manifest.path, str(exc)))
    return problems


def _hash(base: EnvManifest) -> str:
    """Of all that a version takes from its template."""
    digest = hashlib.sha256()
    provider = Path(base.provider_target)
    for path in (base.path, base.descriptor_path, provider if provider.suffix == ".py" else None):
        if path is not None:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"sha256:{digest.hexdigest()}"


def _manifest(declared: Declared, base: EnvManifest) -> str:
    text = json.dumps  # TOML's strings
    without = base.variants[declared.variant].without
    lines = [
        "# Written by lz env; the requirements and the Python are of this version, the rest is the backend's own.",
        f"# made of {_hash(base)}",
        f"summary = {text(f'{declared.base} {declared.version}, beside: {base.summary}'[:200], ensure_ascii=False)}",
        f"version_of = {text(declared.base)}",
        f"provider = {text(f'{declared.name}.py')}",
        f"descriptor = {text(f'{declared.name}.json')}",
        f"python = {text(declared.python)}",
        f"platform = {text(base.platform)}",
        "",
        "[env]",
        *(f"{key} = {text(value)}" for key, value in base.env.items()),
        "",
        f"[variants.{declared.variant}]",
        f"requirements = [{', '.join(map(text, declared.requirements))}]",
        f"without = [{', '.join(map(text, without))}]",
    ]
    return "\n".join(lines) + "\n"


def _provider(declared: Declared, base: EnvManifest) -> str:
    given = ", ".join(json.dumps(one) for one in (base.provider_target, declared.base, declared.name))
    lines = [
        f'"""Written by lz env: the provider of {declared.base}, for {declared.version}."""',
        "",
        f"# made of {_hash(base)}",
        "from layerzero.workers.versions import load_as",
        "",
        "",
        "def load():",
        f"    return load_as({given})",
    ]
    return "\n".join(lines) + "\n"


def _descriptor(declared: Declared, base: EnvManifest) -> str:
    """The backend's own claims, under the names of this version: what does not hold of it, certification finds."""
    try:
        content: dict[str, Any] = json.loads(read_text(base.descriptor_path))
        content |= {"backend": declared.name, "backend_version": declared.version}
        for kernel in (kernel for kernels in content["ops"].values() for kernel in kernels):
            kernel["kernel_id"] = f"{declared.name}{kernel['kernel_id'].removeprefix(base.name)}"
            if len(kernel["kernel_id"]) > MAX_KERNEL_NAME:
                text = f"kernel id {kernel['kernel_id']!r} is longer than {MAX_KERNEL_NAME} characters"
                raise ConfigError(f"{declared.name} cannot be named so: {text}")
    except (ValueError, LookupError, TypeError, AttributeError) as exc:
        raise ConfigError(f"{base.descriptor_path}: is no descriptor: {exc!r:.200}") from exc
    except DescriptorError as exc:
        raise ConfigError(exc.message) from exc
    found = json.dumps(content, indent=1) + "\n"
    if len(found) > MAX_BYTES:
        raise ConfigError(f"{base.descriptor_path}: larger than {MAX_BYTES:,} bytes, the most that a descriptor may be")
    return found
