"""Build environments: a manifest and its lock become a venv, named by the hash of everything that made it.

Built aside and renamed into place under the kernel lock of its name (store.py): a kill at any moment leaves no half
environment, and of several builders of one environment one works and the others wait.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from layerzero.envs import interpreters, stage, store
from layerzero.envs.installers import Installer, Runner, ToolFailed, pick
from layerzero.envs.interpreters import Python
from layerzero.envs.lock import Lock, read_lock
from layerzero.envs.manifest import EnvManifest, VariantName, discover
from layerzero.envs.progress import Progress, Quiet
from layerzero.ipc.errors import ConfigError, EnvError

BUILDER = 1  # part of every id; raise it when the way of building changes what is built
RECORD = "lz-env.json"


@dataclass(frozen=True)
class Env:
    """A place to run one backend. `environ` is to be merged over environ.worker_environ's passed variables."""

    name: str
    variant: VariantName
    id: str  # of what is installed
    python: Path
    prefix: Path
    environ: Mapping[str, str]
    lock_hash: str  # SHA-256 of the lock; empty for the broker's own interpreter
    source_hash: str  # of the staged worker code
    store: Path

    @property
    def on_host(self) -> bool:
        """Runs in the interpreter of the broker; nothing is built."""
        return not self.lock_hash

    @property
    def lock_target(self) -> Path:
        """What store.py's locks call this environment."""
        return self.store / "envs" / f"{self.name}-{self.id}"

    @property
    def is_built(self) -> bool:
        # Not the record alone: bin/python dangles when the interpreter below the venv was removed.
        return self.on_host or ((self.prefix / RECORD).is_file() and self.python.exists())

    def record(self) -> dict[str, Any]:
        """What lz-env.json says: id, versions, sizes, times. Empty for host environments."""
        if self.on_host or not self.is_built:
            return {}
        found: dict[str, Any] = json.loads((self.prefix / RECORD).read_text(encoding="utf-8"))
        return found


def resolve(name: str, folders: Sequence[Path] = ()) -> EnvManifest:
    """The manifest of that name. Raises ConfigError naming those that exist, or why this one is disabled."""
    found, problems = discover(folders)
    if name in found:
        return found[name]
    broken = [problem.message for problem in problems if problem.name == name]
    raise ConfigError(broken[0] if broken else f"no environment is called {name!r}; known: {', '.join(sorted(found))}")


def plan(manifest: EnvManifest, *, variant: VariantName = "cpu", store: Path) -> Env:
    """The Env that a manifest and its lock describe, built or not. Writes nothing. Raises EnvError, ConfigError."""
    return _plan(manifest, variant, store.absolute())[0]


def _plan(manifest: EnvManifest, variant: VariantName, root: Path) -> tuple[Env, Python, Lock | None]:
    lock: Lock | None = None
    if manifest.interpreter == "host":
        python, content = interpreters.host(), [importlib.metadata.version(dist) for dist in ("pyzmq", "msgpack")]
    else:
        lock = read_lock(manifest, variant)
        python, content = interpreters.find(str(manifest.python), manifest.name), [variant, lock.text]
    facts = [BUILDER, manifest.name, python.implementation, python.version, python.platform, manifest.platform]
    env_id = hashlib.sha256(json.dumps([*facts, *content]).encode()).hexdigest()[:16]
    prefix = root / "envs" / f"{manifest.name}-{env_id}"
    environ = {
        **{name: value.replace("{store}", str(root)) for name, value in manifest.env.items()},
        "PYTHONPATH": str(stage.staged_path(root)),
        "PYTHONSAFEPATH": "1",  # no working directory on sys.path (since Python 3.11)
        "PYTHONNOUSERSITE": "1",
    }
    return (
        Env(
            name=manifest.name,
            variant=variant,
            id=env_id,
            python=python.path if lock is None else prefix / "bin" / "python",
            prefix=prefix if lock else python.path.parent.parent,
            environ=environ,
            lock_hash=lock.sha256 if lock else "",
            source_hash=stage.source_hash(),
            store=root,
        ),
        python,
        lock,
    )


def ensure(
    manifest: EnvManifest | str,
    *,
    store: Path,
    variant: VariantName = "cpu",
    folders: Sequence[Path] = (),
    installer: Installer | None = None,
    progress: Progress | None = None,
    force: bool = False,
) -> Env:
    """Return a built environment with its worker code staged, building what is missing. Cheap when nothing is.

    `folders` are searched for a manifest given by name. `force` builds again, unless the environment is in use.
    Raises EnvError (facts: env, cause, repair) and ConfigError.
    """
    found = resolve(manifest, folders) if isinstance(manifest, str) else manifest
    env, python, lock = _plan(found, variant, store.absolute())
    stage.stage(env.store)
    if lock is None or (env.is_built and not force):
        return env
    progress = progress or Quiet()
    start = time.monotonic()
    progress.started(env.name)
    try:
        nbytes = _build_locked(env, python, lock, installer or pick(), progress, force)
    except EnvError as exc:
        progress.failed(env.name, time.monotonic() - start, str(exc.facts["cause"]))
        raise
    progress.done(env.name, time.monotonic() - start, nbytes)
    return env


