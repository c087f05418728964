"""`lz rollout`, `lz rollback`: a new version of a backend beside the old one, on a share of the calls that are made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from layerzero.client.cli.options import Json

SHADOW_RATE = 0.1  # share of calls that --shadow compares, unless --shadow-rate says otherwise
_UNITS_S = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_AFTER = re.compile(r"(\d+(?:\.\d+)?)\s*(calls|s|sec|m|min|h|d)?")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%?")


def add_to(app: typer.Typer) -> None:
    """Both commands."""
    app.command()(rollout)
    app.command()(rollback)


def rollout(
    backend: Annotated[
        str | None, typer.Argument(metavar="BACKEND", help="Whose calls; without it, show how rollouts go.")
    ] = None,
    new: Annotated[
        str | None, typer.Argument(metavar="NEW", help="A version of it that is built, such as 2.14 or torch@2.14.")
    ] = None,
    share: Annotated[
        str, typer.Option("--share", metavar="5%,25%,100%", help="Of the calls that name no version, step by step.")
    ] = "5%,25%,100%",
    shadow: Annotated[
        bool, typer.Option("--shadow", help="Compare results of both versions in a tenth of the calls of either.")
    ] = False,
    shadow_rate: Annotated[
        float | None, typer.Option("--shadow-rate", metavar="0..1", help="As --shadow, for this share of the calls.")
    ] = None,
    max_errors: Annotated[
        int, typer.Option("--max-errors", help="Deaths of the new version, and calls that another kernel had to serve.")
    ] = 0,
    max_mismatches: Annotated[
        int, typer.Option("--max-mismatches", help="Results that differ by more than is allowed.")
    ] = 0,
    max_p99: Annotated[
        float, typer.Option("--max-p99", metavar="RATIO", help="Of kernel times, to those of the old version.")
    ] = 1.2,
    after: Annotated[
        str, typer.Option("--after", metavar="CALLS|TIME", help="A step ends after 1000 calls, 30min, 2h.")
    ] = "1000",
    as_json: Json = False,
) -> None:
    """Try a new version of BACKEND on a share of the calls; it is promoted, or rolled back, by these rules. Without
    arguments: show all rollouts."""
    if backend is None:
        show(as_json=as_json)
        return
    if new is None:
        raise typer.BadParameter(f"name the version, too: lz rollout {backend} NEW", param_hint="NEW")
    calls, seconds = parse_after(after)
    rules = {"max_errors": max_errors, "max_mismatches": max_mismatches, "max_p99": max_p99}
    rules |= {"after_calls": calls, "after_s": seconds}
    rate = shadow_rate if shadow_rate is not None else SHADOW_RATE if shadow else 0.0
    answer = _begin(backend, new, shares=parse_shares(share), shadow_rate=rate, rules=rules)
    _print(answer, as_json=as_json)


def rollback(
    backend: Annotated[str, typer.Argument(metavar="BACKEND", help="Whose rollout ends, running or promoted.")],
    as_json: Json = False,
) -> None:
    """Let BACKEND's own version serve its calls again, at once."""
    from layerzero.client.cli.broker import connection
    from layerzero.client.connection import start

    with connection(start.endpoints()) as session:
        answer = session.ask("rollback", backend=backend)
    _print(answer, as_json=as_json)


def show(*, as_json: bool) -> None:
    """Print all rollouts that the broker knows, and the evidence on those that run."""
    from layerzero.client.cli.broker import connection
    from layerzero.client.connection import start

    with connection(start.endpoints()) as session:
        answer = session.ask("rollouts")
    _print(answer, as_json=as_json)


def parse_shares(text: str) -> list[float]:
    """Of "5%,25%,100%", each 0 to 1."""
    found = [_PERCENT.fullmatch(part.strip()) for part in text.split(",")]
    if not all(found):
        raise typer.BadParameter(f"{text!r} is no list of shares such as 5%,25%,100%", param_hint="--share")
    return [float(one.group(1)) / 100 for one in found if one is not None]


def parse_after(text: str) -> tuple[int, float]:
    """Calls and seconds, of which one is 0."""
    found = _AFTER.fullmatch(text.strip().replace(",", ""))
    unit = found.group(2) if found is not None else None
    if found is None or not float(found.group(1)) or (unit not in _UNITS_S and "." in found.group(1)):
        raise typer.BadParameter(f"{text!r} is neither a count of calls nor a time as 30min", param_hint="--after")
    number = float(found.group(1))
    return (0, number * _UNITS_S[unit]) if unit in _UNITS_S else (int(number), 0.0)


