"""`lz top`, `lz report`: what a broker does and did."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerzero.client.cli.options import Json

if TYPE_CHECKING:
    from layerzero.top.source import Seen

History = Annotated[
    Path | None,
    typer.Option("--history", metavar="FILE", help="Of lz up --history; that of this runtime folder if left out."),
]

ROOMY = 110  # columns of a terminal that headings of one line fit into
HEADS = ("calls/s", "p50", "p99", "running", "waiting", "fallbacks", "restarts", "memory")
NARROW_HEADS = ("calls/s", "p50", "p99", "run-\nning", "wait-\ning", "fall-\nbacks", "re-\nstarts", "memory")


def top(
    at: Annotated[
        str | None, typer.Option("--at", metavar="TIME", help="Look back: 14:02, '2026-11-27 14:02', or 15min ago.")
    ] = None,
    history: History = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print it once and end; what happens without a terminal.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show backends, calls, times and fallbacks, live or as they were (lz up --history)."""
    from layerzero.client.cli.output import out
    from layerzero.client.history.moments import moment
    from layerzero.ipc.errors import EnvError, InvalidArgument

    if history is not None and at is None:
        raise InvalidArgument(f"say of when, --at TIME: {history} is looked at for what was, the broker for what is")
    moment_s = None if at is None else moment(at, time.time())
    from layerzero.top.source import Source

    source = Source(history, moment_s)
    if once or as_json or not out().is_terminal:
        try:
            _print(source, as_json=as_json)
        finally:
            source.close()
        return
    if importlib.util.find_spec("textual") is None:
        raise EnvError("install textual: pip install 'layerzero-broker[top]'; lz top --once does without")
    from layerzero.top.app import Top

    if moment_s is not None:
        source.look()  # an error is to be read before the screen is taken
    Top(source).run()


def _print(source: object, *, as_json: bool) -> None:
    from layerzero.client.cli.output import print_json
    from layerzero.ipc.errors import LayerZeroError
    from layerzero.top.source import Source

    assert isinstance(source, Source)
    if source.at is None:  # rates need two looks
        source.ask("ping")
        source.look()
        time.sleep(1.0)
    seen = source.look()
    if seen.sample is None:
        raise LayerZeroError(seen.problem or "the broker has not been looked at for long enough: try again")
    if as_json:
        print_json({"at": seen.at, "is_live": seen.is_live, **seen.sample.to_dict()})
        return
    _print_tables(seen)


def _print_tables(seen: Seen) -> None:
    from rich.table import Table
    from rich.text import Text

    from layerzero.client.cli.output import out
    from layerzero.client.history.moments import backend_rows, bytes_text, op_rows, time_text

    sample = seen.sample
    assert sample is not None
    total = sample.total()
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seen.at))
    said = f"{clock}, {sample.seconds:.0f} s: {total.count:,} calls, p50 {time_text(total.quantile_us(0.5)) or '-'}, "
    said += f"p99 {time_text(total.quantile_us(0.99)) or '-'}, {sum(sample.fallbacks.values())} fallbacks, "
    out().print(Text(said + f"{sum(sample.errors.values())} errors"), soft_wrap=True)
    rows, is_narrow = backend_rows(sample), out().width < ROOMY
    table = Table(box=None, padding=(0, 1 if is_narrow else 2, 0, 0), header_style="dim")
    for name in ("backend", "state"):
        table.add_column(name, no_wrap=True)
    for name in NARROW_HEADS if is_narrow else HEADS:
        table.add_column(name, no_wrap=True, justify="right")
    if any(row.gpu_bytes for row in rows):
        table.add_column("GPU\nmemory" if is_narrow else "GPU memory", no_wrap=True, justify="right")
    for row in rows:
        table.add_row(
            Text(row.name),
            row.state,
            f"{row.rate:,.1f}",
            time_text(row.p50_us),
            time_text(row.p99_us),
            *map(str, (row.running, row.waiting, row.fallbacks, row.restarts)),
            bytes_text(row.memory_bytes),
            *([bytes_text(row.gpu_bytes)] if len(table.columns) > 2 + len(HEADS) else []),
        )
    out().print(table)
    ops = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("op", "backend", "path"):
        ops.add_column(name, no_wrap=True)
    for name in ("calls/s", "p50", "p99"):
        ops.add_column(name, no_wrap=True, justify="right")
    for one in op_rows(sample)[:20]:
        ops.add_row(*map(Text, one[:3]), f"{one.rate:,.1f}", time_text(one.p50_us), time_text(one.p99_us))
    if ops.row_count:
        out().print(ops)


def report(
    span: Annotated[str, typer.Option("--last", metavar="TIME", help="How long: 15min, 6h, 7d.")] = "1h",
    until: Annotated[str | None, typer.Option("--until", metavar="TIME", help="Its end; now if left out.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", dir_okay=False, help="Write a page; else it is printed.")
    ] = None,
    history: History = None,
    as_json: Json = False,
) -> None:
    """Tell what a broker did in a time that has passed (lz up --history): by a table, or by one HTML page."""
    from layerzero.client.cli.output import note, print_json
    from layerzero.client.connection import start
    from layerzero.client.history import report as made
    from layerzero.client.history.history_file import HistoryFile, default_path
    from layerzero.client.history.moments import moment, seconds
    from layerzero.ipc.errors import LayerZeroError

    now = time.time()
    end = now if until is None else moment(until, now)
    begin = max(end - seconds(span), 0.0)
    file = HistoryFile.read(history or default_path(os.environ, start.endpoints().folder))
    try:
        kept = file.between(begin, end)
        known = file.span()
    finally:
        file.close()
    if not kept:
        since = "" if known is None else f"; it has {made.clock(known[0])} to {made.clock(known[1])}"
        raise LayerZeroError(f"nothing was kept between {made.clock(begin)} and {made.clock(end)}{since}")
    if known is not None:
        begin = max(begin, known[0])
    whole = made.whole(kept)
    if html is not None:
        html.write_text(made.page(kept, begin, end), encoding="utf-8")
        note(f"wrote {html}")
    if as_json:
        print_json({"begin": begin, "end": end, **whole.to_dict()})
    elif html is None:
        from layerzero.top.source import Seen

        _print_tables(Seen(begin, whole, [], is_live=False))
