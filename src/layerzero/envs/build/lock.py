"""Locks: the full closure of an environment, each file by its SHA-256. They name no index, path or host."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from layerzero.envs.build.environ import tool_environ
from layerzero.envs.build.installers import Uv, uv, without_passwords
from layerzero.envs.manifest import OWN_VARIANTS, EnvManifest, VariantName
from layerzero.ipc.errors import EnvError

_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?==([^\s;\\]+)", re.MULTILINE)


@dataclass(frozen=True)
class Lock:
    path: Path
    text: str

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @cached_property
    def pins(self) -> dict[str, str]:
        """Canonical distribution name -> version."""
        return {canonicalize_name(name): version for name, version in _PIN.findall(self.text)}

    @cached_property
    def hashes(self) -> dict[str, frozenset[str]]:
        """Canonical distribution name -> SHA-256 of every file that it may come from."""
        starts = list(_PIN.finditer(self.text))
        ends = [match.start() for match in starts[1:]] + [len(self.text)]
        return {
            canonicalize_name(match[1]): frozenset(_HASH.findall(self.text, match.start(), end))
            for match, end in zip(starts, ends, strict=True)
        }


def lock_command(manifest: EnvManifest, variant: str, folder: Path | None = None) -> str:
    """`folder`: of the manifest, in place of its own path."""
    words = ["lz", "env", "lock", manifest.name]
    if variant not in OWN_VARIANTS:
        words += ["--variant", variant]
    if manifest.python not in manifest.pythons[:1]:
        words += ["--python", str(manifest.python)]
    if manifest.folder is not None:
        words += ["--manifests", str(folder or manifest.folder)]
    return shlex.join(words)


def is_in_a_package(manifest: EnvManifest) -> bool:
    """Whether its locks lie where pip has installed LayerZero, and the next installation replaces them."""
    return manifest.folder is None and not {"site-packages", "dist-packages"}.isdisjoint(manifest.path.resolve().parts)


def find_lock(manifest: EnvManifest, variant: VariantName) -> Lock | None:
    """The committed lock of a variant as it is, or None."""
    path = manifest.lock_path(variant)
    try:
        return Lock(path, path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def read_lock(manifest: EnvManifest, variant: VariantName) -> Lock:
    """The committed lock of a variant. Raises EnvError when it is absent or does not satisfy the manifest."""
    wanted = manifest.requirements(variant)
    path = manifest.lock_path(variant)
    repair = lock_command(manifest, variant)
    found = find_lock(manifest, variant)
    if found is None:
        raise EnvError(
            f"{path}: environment {manifest.name} has no lock for {variant}; run: {repair}",
            env=manifest.name,
            cause=f"{path} does not exist",
            repair=repair,
        )
    for requirement in map(Requirement, wanted):
        pinned = found.pins.get(canonicalize_name(requirement.name))
        if requirement.url is None and (pinned is None or not requirement.specifier.contains(pinned, prereleases=True)):
            raise EnvError(
                f"{path}: {requirement} is not satisfied by the lock, which has {pinned or 'no such package'}; "
                f"run: {repair}",
                env=manifest.name,
                cause=f"{path} is older than its manifest",
                repair=repair,
            )
    unwanted = [name for name in manifest.variants[variant].without if name in found.pins]
    if unwanted:
        raise EnvError(
            f"{path}: {', '.join(unwanted)} is in the lock and in variants.{variant}.without; run: {repair}",
            env=manifest.name,
            cause=f"{path} is older than its manifest",
            repair=repair,
        )
    return found


def lock(
    manifest: EnvManifest,
    variant: VariantName,
    *,
    installer: Uv | None = None,
    path: Path | None = None,
    title: str = "",
    head: str = "",
) -> Lock:
    """Resolve a variant's requirements afresh on the user's indexes and write its lock, or `path`, with `title` in the
    place of the manifest's name, and `head` of the lines below the first. Downloads metadata only.

    Raises EnvError when they do not resolve to wheels, or when uv is missing (pip cannot write hashes).
    """
    requirements = manifest.requirements(variant)
    tool = installer or uv()
    if tool is None:
        raise EnvError(
            f"locking {manifest.name} needs uv", env=manifest.name, cause="no uv", repair="python -m pip install uv"
        )
    argv = [
        *(tool.binary, "pip", "compile", "-", "--quiet", "--generate-hashes", "--only-binary", ":all:"),
        *("--python-version", manifest.python, "--python-platform", f"x86_64-{manifest.platform}"),
        *("--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "--no-python-downloads"),
        *tool.flags,
    ]
    with tempfile.NamedTemporaryFile("w", prefix="lz-without-", suffix=".txt") as overrides:
        # uv leaves out what is overridden for no interpreter at all.
        overrides.writelines(f"{name}; python_version < '3'\n" for name in manifest.variants[variant].without)
        overrides.flush()
        answer = subprocess.run(
            [*map(str, argv), "--override", overrides.name],
            input="\n".join(requirements),
            env=tool_environ(os.environ, tool.environ),
            capture_output=True,
            text=True,
            check=False,
        )
    if answer.returncode != 0:
        cause = without_passwords(answer.stderr.strip())
        said = f"{manifest.path}: variants.{variant} does not resolve"
        repair = f"edit variants.{variant}.requirements in {manifest.path}, then: {lock_command(manifest, variant)}"
        if manifest.provider == "functions":  # its manifest is written by who declares it
            said = f"require something else of environment {manifest.name}: it does not resolve"
            repair = "change what lz.env requires, or the file that it reads that from"
        raise EnvError(f"{said}:\n{cause}", env=manifest.name, cause=cause, repair=repair)
    where = ", in this folder" if manifest.folder is not None else ""
    header = f"# {title or manifest.name}, {variant}: Python {manifest.python}, x86_64, {manifest.platform} or newer.\n"
    header += head or f"# Do not edit. Regenerate{where}: {lock_command(manifest, variant, Path('.'))}\n"
    written = Lock(path or manifest.lock_path(variant), header + answer.stdout)
    aside = written.path.with_name(f".{written.path.name}.{os.getpid()}")
    try:
        aside.write_text(written.text, encoding="utf-8")
        aside.replace(written.path)
    except OSError as exc:
        cause = f"{written.path} cannot be written: {exc.strerror or exc}"
        repair = (
            "make that folder writable" if path else "lock it in a checkout of LayerZero, or make that folder writable"
        )
        raise EnvError(cause, env=manifest.name, cause=cause, repair=repair) from exc
    return written
