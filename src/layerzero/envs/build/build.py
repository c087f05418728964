"""Build environments: a manifest and its lock become a venv, named by the hash of everything that made it.

Built aside and renamed into place under the kernel lock of its name (store.py): a kill at any moment leaves no half
environment, and of several builders of one environment one works and the others wait.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import os
import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

from layerzero.envs.build import downloads, indexes, integrity, interpreters, overlay, stage, store
from layerzero.envs.build.base import Base, inspect
from layerzero.envs.build.cache_place import CACHE_VARIABLE, place_of
from layerzero.envs.build.env import RECORD, Env, cache_folder
from layerzero.envs.build.existing import Existing, changes, look
from layerzero.envs.build.installers import Installer, Runner, ToolFailed, pick
from layerzero.envs.build.interpreters import Python
from layerzero.envs.build.lock import Lock, find_lock, read_lock
from layerzero.envs.build.progress import Progress, Quiet
from layerzero.envs.build.resolution import Resolution, select
from layerzero.envs.build.resolution import resolve as resolve_offline
from layerzero.envs.build.wheelhouse import Wheelhouse
from layerzero.envs.hub import placing
from layerzero.envs.hub.lock import read as read_hub_lock
from layerzero.envs.hub.placing import HubAccess, Kernels
from layerzero.envs.manifest import OWN_VARIANTS, EnvManifest, VariantName, discover
from layerzero.ipc.errors import ConfigError, EnvChanged, EnvError
from layerzero.ipc.names import unknown_name

BUILDER = 1  # part of every id; raise it when the way of building changes what is built


def resolve(name: str, folders: Sequence[Path] = ()) -> EnvManifest:
    """The manifest of that name. Raises ConfigError naming those that exist, or why this one is disabled."""
    found, problems = discover(folders)
    if name in found:
        return found[name]
    broken = [problem.message for problem in problems if problem.name == name]
    raise ConfigError(broken[0] if broken else unknown_name("environment", name, sorted(found)))


def plan(manifest: EnvManifest, *, variant: VariantName = "cpu", store: Path, base: Path | None = None) -> Env:
    """The Env that a manifest and its lock describe, built or not; over the interpreter `base`, when given. Writes
    nothing. Raises EnvError, ConfigError.

    While no overlay is built its `id` is of what is asked for: what is installed is decided when it is built. An
    existing interpreter that has changed since it was built last is that environment still, with drift.
    """
    _demand_no_image(manifest)
    if base is not None and manifest.interpreter == "venv":
        return _plan_overlay(manifest, variant, store.absolute(), inspect(base))[0]
    if manifest.interpreter == "existing":
        env = _plan_existing(manifest, store.absolute())[0]
        last = None if env.is_built else next(overlay.records(env.store, env.name, RECORD, "interpreter"), None)
        if last is not None:
            env = replace(env, id=last["id"], prefix=env.prefix.with_name(f"{env.name}-{last['id']}"))
        return env
    return _plan(manifest, variant, store.absolute())[0]


def _demand_no_image(manifest: EnvManifest) -> None:
    """Raises EnvError for one of containers that somebody else starts."""
    if manifest.image is not None:
        text = f"its workers join, from containers of {manifest.image}: nothing of it is built here"
        repair = f"python -m layerzero.workers.join --backend {manifest.name}, in one"
        raise EnvError(f"{manifest.name}: {text}", env=manifest.name, cause=text, repair=repair)


def find(
    manifest: EnvManifest,
    *,
    variant: VariantName = "cpu",
    store: Path,
    base: Path | None = None,
    wheelhouse: Path | None = None,
) -> Env:
    """The Env to use on this machine: the overlay of `base` where it is built, else the one of the lock where that
    is, with the first of the manifest's Pythons for which it is. When neither is, what `plan` says; its repair names
    `wheelhouse`. A manifest with builds for no accelerator serves with its cpu one."""
    variant = manifest.variant_for(variant)
    if base is None or manifest.interpreter != "venv":
        return _find_own(manifest, variant, store)
    with suppress(EnvError, ConfigError):
        env = plan(manifest, variant=variant, store=store, base=base)
        if env.is_built:
            return env
    with suppress(EnvError, ConfigError):
        env = _find_own(manifest, variant, store)
        if env.is_built:
            return env
    env = plan(manifest, variant=variant, store=store, base=base)
    return replace(env, wheelhouse=wheelhouse.absolute() if wheelhouse else None)


def built_with(root: Path, name: str) -> dict[str, list[str]]:
    """The Pythons ("3.12") with which an environment is built in some version or other -> the names of its folders."""
    found: dict[str, list[str]] = {}
    for path in (root / "envs").glob(f"{name}-*/{RECORD}"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["name"] == name:
                found.setdefault(".".join(str(record["python"]).split(".")[:2]), []).append(path.parent.name)
    return found


def _find_own(manifest: EnvManifest, variant: VariantName, root: Path) -> Env:
    """With the Python that was chosen (EnvManifest.with_python), else the first for which it is built."""
    others = [] if manifest.own_python else list(manifest.pythons[1:])
    if others:
        built = built_with(root, manifest.name)  # looking for a Python that no build has takes seconds
        others = [minor for minor in others if minor in built]
    try:
        first: Env | None = plan(manifest, variant=variant, store=root)
    except EnvError:
        if not others:
            raise
        first = None  # no such Python here, for one
    if first is not None and first.is_built:
        return first
    for minor in others:
        with suppress(EnvError, ConfigError):
            env = plan(manifest.with_python(minor), variant=variant, store=root)
            if env.is_built:
                return env
    return first if first is not None else plan(manifest, variant=variant, store=root)


def _plan(manifest: EnvManifest, variant: VariantName, root: Path) -> tuple[Env, Python, Lock | None]:
    lock: Lock | None = None
    if manifest.interpreter == "host":
        python, content = interpreters.host(), list(_installed())
    else:
        lock = read_lock(manifest, variant)
        python, content = interpreters.find(str(manifest.python), manifest.name), [variant, lock.text]
        content += _pinned(manifest, variant)
    facts = [BUILDER, manifest.name, python.implementation, python.version, python.platform, manifest.platform]
    env_id = hashlib.sha256(json.dumps([*facts, *content]).encode()).hexdigest()[:16]
    return _env(manifest, variant, root, env_id, python, lock.sha256 if lock else ""), python, lock


def _pinned(manifest: EnvManifest, variant: VariantName) -> list[str]:
    """What of the hub's kernels names an environment: their lock."""
    kernels = read_hub_lock(manifest, variant)
    return [] if kernels is None else [kernels.sha256]


