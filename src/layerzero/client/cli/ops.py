"""`lz ops`: which backends have an op, and what of them is certified on this machine. Asks no broker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from layerzero.client.cli.options import Json
from layerzero.envs.cli.options import STORE, Folders, ProfileName, StoreDir, Variant, VariantChoice
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.names import unknown_name
from layerzero.ipc.vocabulary.ops import PUBLIC_OPS

CERTIFIED, NOT_RUN = "certified", "not run"


def ops(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OP...]", help="Each kernel of these; if left out, a line for each op."),
    ] = None,
    store: StoreDir = STORE,
    manifests: Folders = None,
    variant: VariantChoice = Variant.CPU,
    profile: ProfileName = "all",
    as_json: Json = False,
) -> None:
    """Show which backends have each op, and what of them is certified on this machine. Needs no broker."""
    from layerzero.client.cli.env import site
    from layerzero.client.cli.output import note, print_json
    from layerzero.envs import profiles
    from layerzero.envs.cli.op_rows import kernel_rows

    for name in names or ():
        if name not in PUBLIC_OPS:
            raise InvalidArgument(unknown_name("op", name, PUBLIC_OPS))
    found, problems = site(store, manifests or ()).discover()
    allowed = {name: manifest for name, manifest in found.items() if manifest.is_allowed}
    rows = list(kernel_rows(allowed, variant.value, store, profiles.read(profile, store)))
    table = {op: [row for row in rows if row["op"] == op] for op in names or PUBLIC_OPS}
    for problem in problems:
        note(f"disabled: {problem.message}")
    if as_json:
        print_json({"variant": variant.value, "profile": profile, "ops": table})
    elif names:
        _show_kernels([row for rows in table.values() for row in rows], profile)
    else:
        _show_all(table, profile)


def _show_all(ops: Mapping[str, Sequence[Mapping[str, Any]]], profile: str) -> None:
    """Backends of each op: those with a certificate here, the others, and those that this project has run nowhere."""
    from rich.table import Table
    from rich.text import Text

    from layerzero.client.cli.output import note, out

    table = Table("op", "certified here", "not here", "not run anywhere", box=None)
    table.columns[0].no_wrap = True
    for op, rows in ops.items():
        backends = dict.fromkeys(row["backend"] for row in rows if row["state"] == CERTIFIED)
        never = dict.fromkeys(row["backend"] for row in rows if row["state"] == NOT_RUN)
        others = dict.fromkeys(row["backend"] for row in rows if row["backend"] not in {**backends, **never})
        left_out = {row["backend"] for row in rows if row["cause"] == f"profile {profile}"} - backends.keys()
        here = ", ".join(backends) or (f"not probed: profile {profile}" if left_out else "")
        dim = (Text(", ".join(names), style="dim") for names in (others, never))
        table.add_row(op, Text(here), *dim)
    out().print(table)
    note("lz ops OP: each kernel, its dtypes and why it is not here")


def _show_kernels(rows: Sequence[Mapping[str, Any]], profile: str) -> None:
    """Of each kernel the number of classes that are certified and refused, or why it has not been tried."""
    from rich.table import Table
    from rich.text import Text

    from layerzero.client.cli.output import out

    table = Table("kernel", "state", "certified classes by dtype, or why not", box=None)
    for row in rows:
        parts = [f"{dtype} {len(classes)}" for dtype, classes in row["certified"].items()]
        refused = sum(map(len, row["refused"].values()))
        parts += [f"refused {refused}"] if refused else []
        if parts and row["outside"]:
            parts.append(f"not probed, profile {profile}: {', '.join(row['outside'])}")
        table.add_row(Text(row["kernel_id"]), Text(row["state"]), Text(", ".join(parts) or row["cause"]))
    out().print(table)
