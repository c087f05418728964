"""`lz status`: what there is, and what is wrong with it."""

from __future__ import annotations

from typing import Annotated

import typer

from layerzero.client.cli.options import Json, Keys


def status(
    backend: Annotated[
        str | None, typer.Option("--backend", "-b", metavar="NAME", help="Only: can this one serve? Exit code 1: no.")
    ] = None,
    remote: Annotated[
        str | None, typer.Option("--remote", metavar="tcp://ADDRESS:PORT", help="A broker that listens there.")
    ] = None,
    folder: Keys = None,
    shows_all: Annotated[
        bool, typer.Option("--all", help="Show backends that are not for this machine, too, and why.")
    ] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="All nodes of the Ray cluster: as lz cluster status.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the broker, its clients and backends, what is wrong and how to repair it."""
    if cluster:
        from layerzero.client.cli.cluster import show_all

        raise typer.Exit(show_all("auto", as_json=as_json))

    from layerzero.client.cli import broker

    code = broker.status(backend=backend, remote=remote, keys=folder, shows_all=shows_all, as_json=as_json)
    raise typer.Exit(code)