@cache
def _installed() -> tuple[str, ...]:
    """What the host's interpreter has of WORKER_REQUIREMENTS; an upgrade is for processes that start after it."""
    return tuple(importlib.metadata.version(dist) for dist in ("pyzmq", "msgpack"))


def _plan_overlay(manifest: EnvManifest, variant: VariantName, root: Path, base: Base) -> tuple[Env, str, Lock | None]:
    """The overlay that is built, or the one to build; with the key of what is asked for and the lock, if there is
    one."""
    requirements, lock = manifest.requirements(variant), find_lock(manifest, variant)
    facts = [BUILDER, manifest.name, variant, *manifest.variants[variant].without, *_pinned(manifest, variant)]
    asked = overlay.key(facts, requirements, lock, base)
    record = overlay.built(overlay.records(root, manifest.name, RECORD), asked, base)
    env = _env(manifest, variant, root, record["id"] if record else asked, base.python, asked)
    known = record["overlay"]["wheelhouse"] if record else None
    return replace(env, base=base.python.path, wheelhouse=Path(known) if known else None), asked, lock


def _plan_existing(manifest: EnvManifest, root: Path) -> tuple[Env, Existing, Lock | None]:
    """An interpreter as it is now, and the lock of what it lacks for workers, where it does and there is one."""
    found = look(manifest)
    lock = find_lock(found.beside, "cpu") if found.lacks else None
    facts = [BUILDER, manifest.name, found.identity, lock.sha256 if lock else ""]
    env_id = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    env = _env(found.beside, "cpu", root, env_id, found.base.python, found.digest)
    code = env.environ["PYTHONPATH"]
    site = overlay.site_packages(env.prefix, found.base.python.minor)
    environ = {**env.environ, **found.environ(), "PYTHONPATH": f"{code}{os.pathsep}{site}" if found.lacks else code}
    return replace(env, python=found.path, environ=environ, existing=manifest), found, lock


