"""The commands `lz env add` and `lz env remove`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from layerzero.envs import functions
from layerzero.envs.cli import additions
from layerzero.envs.cli.options import STORE, Folders, Json, StoreDir
from layerzero.envs.cli.rows import failing_cleanly, out

Target = Annotated[str, typer.Argument(metavar="NAME|WHEEL|FOLDER", help="What is installed, or where it lies.")]


def add(
    ctx: typer.Context, target: Target, store: StoreDir = STORE, manifests: Folders = None, as_json: Json = False
) -> None:
    """Allow a backend from outside, by the hash of its sources. They are checked; nothing of them runs."""
    known = site(ctx, store, manifests)
    with failing_cleanly():
        rows = additions.add(target, known)
    if as_json:
        typer.echo(json.dumps({"schema": 1, "added": rows}, indent=1))
        return
    for row in rows:
        out.print(additions.told(row), markup=False, highlight=False, soft_wrap=True)


def remove(ctx: typer.Context, name: str, store: StoreDir = STORE, as_json: Json = False) -> None:
    """Take back what `lz env add` has allowed, or forget an environment of functions (lz.env)."""
    if functions.remove(name, store):
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
