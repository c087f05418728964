"""Environments of functions (docs/functions.md): backends whose manifest, descriptor and lock are written by `lz.env`,
into a folder of the store that brokers and `lz env` look into as well.

A declaration is named by what it asks for, so that two programs may call different ones alike.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import platformdirs

from layerzero.capabilities.descriptor import Capability
from layerzero.envs import locked
from layerzero.envs import manifest as manifests
from layerzero.envs.build import existing
from layerzero.envs.build import store as locks
from layerzero.envs.build.build import base_drift, ensure, find
from layerzero.envs.build.env import Env
from layerzero.envs.build.lock import Lock, find_lock, read_lock
from layerzero.envs.build.lock import lock as write_lock
from layerzero.envs.build.progress import Progress
from layerzero.envs.declared import Declared
from layerzero.envs.manifest import EnvManifest
from layerzero.envs.probe.probe import DEFAULT_TIMEOUT_S, probe_cached
from layerzero.ipc import files
from layerzero.ipc.errors import ConfigError, EnvError
from layerzero.ipc.vocabulary import pools

VARIABLE = "LAYERZERO_FUNCTIONS"  # workers/providers/functions.py reads it


def default_store(environ: Mapping[str, str]) -> Path:
    """As `lz env` and brokers without a configuration file find it."""
    return Path(environ.get("LAYERZERO_STORE") or platformdirs.user_cache_path("layerzero")).absolute()


def folder(store: Path) -> Path:
    return store.absolute() / "functions"


def manifest_path(declared: Declared, store: Path) -> Path:
    return folder(store) / f"{declared.backend}.toml"


def folders(store: Path, named: Sequence[Path] = ()) -> tuple[Path, ...]:
    """Those that were `named`, and this one where there is one."""
    ours = folder(store)
    is_known = any(path.absolute() == ours for path in named)
    return (*named, ours) if ours.is_dir() and not is_known else tuple(named)


def all_built(store: Path) -> list[str]:
    """The environments that can be called, by their backends."""
    found = []
    for path in sorted(folder(store).glob("*.toml")):
        with contextlib.suppress(ConfigError, EnvError):
            manifest = manifests.load(path)
            if is_ours(manifest) and manifest.image is None and find(manifest, store=store.absolute()).is_built:
                found.append(manifest.name)
    return found


def is_ours(manifest: EnvManifest) -> bool:
    """Whether a declaration wrote this manifest."""
    return manifest.provider == "functions"


def is_of_image(name: str, store: Path) -> bool:
    """Whether an environment of this name was declared whose workers join, from containers of an image."""
    path = folder(store) / f"{name}.toml"
    if not pools.is_environment(name) or not path.is_file():
        return False
    try:
        manifest = manifests.load(path)
    except ConfigError:
        return False
    return is_ours(manifest) and manifest.image is not None


def declare(declared: Declared, store: Path) -> EnvManifest:
    """Write manifest and descriptor where they are not there yet, and note which was declared last. Raises
    ConfigError."""
    path = manifest_path(declared, store)
    if path.is_file():
        with contextlib.suppress(OSError):  # of another user, say
            os.utime(path)
    else:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if is_locked(declared):
                files.put(path.parent / f"{declared.backend}.cpu.txt", str(declared.lock_text))
            files.put(path.with_suffix(".json"), json.dumps(_descriptor(declared), indent=1) + "\n")
            files.put(path, _manifest(declared))
        except OSError as exc:
            raise ConfigError(f"{path} cannot be written: {exc.strerror or exc}; set LAYERZERO_STORE") from exc
    return manifests.load(path)


def is_locked(declared: Declared) -> bool:
    """Whether it has a lock file that holds for it."""
    try:
        locked.demand(declared)
    except EnvError:
        return False
    return bool(declared.lock)


def declared_by(manifest: EnvManifest) -> Declared:
    """What a manifest of ours was written for, with its lock file as it is now. Raises ConfigError."""
    name, _, _ = manifest.name.rpartition(".")
    if manifest.image is not None:
        return Declared.of(name, (), "", image=manifest.image)
    requires = manifest.variants["cpu"].requirements
    if manifest.executable is not None:
        return Declared.of(name, requires, "", manifest.executable)
    asked = Declared.of(name, requires, str(manifest.python))
    return asked.with_lock(manifest.locked_by) if manifest.locked_by else asked


def lock(manifest: EnvManifest, store: Path) -> tuple[Lock, str]:
    """Resolve again what a program has declared with a lock file, and write that; with the name of the backend that it
    is from then on. Raises EnvError, ConfigError."""
    asked = declared_by(manifest)
    return write(asked, store)


def write(asked: Declared, store: Path) -> tuple[Lock, str]:
    """As `lock`, of a declaration that has the path of a lock file."""
    path = Path(asked.lock)
    head = locked.head(asked.requires, path)
    written = write_lock(declare(asked, store), "cpu", path=path, title=asked.name, head=head)
    new = asked.with_lock(asked.lock)
    locked.demand(new)
    declare(new, store)
    if new.backend != asked.backend and not asked.lock_text:  # nobody can build that one
        remove(asked.backend, store)
    return written, new.backend


def full_name(name: str, store: Path) -> str:
    """The backend that a name means: itself, or the environment of functions that is called so; of several that which
    a program has declared last."""
    alike = [path for path in folder(store).glob("*.toml") if path.stem.rpartition(".")[0] == name]
    return max(alike, key=lambda path: path.stat().st_mtime_ns).stem if alike else name


def found(declared: Declared, store: Path) -> str:
    """The interpreter that is named, as it is now; empty where the environment has one of its own. Raises EnvError
    where it cannot be used."""
    return existing.look(declare(declared, store)).text if declared.interpreter else ""


def changed(declared: Declared, store: Path) -> str:
    """What has changed since the environment was built; empty for nothing."""
    env = built(declared, store)
    return "" if env is None else base_drift(env)


def built(declared: Declared, store: Path) -> Env | None:
    """The environment where it is built."""
    path = manifest_path(declared, store)
    if not path.is_file():
        return None
    try:
        env = find(manifests.load(path), store=store.absolute())
    except (EnvError, ConfigError):
        return None
    return env if env.is_built else None


def pins(declared: Declared, store: Path) -> dict[str, str]:
    """What its lock has, canonical name to version; nothing where there is none yet."""
    path = manifest_path(declared, store)
    try:
        kept = find_lock(manifests.load(path), "cpu") if path.is_file() else None
    except ConfigError:
        return {}
    return {} if kept is None else kept.pins


def lock_where_missing(manifest: EnvManifest, progress: Progress) -> None:
    """Resolve a declaration that has no lock yet; of an existing interpreter, where that lacks what a worker needs.
    Raises EnvError with what the resolver says."""
    if manifest.interpreter == "existing":
        try:
            manifest = existing.look(manifest).beside
        except EnvError:
            return  # whoever builds it is told so, and others are built
        if not manifest.requirements("cpu"):
            return
        kept = find_lock(manifest, "cpu")
        if kept is not None and len(kept.pins) > len(manifest.requirements("cpu")):  # it lacked more then
            kept.path.unlink(missing_ok=True)
    if manifest.locked_by is not None:
        _demand_locked(manifest)
    for variant in manifest.variants:
        try:
            read_lock(manifest, variant)
        except EnvError:
            progress.phase(manifest.name, "resolving")
            write_lock(manifest, variant)


def _demand_locked(manifest: EnvManifest) -> None:
    """One that holds to a lock file is never resolved on the way. Raises EnvError, ConfigError."""
    if find_lock(manifest, "cpu") is not None:
        return
    asked = declared_by(manifest)
    if asked.backend == manifest.name:
        locked.demand(asked)
    declare(asked, manifest.path.parent.parent)
    text = f"run: lz env build {asked.backend}\n{asked.lock} is another by now, and so is its environment"
    raise EnvError(text, env=manifest.name, cause="its lock is another by now", repair=f"lz env build {asked.backend}")


def build(declared: Declared, store: Path, progress: Progress, *, force: bool = False) -> Env:
    """Lock, build and probe what is missing. Raises EnvError, ConfigError."""
    locked.demand(declared)
    manifest = declare(declared, store)
    lock_where_missing(manifest, progress)
    env = ensure(manifest, store=store.absolute(), progress=progress, force=force)
    record = probe_cached(env, manifest, timeout_s=DEFAULT_TIMEOUT_S)
    if not record.ok:
        text = (
            f"environment {env.name} is built, and its probe failed: {record.cause}\nto repair it run: {record.repair}"
        )
        raise EnvError(text, env=env.name, cause=record.cause, repair=record.repair)
    return env


def remove(name: str, store: Path) -> bool:
    """Forget a declaration, by the name of its backend: `lz env gc` removes its environment. Whether there was one."""
    ours = folder(store)
    path = ours / f"{name}.toml"
    if not re.fullmatch(manifests.NAME_PATTERN, name) or not path.is_file():
        return False
    with locks.locked(ours / name):
        for one in (path, path.with_suffix(".json"), *ours.glob(f"{name}.cpu*.txt")):
            one.unlink(missing_ok=True)
    return True


def given_to(manifest: EnvManifest, backend: str) -> tuple[bytes, dict[str, str]]:
    """The descriptor and the variables that a worker which joins is given; those of several workers of an environment
    have their own names."""
    text, variables = manifest.descriptor_path.read_bytes(), dict(manifest.env)
    if backend == manifest.name or not is_ours(manifest):
        return text, variables
    told = json.loads(text)
    told["backend"] = backend
    for kernels in told["ops"].values():
        for kernel in kernels:
            kernel["kernel_id"] = f"{backend}.call"
    return json.dumps(told).encode(), {**variables, VARIABLE: backend}


def of_worker(capability: Capability, backend: str) -> Capability:
    """What the descriptor of an environment says of one of its workers."""
    ops = {
        op: tuple(kernel.model_copy(update={"kernel_id": f"{backend}.call"}) for kernel in kernels)
        for op, kernels in capability.ops.items()
    }
    return capability.model_copy(update={"backend": backend, "ops": ops})


def _manifest(declared: Declared) -> str:
    asked = ", ".join(declared.requires) or "nothing but Python"
    summary, where = f"functions: {asked}", [f"python = {_text(declared.python)}"]
    if declared.interpreter:
        summary = f"functions: {declared.interpreter}{', '.join(('', *declared.requires))}"
        where = ['interpreter = "existing"', f"executable = {_text(declared.interpreter)}"]
    if declared.image:
        summary = f"functions: image {declared.image}"
        where = ['interpreter = "image"', f"image = {_text(declared.image)}"]
    requirements = "requirements = [" + ", ".join(map(_text, declared.requires)) + "]"
    lines = [
        "# Written by lz.env; its name ends in a hash of what it asks for.",
        f"summary = {_text(summary[:200])}",
        'provider = "functions"',
        f"descriptor = {_text(f'{declared.backend}.json')}",
        *where,
        *([f"locked_by = {_text(declared.lock)}"] if declared.lock else []),
        "",
        "[env]",
        f"{VARIABLE} = {_text(declared.backend)}",
        *(() if declared.image else ("", "[variants.cpu]", requirements)),
    ]
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _descriptor(declared: Declared) -> dict[str, object]:
    kernel = {
        "kernel_id": f"{declared.backend}.call",
        "priority": 50,
        "source": "layerzero.workers.providers.functions",
        "optional_args": [f"m{n}" for n in range(8)],
        "copies_outputs": True,
        "deterministic": False,
        "rng": "global",
    }
    return {
        "schema_version": "1.0",
        "backend": declared.backend,
        "backend_version": "0",
        "platform": "cpu",
        "ops": {"function": [kernel]},
    }
