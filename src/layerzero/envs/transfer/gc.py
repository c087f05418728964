"""Remove environments, caches, imported wheels and staged code that no manifest asks for any more and nobody uses."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from layerzero.envs import functions
from layerzero.envs.build import overlay, stage, store
from layerzero.envs.build.build import built_with, plan
from layerzero.envs.build.env import RECORD
from layerzero.envs.manifest import EnvManifest, discover
from layerzero.envs.matrix import kept
from layerzero.envs.probe.probe import OF_PROFILE, record_path
from layerzero.envs.versions import declaration
from layerzero.ipc.errors import ConfigError, EnvError


@dataclass(frozen=True)
class Removed:
    path: Path
    freed_bytes: int  # what the disk got back: files that uv's cache shares do not count


@dataclass(frozen=True)
class Collected:
    removed: tuple[Removed, ...]
    in_use: tuple[Path, ...]  # left alone: a worker runs in it or a builder works on it

    @property
    def freed_bytes(self) -> int:
        return sum(item.freed_bytes for item in self.removed)


def collect(
    root: Path, folders: Sequence[Path] = (), undecided: Iterable[str] = (), *, dry_run: bool = False
) -> Collected:
    """Remove what is neither current nor in use: environments, their compilers' caches, staged code, what killed
    builders left, verdicts, what the matrix has not used for long. `undecided`: names whose manifests cannot be read
    now, which is no reason to throw their environments away. `dry_run`: only say what that would be."""
    root = root.absolute()
    folders = declaration.folders(root, functions.folders(root, folders))
    found, problems = discover(folders)
    current: set[str] = set()
    undecided = {*undecided, *(problem.name for problem in problems)}
    for manifest in found.values():
        try:
            current.update(_current(manifest, root))
        except (EnvError, ConfigError):
            undecided.add(manifest.name)
    removed: list[Removed] = []
    in_use: list[Path] = []
    needed = {stage.staged_path(root), *(folder.absolute() for folder in folders)}
    for path, target in _candidates(root):
        if path in needed:
            continue
        if path.name in current or path.name.rpartition("-")[0] in undecided:
            continue
        try:
            with store.locked_now(target):
                freed = store.tree_size(path, freed=True)
                if dry_run:
                    pass
                elif path == target:
                    store.discard(path)
                else:
                    shutil.rmtree(path)
                removed.append(Removed(path, freed))
        except store.InUse:
            in_use.append(path)
    for verdict in sorted((root / "probes").glob("*.json")):
        stem = verdict.stem.partition(OF_PROFILE)[0]
        if f"{stem}.json" not in current and stem.rpartition("-")[0] not in undecided:
            with suppress(FileNotFoundError):  # a builder was faster
                freed = verdict.stat().st_size
                if not dry_run:
                    verdict.unlink()
                removed.append(Removed(verdict, freed))
    removed += [Removed(path, freed) for path, freed in kept.collect(root, dry_run=dry_run)]
    return Collected(tuple(removed), tuple(in_use))


def _current(manifest: EnvManifest, root: Path) -> Iterator[str]:
    """The names of a manifest's folders in envs/ and files in probes/."""
    if manifest.interpreter != "venv":
        env = plan(manifest, store=root)
        yield from (env.lock_target.name, record_path(env, manifest).name)
    built = built_with(root, manifest.name)
    for one in map(manifest.with_python, manifest.pythons):
        if one.python != manifest.python and one.python not in built:
            continue
        for variant in (v for v in one.variants if one.lock_path(v).is_file()):
            try:
                env = plan(one, variant=variant, store=root)
            except EnvError:
                if one.python == manifest.python:
                    raise
                yield from built[str(one.python)]  # that Python is not on this PATH: no reason to remove them
                continue
            yield from (env.lock_target.name, record_path(env, one).name)
    for record in overlay.records(root, manifest.name, RECORD):
        with suppress(EnvError, ConfigError):  # its interpreter or variant is gone, and so is its use
            env = plan(manifest, variant=record["variant"], store=root, base=Path(record["overlay"]["python"]))
            yield from (env.lock_target.name, record_path(env, manifest).name)


def _candidates(root: Path) -> Iterator[tuple[Path, Path]]:
    """(folder, the target whose lock guards it)"""
    for path in sorted((root / "caches").glob("[!.]*")):
        yield path, root / "envs" / path.name
    for kind in ("envs", "wheelhouses", "stage", "backends"):
        folder = root / kind
        yield from store.leftovers(folder)
        for path in sorted(folder.glob("[!.]*")):
            yield path, path