def _env(manifest: EnvManifest, variant: VariantName, root: Path, env_id: str, python: Python, lock_hash: str) -> Env:
    prefix = root / "envs" / f"{manifest.name}-{env_id}" if lock_hash else python.path.parent.parent
    site = str(overlay.site_packages(prefix, python.minor))
    compiles_for = place_of(manifest, variant)
    cache = str(cache_folder(root, manifest.name, env_id, compiles_for))
    places = {"{store}": str(root), "{site}": site, "{cache}": cache}
    environ = dict(manifest.env)
    for name, place in itertools.product(environ, places):
        environ[name] = environ[name].replace(place, places[place])
    return Env(
        name=manifest.name,
        variant=variant,
        id=env_id,
        python=prefix / "bin" / "python" if lock_hash else python.path,
        prefix=prefix,
        environ={
            **environ,
            **({CACHE_VARIABLE: cache} if compiles_for else {}),
            **placing.environ(manifest, prefix),
            "PYTHONPATH": str(stage.staged_path(root)),
            "PYTHONSAFEPATH": "1",  # no working directory on sys.path (since Python 3.11)
            "PYTHONNOUSERSITE": "1",
        },
        lock_hash=lock_hash,
        source_hash=stage.source_hash(),
        store=root,
        other_python=str(manifest.python) if manifest.python not in (*manifest.pythons[:1], None) else "",
        folder=manifest.folder,
        place=compiles_for,
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
    base: Path | None = None,
    wheelhouse: Path | None = None,
    hub: HubAccess | None = None,
) -> Env:
    """Return a built environment with its worker code staged, building what is missing. Cheap when nothing is.

    `folders` are searched for a manifest given by name. `force` builds again, unless the environment is in use.
    With `base` it is an overlay of that interpreter; with `base` or `wheelhouse` no network is used. `hub`: where
    kernels of the hub come from, and who may have signed them.
    Raises EnvError (facts: env, cause, repair) and ConfigError.
    """
    found = resolve(manifest, folders) if isinstance(manifest, str) else manifest
    root, below, asked, there = store.absolute(), None, "", None
    _demand_no_image(found)
    if found.interpreter == "existing":
        env, there, lock = _plan_existing(found, root)
        python = there.base.python
        if there.lacks:
            lock = read_lock(there.beside, variant)
    elif base is not None and found.interpreter != "host":
        below = inspect(base)
        env, asked, lock = _plan_overlay(found, variant, root, below)
        python = below.python
    else:
        env, python, lock = _plan(found, variant, root)
    stage.stage(env.store)
    if env.on_host or (env.is_built and not force and not drift(env)):
        return env
    progress = progress or Quiet()
    start = time.monotonic()
    progress.started(env.name)
    env = replace(env, wheelhouse=wheelhouse.absolute() if wheelhouse else None)
    try:
        access = hub or HubAccess()
        has_network = base is None and wheelhouse is None
        kernels = placing.kernels_of(found, variant, access if has_network else access.offline())
        wheels: Resolution | None = None
        if below is not None:
            house = Wheelhouse(wheelhouse)
            without = found.variants[variant].without
            wheels = resolve_offline(env.name, found.requirements(variant), below, house, lock=lock, without=without)
            env = replace(
                _env(found, variant, root, overlay.content(asked, wheels), python, asked),
                base=env.base,
                wheelhouse=env.wheelhouse,
            )
        elif wheelhouse is not None and lock is not None:
            wheels = select(env.name, lock, inspect(python.path), Wheelhouse(wheelhouse))
        work = _Work(env, python, lock, wheels, below, asked, installer or pick(), progress, kernels, there)
        nbytes = _build_locked(work, force)
    except EnvError as exc:
        progress.failed(env.name, time.monotonic() - start, str(exc.facts["cause"]))
        raise
    progress.done(env.name, time.monotonic() - start, nbytes)
    return env


