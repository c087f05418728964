"""`lz cache`: the lifted calls that are kept on disk. Works on the files, with a broker or without."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerzero.client.cli.options import All, Json

if TYPE_CHECKING:
    from layerzero.broker.lifting.store import LiftStore

cache_app = typer.Typer(help="Look after the lifted calls that are kept.", no_args_is_help=True)
SHOWN = 20


def _store() -> LiftStore:
    from layerzero.broker.configuration import settings
    from layerzero.broker.lifting.store import LiftStore

    return LiftStore(settings.load().store / "lifted")


@cache_app.command("list")
def show(everything: All = False, as_json: Json = False) -> None:
    """Print the calls that are kept, those used last first, and the kernels that are kept in their workers."""
    from rich.table import Table

    from layerzero.client.cli.output import out, print_json

    store = _store()
    rows = [_row(key, entry) for key, entry in store.entries()][::-1]
    faults = store.faults()
    if as_json:
        print_json({"folder": str(store.folder), "bytes": store.nbytes(), "calls": rows, "faults": faults})
        return
    lifted = sum(not row["reason"] for row in rows)
    out().print(
        f"{lifted} lifted, {len(rows) - lifted} refused, {store.nbytes() / 1e6:,.1f} MB in {store.folder}",
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("kernel", "call", "state", "kept for"):
        table.add_column(name, overflow="fold")
    shown = rows if everything else rows[:SHOWN]
    for row in shown:
        hours = (time.time() - row["made_s"]) / 3600
        table.add_row(row["kernel_id"], row["call"], row["reason"] or "lifted", f"{hours:,.1f} h")
    if rows:
        out().print(table)
    if len(shown) < len(rows):
        out().print(f"{len(rows) - len(shown)} more; all of them: --all")
    for fault in faults:
        out().print(f"{fault.get('kernel')}: {fault.get('fault')}", soft_wrap=True)


def _row(key: str, entry: Any) -> dict[str, Any]:
    from layerzero.ipc.errors import ProtocolError
    from layerzero.ipc.lifting.form import Lifted

    call = ""
    if entry.form:
        try:
            lifted = Lifted.unpack(entry.form)
            call = ", ".join("-" if spec is None else str(spec) for spec in lifted.inputs)
        except ProtocolError as exc:
            call = str(exc)
    return {
        "key": key,
        "kernel_id": entry.kernel_id,
        "backend": entry.backend,
        "call": call or entry.detail,
        "reason": entry.reason,
        "made_s": entry.made_s,
        "made_of": dict(entry.what),
    }


@cache_app.command("verify")
def verify(as_json: Json = False) -> None:
    """Look at every byte, and remove what does not hold. Exit code 1 when there was something."""
    from layerzero.client.cli.output import FAILED, out, print_json

    gone = _store().verify()
    if as_json:
        print_json({"removed": gone})
    else:
        out().print("\n".join(f"removed {what}" for what in gone) or "all of it holds")
    raise typer.Exit(FAILED if gone else 0)


@cache_app.command("clear")
def clear(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove all lifted calls; workers lift them again. What is known of faults stays."""
    from layerzero.client.cli.output import out, print_json

    store = _store()
    if not yes:
        typer.confirm(f"Remove all lifted calls in {store.folder}?", abort=True, err=True)
    count = store.clear()
    if as_json:
        print_json({"removed": count})
    else:
        out().print(f"removed {count} calls")


@cache_app.command("forgive")
def forgive(as_json: Json = False) -> None:
    """Let kernels be lifted again that a process lost its GPU with."""
    from layerzero.client.cli.output import out, print_json

    count = _store().forgive()
    if as_json:
        print_json({"forgiven": count})
    else:
        out().print(f"forgiven: {count}")
