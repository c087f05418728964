"""`lz dashboard`: a page that shows the broker, live."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

DEFAULT = "127.0.0.1:9465"


def dashboard(
    at: Annotated[str, typer.Option("--at", metavar="ADDRESS:PORT", help="Where it listens; port 0: any.")] = DEFAULT,
    traces: Annotated[
        Path | None,
        typer.Option("--traces", metavar="FOLDER", help="Of saved traces; traces in the store if left out."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="The token to open it with (lz keys secret); a new one if not.")
    ] = None,
    allow_actions: Annotated[
        bool, typer.Option("--allow-actions", help="The page may restart and reset backends; else it only shows.")
    ] = False,
    reachable: Annotated[
        bool, typer.Option("--reachable", help="It may listen where other machines reach it.")
    ] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="With a view of all nodes of the Ray cluster (lz cluster up).")
    ] = False,
) -> None:
    """Show a page with what the broker does: backends, calls, decisions, traces, capsules. Until Ctrl-C; starts no
    broker."""
    from layerzero.client.cli.output import note, out
    from layerzero.ipc.errors import EnvError
    from layerzero.ipc.transport import secret

    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvError(f"install {' and '.join(missing)}: pip install 'layerzero-broker[dashboard]'")
    from layerzero.dashboard.running import run

    def started(address: str) -> None:
        out().print(address, soft_wrap=True, highlight=False)
        note("open it in a browser on this machine; Ctrl-C ends it")

    token = None if token_file is None else secret.read(token_file).decode()
    shown = partial(
        run, at, traces=traces, token=token, may_act=allow_actions, may_be_reached=reachable, started=started
    )
    if not cluster:
        shown()
        return
    from layerzero.cluster.agent.watching import of_cluster

    watch = of_cluster("auto")
    try:
        shown(nodes=watch.shown)
    finally:
        watch.end()
