"""`lz cluster`: nodes of a Ray cluster, each with a broker of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerzero.client.cli.options import Json, MetricsTokenFile

if TYPE_CHECKING:
    from rich.table import Table

    from layerzero.cluster.agent.fleet import NodeState

cluster_app = typer.Typer(help="Give each node of a Ray cluster a broker.", no_args_is_help=True)
Ray = Annotated[
    str,
    typer.Option(
        "--ray", metavar="ADDRESS", help="The cluster; auto: RAY_ADDRESS, or the one that runs on this machine."
    ),
]


@cluster_app.command("up")
def up(ray: Ray = "auto", as_json: Json = False) -> None:
    """Start an agent on each node that has none; each runs a broker, and starts it again when it dies."""
    from layerzero.cluster.agent import fleet

    raise typer.Exit(_show(fleet.up(ray), as_json=as_json))


@cluster_app.command("down")
def down(ray: Ray = "auto", as_json: Json = False) -> None:
    """End all agents and their brokers: what runs is finished."""
    from layerzero.client.cli.output import out, print_json
    from layerzero.cluster.agent import fleet
    from layerzero.ipc.wording import counted

    ended = fleet.down(ray)
    if as_json:
        print_json({"ended": [one.to_dict() for one in ended]})
        return
    for one in ended:
        if one.problem:
            out().print(f"{one.node[:12]}: {one.problem}", soft_wrap=True)
    out().print(f"{counted(len(ended), 'agent')} ended")


@cluster_app.command("share")
def share(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Of lz env export.", dir_okay=False)],
    ray: Ray = "auto",
    as_json: Json = False,
) -> None:
    """Hand an environment to all nodes: each checks, builds and probes it as lz env import does. Exit code 1 when one
    does not have it then."""
    from layerzero.client.cli.output import FAILED, out, print_json
    from layerzero.cluster.agent import handing_out

    found = handing_out.share(ray, file)
    if as_json:
        print_json({"nodes": [vars(one) for one in found]})
    else:
        for one in found:
            out().print(f"{one.node[:12]}: {one.problem or 'built'}", soft_wrap=True, markup=False, highlight=False)
    raise typer.Exit(FAILED if any(one.problem for one in found) else 0)


@cluster_app.command("status")
def status(ray: Ray = "auto", as_json: Json = False) -> None:
    """Show each node's agent, broker and backends, and where nodes are not alike. Exit code 1 when one does not
    serve."""
    raise typer.Exit(show_all(ray, as_json=as_json))


@cluster_app.command("metrics")
def metrics(
    at: Annotated[str, typer.Argument(metavar="ADDRESS", help="Where: ADDRESS:PORT or unix:PATH.")],
    token_file: MetricsTokenFile = None,
    ray: Ray = "auto",
) -> None:
    """Show metrics of all nodes by HTTP, labelled by node, until Ctrl-C. A lost node delays nothing."""
    import importlib.util
    from contextlib import suppress

    from layerzero.client.cli.output import note
    from layerzero.ipc.errors import EnvError
    from layerzero.ipc.transport import metrics_socket, secret

    if importlib.util.find_spec("prometheus_client") is None:
        raise EnvError("install prometheus-client: pip install 'layerzero-broker[metrics,ray]'")
    from layerzero.client.metrics.serving import Server
    from layerzero.cluster.agent.metrics import AllNodes
    from layerzero.cluster.agent.watching import of_cluster

    token = None if token_file is None else secret.read(token_file)
    listener, path = metrics_socket.listen(at, has_token=token is not None)
    try:
        watch = of_cluster(ray)
        note(f"metrics of all nodes at {at}; Ctrl-C ends it")
        with suppress(KeyboardInterrupt):
            Server(listener, AllNodes(watch), token).serve_forever(poll_interval=3600)
        watch.end()
    finally:
        listener.close()
        if path is not None:
            path.unlink(missing_ok=True)


def show_all(address: str, *, as_json: bool) -> int:
    """`lz cluster status`. Returns the exit code."""
    from layerzero.cluster.agent import fleet

    return _show(fleet.states(address), as_json=as_json)


def _show(nodes: Sequence[NodeState], *, as_json: bool) -> int:
    from rich.text import Text

    from layerzero.client.cli.output import FAILED, out, print_json
    from layerzero.cluster.agent import fleet

    differ = fleet.differences(nodes)
    serves = any(one.state == fleet.OK for one in nodes) and not any(
        one.problem for one in nodes if one.state != fleet.LOST
    )
    if as_json:
        print_json({"nodes": [one.to_dict() for one in nodes], "differences": differ})
        return 0 if serves else FAILED
    out().print(_table(nodes))
    out().print("")
    out().print(_backends(nodes))
    wrong = [one for one in nodes if one.problem]
    told = [f"{one.node[:12]}: {one.problem}" + (f"; repair: {one.repair}" if one.repair else "") for one in wrong]
    for title, lines in (("what is wrong", told), ("where nodes differ", differ)):
        if lines:
            out().print(Text(f"\n{title}", style="bold yellow"))
            for line in lines:
                out().print(Text(f"  {line}"), soft_wrap=True)
    return 0 if serves else FAILED


def _table(nodes: Sequence[NodeState]) -> Table:
    """80 columns at most, whatever hosts are called."""
    from rich.text import Text

    table = _columns(("node", "host", "state"), ("broker", "deaths", "version", "answered", "failed"))
    for one in nodes:
        style = "" if one.state == "ok" and not one.problem else "yellow"
        broker: Any = one.facts.get("broker") or {}
        rows = broker.get("backends", ())
        table.add_row(
            Text(one.node[:12]),
            Text(str(one.facts.get("host", one.address))),
            Text(one.state, style=style),
            str(broker["broker"]["pid"]) if broker else "-",
            str(one.facts.get("restarts", "-")),
            str(one.facts.get("package", "-")),
            f"{sum(row['answered'] for row in rows):,}",
            f"{sum(row['failed'] for row in rows):,}",
        )
    return table


def _backends(nodes: Sequence[NodeState]) -> Table:
    """Those that a node can serve with, or that failed on one: on how many, and their states there."""
    from collections import Counter

    from rich.text import Text

    from layerzero.client.cli.broker import state_of

    known: dict[str, list[Any]] = {}
    for one in nodes:
        for row in (one.facts.get("broker") or {}).get("backends", ()):
            known.setdefault(row["name"], []).append(row)
    table = _columns(("backend", "states"), ("nodes", "answered", "failed", "restarts"))
    for name, rows in sorted(known.items()):
        if not any(not row["unavailable"] or row["failed"] or row["restarts"] for row in rows):
            continue
        states = Counter(state_of(row) for row in rows)
        table.add_row(
            Text(name),
            Text(", ".join(f"{state} {count}" for state, count in states.most_common())),
            f"{sum(not row['unavailable'] for row in rows)} of {len(nodes)}",
            *(f"{sum(row[column] for row in rows):,}" for column in ("answered", "failed", "restarts")),
        )
    return table


def _columns(texts: Sequence[str], numbers: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in texts:
        widest = {"host": 10, "states": 24, "backend": 18}.get(name)
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=widest)
    for name in numbers:
        table.add_column(name, no_wrap=True, justify="right")
    return table