def base_drift(env: Env) -> str:
    """What has changed below an overlay, or of an existing interpreter, since its build; empty for none, and for all
    other environments. Raises EnvError when that interpreter cannot be run, or used any more."""
    if env.existing is not None and env.is_built:
        return changes(env.record(), look(env.existing))
    record = env.record() if env.base is not None else {}
    return overlay.drift(record, inspect(Path(record["overlay"]["python"]))) if record else ""


def drift(env: Env, *, verify: bool = False) -> str:
    """What has changed since the build, below an overlay or in the environment's own files; empty for nothing. Takes
    some milliseconds for each thousand files; `verify` hashes all of them. Raises EnvError like `base_drift`."""
    if env.on_host or not env.is_built:
        return ""
    try:
        found = base_drift(env) or integrity.describe(env.prefix, integrity.changes(env.prefix, verify=verify))
    except OSError as exc:
        if not env.is_built:
            return ""  # removed at this moment
        found = f"{exc.filename} cannot be read ({exc.strerror})"
    return found


def check(env: Env) -> None:
    """Raises EnvChanged where there is drift."""
    if changed := drift(env):
        raise _error(env, "must be built again", changed, EnvChanged)


def hold(env: Env, *, checks: bool = True) -> ExitStack:
    """Keep gc and forced builds away from an environment and its staged code until `.close()`, or our end.

    Raises EnvError when they are already gone, EnvChanged when there is drift; ensure() brings them back. Without
    `checks` drift is not looked for.
    """
    stack = ExitStack()
    for target in (env.lock_target, stage.staged_path(env.store)):
        stack.callback(os.close, store.open_lock(target, shared=True))
    with ExitStack() as failing:
        failing.push(stack)
        if not env.is_built or not stage.staged_path(env.store).is_dir():
            raise _error(env, "is not built, or was removed since")
        if checks:
            check(env)
        failing.pop_all()
    return stack


def command(verb: str, env: Env, *flags: str) -> str:
    """The `lz env` command line that does `verb` to this very environment."""
    words = ["lz", "env", verb, env.name]
    if env.folder is not None:
        words += ["--manifests", str(env.folder)]
    if env.variant != "cpu" and env.variant not in OWN_VARIANTS:
        words += ["--variant", env.variant]
    if env.other_python:
        words += ["--python", env.other_python]
    if env.base is not None:
        words += ["--overlay", str(env.base)]
    house = env.wheelhouse or env.record().get("wheelhouse")
    if house is not None and verb == "build" and Path(house).is_dir():
        words += ["--offline", "--wheelhouse", str(house)]
    return shlex.join([*words, *flags])


@dataclass(frozen=True)
class _Work:
    """One build."""

    env: Env
    python: Python
    lock: Lock | None
    wheels: Resolution | None  # None: what the lock lists, from the user's indexes
    base: Base | None
    asked: str
    installer: Installer
    progress: Progress
    kernels: Kernels | None  # of the hub
    existing: Existing | None = None

    def say(self, text: str) -> None:
        self.progress.phase(self.env.name, text)

    @property
    def versions(self) -> dict[str, str]:
        return self.wheels.versions if self.wheels is not None else self.lock.pins if self.lock else {}


def _build_locked(work: _Work, force: bool) -> int:
    """Build under the lock, unless another builder was faster. Returns the size in bytes."""
    env = work.env

    def on_wait() -> None:
        work.say("waiting for another process that builds or uses it")

    must_replace = force or env.is_built  # built and yet here: it has drifted
    try:
        with ExitStack() as taken:
            if must_replace:
                lock_fd: int | None = taken.enter_context(store.locked_now(env.lock_target))
            else:
                lock_fd = taken.enter_context(
                    store.locked_unless(env.lock_target, lambda: env.is_built, on_wait=on_wait)
                )
            if lock_fd is not None and (force or not env.is_built or drift(env)):
                _build(work, lock_fd)
    except store.InUse as exc:
        raise _error(env, "is in use; stop the broker that uses it first (lz down)") from exc
    except ToolFailed as exc:
        hint, setting = indexes.hint(work.versions, str(exc)) if work.wheels is None else ("", "")
        raise _error(env, "could not be built", hint + str(exc), setting=setting) from exc
    except OSError as exc:
        raise _error(env, "could not be built", f"{exc.strerror or exc} ({exc.filename or env.prefix})") from exc
    return int(env.record()["size_bytes"])


