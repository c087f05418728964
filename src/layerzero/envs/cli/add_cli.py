"""The commands `lz env add` and `lz env remove`: of backends from outside, of versions, of functions' environments."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from layerzero.envs import functions
from layerzero.envs.build.lock import read_lock
from layerzero.envs.build.progress import Progress
from layerzero.envs.cli import additions
from layerzero.envs.cli.options import STORE, Folders, Json, StoreDir, Variant, VariantChoice
from layerzero.envs.cli.rows import failing_cleanly, out, showing_progress
from layerzero.envs.manifest import EnvManifest
from layerzero.envs.versions import choice, declaration
from layerzero.envs.versions.declaration import Wanted

Target = Annotated[
    str,
    typer.Argument(metavar="NAME|WHEEL|FOLDER|BACKEND@VERSION", help="What is installed, where it lies, or a version."),
]
Beside = Annotated[
    list[str] | None,
    typer.Option("--with", metavar="REQUIREMENT", help='Of a version: in the place of the same name\'s, as "numpy<2".'),
]
OwnPython = Annotated[
    str | None, typer.Option("--python", metavar="3.X", help="Of a version; default: the first that it has a lock for.")
]


def add(
    ctx: typer.Context,
    target: Target,
    store: StoreDir = STORE,
    manifests: Folders = None,
    variant: VariantChoice = Variant.CPU,
    beside: Beside = None,
    python: OwnPython = None,
    as_json: Json = False,
) -> None:
    """Allow a backend from outside, by the hash of its sources: they are checked, nothing of them runs. Or declare a
    version beside a backend, as onnxruntime@1.16: it is resolved and locked."""
    known = site(ctx, store, manifests)
    wanted = None if Path(target).exists() else Wanted.of(target)
    if wanted is not None:
        with failing_cleanly(), showing_progress() as progress:
            _add_version(wanted, known, variant, beside or [], python, progress, as_json)
        return
    if beside or python:
        raise typer.BadParameter("--with and --python belong to a version: lz env add BACKEND@VERSION")
    with failing_cleanly():
        rows = additions.add(target, known)
    if as_json:
        typer.echo(json.dumps({"schema": 1, "added": rows}, indent=1))
        return
    for row in rows:
        out.print(additions.told(row), markup=False, highlight=False, soft_wrap=True)


def _add_version(
    wanted: Wanted,
    known: additions.Site,
    variant: Variant,
    beside: list[str],
    python: str | None,
    progress: Progress,
    as_json: bool,
) -> None:
    word = f"{wanted.backend}@{wanted.version}"
    manifest = choice.declare(
        wanted,
        known.discover()[0],
        known.store,
        variant=variant.value,
        beside=beside,
        python=python,
        say=partial(progress.phase, word),
    )
    ((own, content),) = manifest.variants.items()
    lock = read_lock(manifest, own)
    if as_json:
        row = {
            "name": manifest.name,
            "version_of": manifest.version_of,
            "python": manifest.python,
            "variant": own,
            "requirements": content.requirements,
            "lock": str(lock.path),
            "pins": lock.pins,
        }
        typer.echo(json.dumps({"schema": 1, "added": [row]}, indent=1))
        return
    lines = [
        f"{manifest.name}: declared",
        f"  python    {manifest.python}",
        f"  requires  {', '.join(content.requirements)}",
        f"  lock      {lock.path}, {len(lock.pins)} packages",
        f"next: lz env build {manifest.name}",
    ]
    out.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def versions_of(names: list[str] | None, known: additions.Site, variant: Variant) -> list[str] | None:
    """The names, with the newest declared version for each that names a series; what is not declared is, which asks the
    resolver. Exits with 1 where that cannot be."""
    if not names:
        return names
    chosen, found = [], dict[str, EnvManifest]()
    for name in names:
        wanted = Wanted.of(name)
        if wanted is None:
            chosen.append(name)
            continue
        found = found or known.discover()[0]
        declared = [name] if name in found else declaration.names(known.store, wanted)
        if not declared:
            with failing_cleanly(), showing_progress() as progress:
                say = partial(progress.phase, name)
                declared = [choice.declare(wanted, found, known.store, variant=variant.value, say=say).name]
        chosen.append(declared[0])
    return chosen


def remove(ctx: typer.Context, name: str, store: StoreDir = STORE, as_json: Json = False) -> None:
    """Take back what `lz env add` has allowed, or forget a version or an environment of functions (lz.env)."""
    if declaration.remove(name, store) or functions.remove(name, store):
        told = f"{name}: no longer declared; lz env gc removes its environment"
        typer.echo(json.dumps({"schema": 1, "removed": [name]}, indent=1) if as_json else told)
        return
    known = site(ctx, store, None)
    with failing_cleanly():
        additions.remove(name, known)
    if as_json:
        typer.echo(json.dumps({"schema": 1, "removed": [name]}, indent=1))
        return
    text = f"{name}: no longer allowed; lz env gc removes its environment, a broker that runs keeps it until lz down"
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def site(ctx: typer.Context, store: Path, folders: list[Path] | None) -> additions.Site:
    """Where backends from outside are, and what policy says of them: `ctx.obj` is the LoadSite of who runs the command.
    Exits with 1 when the settings are wrong."""
    load: additions.LoadSite = ctx.obj
    with failing_cleanly():
        return load(store, folders or ())
