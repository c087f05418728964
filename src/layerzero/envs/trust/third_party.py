"""Backends from outside: packages that declare an entry point of the group layerzero.backends, and what was added from
a folder or a wheel. Found by their metadata, read as data; nothing of them is imported here.

A backend counts when `kernel_sources` allows exactly these sources, and is then run from a copy in the store.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from layerzero.envs import functions
from layerzero.envs import manifest as manifests
from layerzero.envs.manifest import EnvManifest, Problem, Source
from layerzero.envs.trust.allowed import Allowed, kept, record_path
from layerzero.envs.trust.bundle import ENTRY_POINTS, MAX_FILE_BYTES, Bundle, package_parts, read_folder
from layerzero.envs.versions import declaration
from layerzero.ipc import files
from layerzero.ipc.errors import ConfigError
from layerzero.ipc.logs import log
from layerzero.ipc.vocabulary.policy import KERNEL_SOURCES, REFUSE


@dataclass(frozen=True)
class Place:
    """Where a backend may be read from. `folder` is empty and `problem` says why where there is none."""

    name: str
    folder: Path
    origin: str
    problem: str = ""

    def read(self) -> Bundle:
        """Raises ConfigError."""
        if self.problem:
            raise ConfigError(self.problem)
        return read_folder(self.folder, self.name, self.origin)


def installed() -> dict[str, Place]:
    """What packages beside this interpreter declare, by name. Reads metadata only; a distribution whose metadata cannot
    be read declares nothing."""
    found: dict[str, Place] = {}
    for point, dist in _declared():
        try:
            folder = _folder(point.name, point.value, dist)
            place = Place(point.name, folder, f"{dist}, installed in {folder}")
        except ConfigError as exc:
            place = Place(point.name, Path(), dist, exc.message)
        other = found.setdefault(point.name, place)
        if other is not place:
            text = f"backend {point.name!r} is declared by both {other.origin} and {dist}; uninstall one of them"
            found[point.name] = Place(point.name, Path(), dist, text)
    return found


def _declared() -> Iterator[tuple[importlib.metadata.EntryPoint, str]]:
    """Entry points of our group, and of which distribution: the first of a name counts, as for Python."""
    seen = set()
    for dist in importlib.metadata.distributions():
        folder = getattr(dist, "_path", None)  # no other way tells how large the file is before it is read
        try:
            file = Path(str(folder)) / "entry_points.txt"
            text = files.read(file, MAX_FILE_BYTES) if folder is not None and file.exists() else b""
            if ENTRY_POINTS.encode() not in text:
                continue
            name = re.sub(r"[-_.]+", "-", dist.name).lower()
            if name in seen:
                continue
            seen.add(name)
            points = [point for point in dist.entry_points if point.group == ENTRY_POINTS]
            yield from ((point, f"{dist.name} {dist.version}") for point in points)
        except Exception as exc:  # whatever metadata raises: packages that nobody has allowed keep no broker from work
            log("metadata.unreadable", folder=str(folder), error=f"{type(exc).__name__}: {exc}"[:300])


def _folder(name: str, package: str, dist: str) -> Path:
    """Only the top package is asked for: to find one inside another, Python would import the outer one."""
    top, *inner = package_parts(name, package, dist)
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"{dist}: entry point {name}: package {top!r} is not there; install it again")
    return Path(next(iter(spec.submodule_search_locations))).joinpath(*inner)


def places(backends: Path) -> tuple[dict[str, Place], list[Problem]]:
    """All of them, by name; what was added goes before what is installed."""
    found, problems = installed(), []
    for name, folder in kept(backends).items():
        if name in found:
            text = (
                f"backend {name!r} was added to {folder} and is declared by {found[name].origin}; what was added "
                f"counts. To use the other: lz env remove {name}, then lz env add {name}"
            )
            problems.append(Problem(name, folder, text))
        found[name] = Place(name, folder, f"{folder}, added there")
    return found, problems


def discover(
    folders: Sequence[Path], *, backends: Path, store: Path, allowed: Mapping[str, Allowed]
) -> tuple[dict[str, EnvManifest], list[Problem]]:
    """All manifests: those of `folders` (manifest.discover), those of functions' environments and of versions, and then
    those from outside, which have a `source`."""
    found, problems = manifests.discover(declaration.folders(store, functions.folders(store, folders)))
    problems += declaration.renew(found, store)
    outside, doubles = places(backends)
    problems += doubles
    for name, place in sorted(outside.items()):
        try:
            bundle = place.read()
            if name in found:
                text = f"{bundle.origin}: name {name!r} is taken by {found[name].path}; it cannot be used"
                raise ConfigError(text)
            found[name] = load(bundle, store, judge(bundle, allowed, backends))
        except ConfigError as exc:
            problems.append(Problem(name, place.folder, exc.message))
    return found, problems


def load(bundle: Bundle, store: Path, source: Source) -> EnvManifest:
    """The manifest of a bundle, from its copy in the store. Raises ConfigError."""
    try:
        staged = bundle.stage(store.absolute())
    except OSError as exc:
        raise ConfigError(f"{bundle.origin}: cannot be copied to {store}: {exc.strerror or exc}") from exc
    loaded = manifests.load(staged / f"{bundle.name}.toml")
    return loaded.model_copy(update={"source": source})


def judge_now(name: str, *, backends: Path, store: Path, allowed: Mapping[str, Allowed]) -> Source:
    """As `judge`, of one backend as it is at this moment; mends its copy in the store. Raises ConfigError."""
    place = places(backends)[0].get(name)
    if place is None:
        raise ConfigError(f"no installed package declares it, and {backends} does not have it")
    bundle = place.read()
    load(bundle, store, source := judge(bundle, allowed, backends))
    return source


def judge(bundle: Bundle, allowed: Mapping[str, Allowed], backends: Path) -> Source:
    """Whether these very sources are allowed."""
    name, said = bundle.name, allowed.get(bundle.name)
    if said is not None and said.value == bundle.sha256:
        return Source(bundle.origin, bundle.sha256)
    add = f"lz env add {name}"
    if said is None:
        what = (
            f"{KERNEL_SOURCES} does not list backend {name!r} of {bundle.origin} ({bundle.sha256}), so it is neither "
            "built nor run"
        )
        return _refused(bundle, what, add)
    if said.value == REFUSE:
        what = f"{KERNEL_SOURCES} refuses backend {name!r} of {bundle.origin} ({said.origin})"
        return _refused(bundle, what, f"take {name} out of {KERNEL_SOURCES} in {said.origin}")
    what = (
        f"the sources of backend {name!r} of {bundle.origin} have changed: they are {bundle.sha256}, "
        f"{KERNEL_SOURCES} allows {said.value} ({said.origin})"
    )
    is_ours = said.origin.startswith(str(record_path(backends)))
    repair = add if is_ours else f"set {KERNEL_SOURCES}.{name} to {bundle.sha256} in {said.origin}"
    return _refused(bundle, what, repair, is_changed=True)


def _refused(bundle: Bundle, what: str, repair: str, *, is_changed: bool = False) -> Source:
    return Source(bundle.origin, bundle.sha256, what, repair, is_changed)