def _begin(backend: str, new: str, **more: Any) -> dict[str, Any]:
    from layerzero.client.cli.broker import connection
    from layerzero.client.connection import start

    wanted = new if "@" in new else f"{backend}@{new}"
    with connection(start.endpoints()) as session:
        session.ask("learn")
        names = [str(row["name"]) for row in session.ask("status")["backends"]]
        asked = {"backend": backend, "to": _newest(wanted, names), **more}
        answer = session.ask("rollout", rollout=asked)
    assert isinstance(answer, dict)
    return answer


def _newest(wanted: str, names: list[str]) -> str:
    """The newest of a series that there is, torch@2.14.1 of torch@2.14; itself where there is none."""
    fitting = [name for name in names if name == wanted or name.startswith(f"{wanted}.")]
    return max(fitting, key=_release, default=wanted)


def _release(name: str) -> list[int]:
    return [int(part) for part in name.rpartition("@")[2].split(".") if part.isdecimal()]


# --- what is printed


def _print(answer: Mapping[str, Any], *, as_json: bool) -> None:
    from rich.text import Text

    from layerzero.client.cli.output import note, out, print_json

    if as_json:
        print_json(answer)
        return
    rows = answer["rollouts"]
    if not rows:
        note("no rollouts; begin one: lz rollout BACKEND NEW --share 5% --shadow")
    for row in rows:
        style = {"running": "bold", "promoted": "bold green", "rolled back": "bold red"}[row["state"]]
        out().print(Text(_headline(row), style=style), highlight=False)
        for line in _lines(row):
            out().print(Text(f"  {line}"), highlight=False)
        if row["evidence"] and row["evidence"]["pairs"]:
            out().print(_table(row["evidence"]["pairs"]))
    if answer["problem"]:
        out().print(Text(answer["problem"], style="yellow"))


def _headline(row: Mapping[str, Any]) -> str:
    text = f"{row['backend']} -> {row['to']}: {row['state']}"
    if row["state"] != "running":
        return text
    return f"{text}, {100 * row['share']:g} %, step {row['step'] + 1} of {len(row['shares'])}"


def _lines(row: Mapping[str, Any]) -> list[str]:
    lines = [row["why"]] if row["why"] else []
    if row["unavailable"] and row["state"] != "rolled back":
        lines.append(f"{row['backend']} serves its calls: {row['unavailable']}")
    elif row["uncertified"] and row["state"] != "rolled back":
        names = ", ".join(row["uncertified"])
        lines.append(f"{row['backend']} serves {names}: the probe of {row['to']} has certified none of it")
    evidence = row["evidence"]
    if evidence is None:
        return lines
    last = row["step"] + 1 == len(row["shares"])
    lines.append(f"{evidence['waits_for'] or 'nothing'} until it {'is promoted' if last else 'goes on'}")
    if evidence["deaths"]:
        lines.append(f"deaths of its worker: {evidence['deaths']}")
    express = evidence["express_calls"]
    if any(express.values()):
        lines.append(f"and by the express lane: {express['new']:,} calls of the new, {express['old']:,} of the old")
    return lines


def _table(pairs: list[dict[str, Any]]) -> Any:
    """80 columns: the counts of each kernel, and the times of the calls where the two are the furthest apart."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("  kernel", overflow="fold")
    for name in ("new", "old", "errors", "compared", "wrong", "p50 us", "p99 us", "p99"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in pairs:
        ratio = "-" if row["p99_ratio"] is None else f"{row['p99_ratio']:.2f}"
        counts = (row["calls"]["new"], row["calls"]["old"], row["errors"], row["compared"], row["mismatches"])
        p50, p99 = (f"{_us(row['new'][name])}/{_us(row['old'][name])}" for name in ("p50_us", "p99_us"))
        table.add_row(f"  {row['kernel']}", *map(_short, counts), p50, p99, ratio)
    return table


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 10 else _short(round(value))


def _short(count: int) -> str:
    """With three digits or so: --json has all of them."""
    for least, unit in ((10**6, "M"), (10**4, "k")):
        if count >= least:
            part = count / (10**6 if unit == "M" else 10**3)
            return f"{part:.1f}{unit}" if part < 10 else f"{part:,.0f}{unit}"
    return f"{count:,}"
