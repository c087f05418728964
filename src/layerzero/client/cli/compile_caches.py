"""`lz cache gc`, `export`, `import` and what `lz cache list` and `verify` say of compilers' caches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerzero.client.cli.options import Json, Keys
from layerzero.ipc.wording import counted

if TYPE_CHECKING:
    from layerzero.broker.configuration.settings import Settings
    from layerzero.broker.processes.launcher import Launcher
    from layerzero.envs.compile_caches.keeping import Kept

_Backends = Annotated[
    list[str] | None, typer.Option("--backend", "-b", metavar="NAME", help="Only these; may be repeated.")
]
_Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Of compile caches.", file_okay=False)]


def rows(settings: Settings) -> list[Kept]:
    from layerzero.envs.compile_caches import keeping

    return keeping.kept(settings.store)


def show(kept: Sequence[Kept]) -> None:
    from layerzero.client.cli.output import out

    if kept:
        total = sum(one.nbytes for one in kept)
        out().print(f"{counted(len(kept), 'compile cache')}, {total / 1e6:,.1f} MB", soft_wrap=True)
    for one in kept:
        hours = (time.time() - one.used_s) / 3600
        used = "in use" if one.is_in_use else f"used {hours:,.1f} h ago" if one.used_s else "never used"
        aside = f", {one.set_aside} set aside" if one.set_aside else ""
        out().print(f"{one.name}: {counted(one.files, 'file')}, {one.nbytes / 1e6:,.1f} MB, {used}{aside}")
        out().print(f"  {one.place}", soft_wrap=True)


def verify(settings: Settings) -> list[dict[str, Any]]:
    """Set aside what does not fit, and say so: one row for each cache in which there was something."""
    from layerzero.envs.compile_caches import keeping

    found = []
    for one, seen in keeping.verify(settings.store):
        if seen.unfit:
            lists = {name: getattr(seen, name) for name in ("changed", "unknown", "outside", "missing")}
            found.append({"name": one.name, "place": one.place, "folder": str(one.folder), "text": str(seen), **lists})
    return found


def gc(
    mib: Annotated[int | None, typer.Option("--max-mib", min=0, help="Default: LAYERZERO_CACHE_MIB.")] = None,
    entries: Annotated[
        int | None, typer.Option("--max-entries", min=0, help="Default: LAYERZERO_CACHE_ENTRIES.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: Json = False,
) -> None:
    """Remove the compile caches that were not used for longest, until the others are within the bounds, and what was
    set aside. What is in use stays, and so does what was used last."""
    from layerzero.broker.configuration import settings
    from layerzero.client.cli.output import out, print_json
    from layerzero.envs.compile_caches import keeping
    from layerzero.envs.compile_caches.keeping import Bounds

    found = settings.load(cache_mib=mib, cache_entries=entries)
    removed = keeping.collect(found.store, Bounds(found.cache_mib << 20, found.cache_entries), dry_run=dry_run)
    aside = sum(one.set_aside for one in keeping.kept(found.store)) if dry_run else keeping.forget_aside(found.store)
    if as_json:
        print_json({"removed": [one.facts() for one in removed], "set_aside": aside, "dry_run": dry_run})
        return
    what = "would remove" if dry_run else "removed"
    for one in removed:
        out().print(f"{what} {one.name}, {one.nbytes / 1e6:,.1f} MB", soft_wrap=True)
        out().print(f"  {one.place}", soft_wrap=True)
    if aside:
        out().print(f"{what} {counted(aside, 'file')} that had been set aside")
    if not removed and not aside:
        out().print("nothing to remove: what is kept is within its bounds, in use, or was used last", soft_wrap=True)


def export(
    folder: _Folder,
    key_file: Annotated[
        Path | None, typer.Option("--key", metavar="FILE", help="Sign with this key (lz lift key).", dir_okay=False)
    ] = None,
    unsigned: Annotated[bool, typer.Option("--unsigned", help="Sign nothing; who imports must allow that.")] = False,
    backend: _Backends = None,
    as_json: Json = False,
) -> None:
    """Write what compilers have made into a folder, for machines of this kind with equal locks: for lz cache import, or
    to be read by all of a fleet (LAYERZERO_SHARED_CACHE)."""
    from layerzero.client.cli.output import FAILED, out, print_json
    from layerzero.envs import signing
    from layerzero.envs.compile_caches import carrying
    from layerzero.ipc.errors import ConfigError, EnvError

    if (key_file is None) != unsigned:
        raise typer.BadParameter("one of --key FILE and --unsigned is needed", param_hint="--key")
    secret = None if key_file is None else signing.read_private(key_file)
    launcher = _launcher(backend)
    written: list[dict[str, Any]] = []
    for name in backend or sorted(launcher.manifests):
        try:
            env = launcher.env(name)
        except (ConfigError, EnvError):
            if backend:
                raise
            continue  # not for this platform
        made = carrying.export(env, launcher.manifests[name], folder, secret)
        if made is not None:
            row: dict[str, Any] = {
                "name": name,
                "env": env.id,
                "place": env.place,
                "files": len(made.files),
                "bytes": made.nbytes,
            }
            written.append({**row, "units": len(made.units), "signer": made.about["signer"] or None})
    if as_json:
        print_json({"folder": str(folder), "caches": written})
    else:
        for row in written:
            by = f"signed by {row['signer']}" if row["signer"] else "unsigned"
            told = f"{row['name']}: {counted(row['files'], 'file')}, {row['bytes'] / 1e6:,.1f} MB, {by}"
            out().print(f"{told}\n  {row['place']}", soft_wrap=True)
        if not written:
            out().print("nothing to export: no compiler has kept anything; lz cache list", soft_wrap=True)
    raise typer.Exit(0 if written else FAILED)


def import_(
    folder: _Folder,
    unsigned: Annotated[
        bool, typer.Option("--allow-unsigned", help="Take what has no signature: you know whose it is.")
    ] = False,
    backend: _Backends = None,
    keys_folder: Keys = None,
    as_json: Json = False,
) -> None:
    """Take over what lz cache export has written, for environments with equal locks on machines of the same kind.
    Each cache as a whole, or nothing of it."""
    from layerzero.client.cli import keys
    from layerzero.client.cli.output import FAILED, out, print_json
    from layerzero.envs.compile_caches import carrying
    from layerzero.ipc.errors import ConfigError, EnvError

    launcher = _launcher(backend)
    taken: list[dict[str, Any]] = []
    left: list[dict[str, str]] = []
    for opened in [*carrying.open_all(folder, keys.where(keys_folder), allows_unsigned=unsigned)]:
        name = opened.exported.about["name"]
        if backend and name not in backend:
            continue
        why, env = f"no environment of this installation is called {name:.60}", None
        if name in launcher.manifests:
            try:
                env = launcher.env(name)
                why = carrying.differs(opened, env)
            except (ConfigError, EnvError) as exc:
                why = exc.message.partition("\n")[0]
        if why or env is None:
            left.append({"name": name, "cache": opened.label, "why": why})
            continue
        row: dict[str, Any] = {
            "name": name,
            "place": env.place,
            "signer": opened.signer or None,
            "new": carrying.take(opened, env, launcher.manifests[name]),
        }
        taken.append({**row, "files": len(opened.exported.files), "bytes": opened.exported.nbytes})
    if as_json:
        print_json({"taken": taken, "left": left})
    else:
        for row in taken:
            by = f"signed by {row['signer']}" if row["signer"] else "UNSIGNED, as --allow-unsigned allows"
            told = f"{row['name']}: {counted(row['files'], 'file')}, {row['new']} of them new, {by}"
            out().print(f"{told}\n  {row['place']}", soft_wrap=True)
        for one in left:
            out().print(f"left out {one['name']}: {one['why']}", soft_wrap=True)
    raise typer.Exit(0 if taken else FAILED)


def _launcher(names: Sequence[str] | None) -> Launcher:
    """All environments of this installation. Raises ConfigError for a name that is none of them."""
    from layerzero.broker.configuration import settings
    from layerzero.broker.processes.launcher import Launcher
    from layerzero.ipc.errors import ConfigError
    from layerzero.ipc.names import unknown_name

    launcher = Launcher(settings.load())
    for name in names or ():
        if name not in launcher.manifests:
            raise ConfigError(unknown_name("backend", name, sorted(launcher.manifests)))
    return launcher