def ensure_all(
    manifests: Iterable[EnvManifest],
    *,
    store: Path,
    variant: VariantName = "cpu",
    installer: Installer | None = None,
    progress: Progress | None = None,
    force: bool = False,
    jobs: int = 2,
) -> dict[str, Env | EnvError | ConfigError]:
    """Ensure several environments, `jobs` at a time. A failure is a value, so that it hides no other result."""

    def one(manifest: EnvManifest) -> Env | EnvError | ConfigError:
        try:
            return ensure(manifest, store=store, variant=variant, installer=installer, progress=progress, force=force)
        except (EnvError, ConfigError) as exc:
            return exc

    chosen = list(manifests)
    with ThreadPoolExecutor(max_workers=max(1, jobs), thread_name_prefix="lz-env") as pool:
        return dict(zip((m.name for m in chosen), pool.map(one, chosen), strict=True))


def hold(env: Env) -> ExitStack:
    """Keep gc and forced builds away from an environment and its staged code until `.close()`, or our end.

    Raises EnvError when they are already gone; ensure() brings them back.
    """
    stack = ExitStack()
    for target in (env.lock_target, stage.staged_path(env.store)):
        stack.callback(os.close, store.open_lock(target, shared=True))
    if not env.is_built or not stage.staged_path(env.store).is_dir():
        stack.close()
        raise _error(env, "is not built, or was removed since")
    return stack


def command(verb: str, env: Env, *flags: str) -> str:
    """The `lz env` command line that does `verb` to this very environment."""
    variant = () if env.variant == "cpu" else ("--variant", env.variant)
    return " ".join(("lz", "env", verb, env.name, *variant, *flags))


def _build_locked(env: Env, python: Python, lock: Lock, installer: Installer, progress: Progress, force: bool) -> int:
    """Build under the lock, unless another builder was faster. Returns the size in bytes."""

    def on_wait() -> None:
        progress.phase(env.name, "waiting for another process that builds or uses it")

    taken = store.locked_now(env.lock_target) if force else store.locked(env.lock_target, on_wait=on_wait)
    try:
        with taken as lock_fd:
            if force or not env.is_built:
                _build(env, python, lock, installer, progress, lock_fd)
    except store.InUse as exc:
        raise _error(env, "is in use; stop the broker that uses it first (lz down)") from exc
    except ToolFailed as exc:
        raise _error(env, "could not be built", str(exc) + _index_hint(lock, str(exc))) from exc
    except OSError as exc:
        raise _error(env, "could not be built", f"{exc.strerror or exc} ({exc.filename or env.prefix})") from exc
    return int(env.record()["size_bytes"])


def _build(env: Env, python: Python, lock: Lock, installer: Installer, progress: Progress, lock_fd: int) -> None:
    start = time.monotonic()
    with store.built_aside(env.prefix) as folder:
        run = Runner(env.prefix.parent, lock_fd, lambda line: progress.phase(env.name, line))
        progress.phase(env.name, f"creating a Python {python.version} environment with {installer.name}")
        installer.create(folder, python.path, run)
        progress.phase(env.name, f"installing {len(lock.pins)} packages")
        installer.install(folder, lock.path, run)
        record = {
            "id": env.id,
            "name": env.name,
            "variant": env.variant,
            "versions": lock.pins,
            "lock_hash": lock.sha256,
            "python": python.version,
            "platform": python.platform,
            "installer": installer.name,
            "builder": BUILDER,
            "size_bytes": store.tree_size(folder),
            "seconds": round(time.monotonic() - start, 3),
            "built_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _error(env: Env, what: str, cause: str = "") -> EnvError:
    repair = command("build", env)
    text = f"{what}: {cause}" if cause else what
    return EnvError(
        f"environment {env.name} {text}\nto repair it run: {repair}", env=env.name, cause=cause or what, repair=repair
    )


def _index_hint(lock: Lock, output: str) -> str:
    """Builds such as torch 2.13.0+cpu are on their project's own index only, which a user has to configure."""
    local = [f"{name}=={version}" for name, version in lock.pins.items() if "+" in version and name in output]
    if not local:
        return ""
    return (
        f"\n{', '.join(local)} must come from an index or folder that has this build: name it in pip's configuration "
        "(extra-index-url or find-links) or in uv's"
    )