def _build(work: _Work, lock_fd: int) -> None:
    start = time.monotonic()
    env, wheels = work.env, work.wheels
    with store.built_aside(env.prefix) as folder:
        run = Runner(env.prefix.parent, lock_fd, work.say)
        if work.existing is not None:
            work.say(f"as it is: {work.existing.text}")
            for asked, why in work.existing.lacks:
                work.say(f"workers need {asked}: {why}; it is put into the store, not there")
        if work.existing is None or work.lock is not None:
            work.say(f"creating a Python {work.python.version} environment with {work.installer.name}")
            work.installer.create(folder, work.python.path, run)
        if work.kernels is not None:
            work.say(work.kernels.told)
            work.kernels.place(folder)
        if wheels is None and work.lock is not None:
            planned = downloads.of_lock(work.lock, work.python, work.installer)
            work.say(str(planned).partition("\n")[0])  # why it is not known, the installer will say
            metered = replace(run, report=downloads.metered(planned, work.say))
            work.installer.install(folder, work.lock.path, metered)
        elif wheels is not None and wheels.wheels:
            work.say(f"installing {len(wheels.wheels)} wheels of {env.wheelhouse}")
            for name in wheels.unlocked:
                work.say(f"no lock has {name}: its hash is recorded, not verified")
            listed = folder / "lz-wheels.txt"
            listed.write_text(wheels.text, encoding="utf-8")
            work.installer.install(folder, listed, run, env.wheelhouse)
        record = {
            "id": env.id,
            "name": env.name,
            "variant": env.variant,
            "versions": work.versions,
            "lock_hash": work.lock.sha256 if work.lock else "",
            "python": work.python.version,
            "platform": work.python.platform,
            "installer": work.installer.name,
            "builder": BUILDER,
            "wheelhouse": str(env.wheelhouse) if env.wheelhouse else None,
            "size_bytes": store.tree_size(folder),
            "seconds": round(time.monotonic() - start, 3),
            "built_at": datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        }
        if work.kernels is not None:
            record["hub"] = work.kernels.record()
        if work.base is not None and wheels is not None:
            work.say(f"{len(wheels.taken)} packages come from {env.base}")
            overlay.link(folder, work.base)
            record["overlay"] = overlay.facts(work.asked, work.base, env.wheelhouse, wheels)
        if work.existing is not None:
            record["interpreter"] = work.existing.record()
        _verify(work, folder, run)
        (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for verdict in (env.store / "probes").glob(f"{env.name}-*.json"):
        verdict.unlink(missing_ok=True)  # on what was there before


def _verify(work: _Work, folder: Path, run: Runner) -> None:
    """Compare each file with the hash that its wheel has for it. An installer that links files from its cache gives
    what the cache has now, and a file that someone changed in one environment is changed in the cache: then the
    wheel is unpacked afresh."""
    work.say("verifying files")
    wrong = integrity.take(folder)
    dists = sorted({change.dist.partition(" ")[0] for change in wrong})
    if dists:
        listed = folder / "lz-wheels.txt"
        source = work.lock.path if work.wheels is None and work.lock is not None else listed
        work.say(f"unpacking afresh, since {work.installer.name}'s cache has other files: {', '.join(dists)}")
        work.installer.install(folder, source, run, work.env.wheelhouse, afresh=dists)
        wrong = integrity.take(folder)
    if wrong:  # the wheel is what the lock says; it contradicts itself
        work.say(f"their own RECORD differs: {integrity.describe(folder, wrong)}")


def _error(env: Env, what: str, cause: str = "", kind: type[EnvError] = EnvError, *, setting: str = "") -> EnvError:
    """`setting`: NAME=VALUE, without which building again fails again."""
    repair = " ".join(filter(None, (setting, command("build", env))))
    text = f"{what}: {cause}" if cause else what
    return kind(
        f"environment {env.name} {text}\nto repair it run: {repair}", env=env.name, cause=cause or what, repair=repair
    )
