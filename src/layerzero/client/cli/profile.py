"""`lz profile`: the calls that an installation is for: which profiles there are, what they have, and one learned of the
calls that were made. Asks no broker."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerzero.client.cli.options import Json
from layerzero.envs.cli.options import STORE, StoreDir

if TYPE_CHECKING:
    from layerzero.capabilities.profiles import Profile

profile_app = typer.Typer(help="Profiles: the ops and dtypes that are probed and served.", no_args_is_help=True)
_Traces = Annotated[
    list[Path] | None,
    typer.Option("--trace", metavar="FILE", dir_okay=False, help="A trace whose calls count as well; may be repeated."),
]


@profile_app.command("list")
def list_(store: StoreDir = STORE, as_json: Json = False) -> None:
    """Show which profiles there are."""
    from rich.table import Table
    from rich.text import Text

    from layerzero.capabilities.profiles import PROFILES
    from layerzero.client.cli.output import out, print_json
    from layerzero.envs import profiles

    found = {name: profiles.read(name, store) for name in (*PROFILES, *profiles.learned(store))}
    if as_json:
        print_json({"profiles": {name: one.to_json() for name, one in found.items()}})
        return
    table = Table("profile", "ops", "pairs of op and dtype", "from", box=None)
    for name, one in found.items():
        counts = ("all", "all") if one.calls is None else (str(len(one.calls)), str(sum(map(len, one.calls.values()))))
        table.add_row(Text(name), *counts, "LayerZero" if name in PROFILES else "calls")
    out().print(table)


@profile_app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="[NAME]", envvar="LAYERZERO_PROFILE", help="Which one.")] = "all",
    store: StoreDir = STORE,
    as_json: Json = False,
) -> None:
    """Show which dtypes of which ops belong to a profile."""
    from layerzero.client.cli.output import print_json
    from layerzero.envs import profiles

    found = profiles.read(name, store)
    if as_json:
        print_json({"profile": name, "calls": found.to_json()})
    else:
        _show(found)


@profile_app.command()
def learn(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it is to be called.")],
    traces: _Traces = None,
    store: StoreDir = STORE,
    as_json: Json = False,
) -> None:
    """Make a profile of the calls that were made: those of which the broker has kept times, and those of traces."""
    from layerzero.broker.configuration import settings as knobs
    from layerzero.broker.storage import perf_store
    from layerzero.capabilities.profiles import of_calls, of_key
    from layerzero.client.cli.output import note, print_json
    from layerzero.client.traces.form import load
    from layerzero.envs import profiles
    from layerzero.ipc.errors import ConfigError
    from layerzero.ipc.vocabulary.ops import PUBLIC_OPS
    from layerzero.ipc.vocabulary.shape_class import class_dtype

    times = knobs.load(store=store).times
    calls: set[tuple[str, str]] = set()
    if times.is_file():
        try:
            calls |= {call for key in perf_store.keys(times) if (call := of_key(key)) is not None}
        except (perf_store.Unavailable, perf_store.Damaged) as exc:
            raise ConfigError(f"the measured times cannot be read: {exc}") from exc
    for path in traces or ():
        ops = [one for one in load(path).calls if one.name in PUBLIC_OPS]
        calls |= {(one.name, class_dtype(one.name, [tensor.spec for tensor in one.inputs])) for one in ops}
    if not calls:
        raise ConfigError(f"no calls are known: {times} has no times; make some, or name a trace with --trace")
    found = of_calls(name, calls)
    path = profiles.write(found, store)
    if as_json:
        print_json({"profile": name, "file": str(path), "calls": found.to_json()})
        return
    _show(found)
    note(f"kept in {path}; use it: LAYERZERO_PROFILE={name} lz env build, then lz down and lz up with the variable set")


def _show(profile: Profile) -> None:
    from rich.table import Table
    from rich.text import Text

    from layerzero.client.cli.output import out

    if profile.calls is None:
        out().print(f"profile {profile.name}: every op in every dtype", highlight=False)
        return
    table = Table("op", "dtypes", box=None)
    for op, dtypes in profile.calls.items():
        table.add_row(Text(op), Text(", ".join(dtypes)))
    out().print(table)
