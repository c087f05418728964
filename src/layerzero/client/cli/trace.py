"""`lz trace`: traces that a program has saved (lz.trace), shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerzero.client.cli.options import Everywhere, Json, OnBackends, Seed, TimeoutS, Times, is_everywhere

if TYPE_CHECKING:
    from layerzero.client.traces.calls import RecordedCall

trace_app = typer.Typer(help="Show and use traces that programs have saved (lz.trace).", no_args_is_help=True)
Share = Annotated[float, typer.Option("--share", min=0.0, max=1.0, help="So large a part of the calls.")]
Pid = Annotated[int | None, typer.Option("--client", metavar="PID", min=1, help="All calls of this process, too.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="What a trace's save wrote.")]


@trace_app.command()
def on(
    kernels: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KERNEL...]", help="Such as 'torch.*', '*.attention'; all if nothing is named."),
    ] = None,
    share: Share = 1.0,
    client: Pid = None,
    as_json: Json = False,
) -> None:
    """Have programs record their calls from now on, in place of what was asked for before."""
    names = [*(kernels or ()), *([] if client is None else [f"process:{client}"])] or ["*"]
    _ask(dict.fromkeys(names, share), as_json=as_json)


@trace_app.command()
def off(as_json: Json = False) -> None:
    """Have them record no more than policy says. Each writes its file at its next call, or at its end."""
    _ask({}, as_json=as_json)


def _ask(traces: dict[str, float], *, as_json: bool) -> None:
    import os

    from layerzero.client.cli.broker import connection
    from layerzero.client.cli.output import note, print_json
    from layerzero.client.connection import start
    from layerzero.client.traces.wanted import folder_of

    with connection(start.endpoints()) as session:
        holds = session.ask("tracing", traces=traces)["traces"]
    folder = folder_of(os.environ)
    if as_json:
        print_json({"traces": holds, "folder": str(folder)})
        return
    said = ", ".join(f"{name} {100 * share:g} %" for name, share in holds.items())
    note(f"recorded: {said}; files come to {folder}" if said else "no calls are recorded from the next one on")
    note("lz trace list shows what there is")


@trace_app.command("list")
def list_all(as_json: Json = False) -> None:
    """Print the traces that policy or `lz trace on` have had programs write, the newest first."""
    import os
    import time

    from layerzero.client.cli.output import note, out, print_json
    from layerzero.client.traces.wanted import SUFFIX, folder_of
    from layerzero.ipc import kept_files

    folder = folder_of(os.environ)
    found = [path for path in reversed(kept_files.by_age(folder)) if path.suffix == SUFFIX]
    rows: list[dict[str, Any]] = [
        {"file": str(one), "bytes": kept_files.size(one), "unix_s": kept_files.age(one)} for one in found
    ]
    if as_json:
        print_json({"folder": str(folder), "traces": rows})
        return
    for row in rows:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["unix_s"]))
        out().print(f"{row['file']}  {row['bytes']:,} B  {when}", soft_wrap=True, highlight=False)
    if not rows:
        note(f"no traces in {folder}: lz trace on has programs write them")


@trace_app.command()
def show(
    file: File,
    by: Annotated[str, typer.Option("--by", help="Rows of the table: op, backend or scope.")] = "backend",
    everything: Annotated[bool, typer.Option("--all", help="All rows.")] = False,
    calls: Annotated[bool, typer.Option("--calls", help="Each call, and where its arguments come from.")] = False,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="The calls as a Mermaid flow chart.")] = False,
    as_json: Json = False,
) -> None:
    """Print a trace: a table of its calls, each call, or its graph."""
    import time

    from rich.text import Text

    from layerzero.client.cli.output import note, out, print_json
    from layerzero.client.traces.contents import MAX_ROWS
    from layerzero.client.traces.form import call_to_dict, load

    found = load(file)
    if as_json:
        rows = [call_to_dict(call) for call in found.calls]
        print_json({"facts": dict(found.facts), "dropped": found.dropped, "clock": found.clock, "calls": rows})
        return
    if mermaid:
        said = found.mermaid()
    elif calls:
        said = "\n".join(map(_line, found.calls))
    else:
        said = found.text(by, None if everything else MAX_ROWS).replace("trace.text(most=None)", "--all")
    out().print(Text(said), soft_wrap=True)
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(found.clock[0] / 1e9))
    where = ", ".join(f"{name} {value}" for name, value in found.facts.items())
    note(f"of {when}; {where}")


def _line(call: RecordedCall) -> str:
    from layerzero.client.connection.report import time_text

    sources = ", ".join(f"{one.input} of {one.call}" for one in call.sources)
    kernel = f", kernel {time_text(call.kernel_ns / 1e3)}" if call.kernel_ns else ""
    parts = [f"{call.number}: {call.label}", f"{call.backend or 'none'}, {time_text(call.elapsed_ns / 1e3)}{kernel}"]
    parts += [sources] if sources else []
    parts += [f"failed on {one.kernel_id}: {one.outcome}" for one in call.attempts]
    parts += [call.error.partition("\n")[0]] if call.error else []
    parts += ["/".join(call.scopes)] if call.scopes else []
    return "; ".join(parts)


Target = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="To write; default: beside FILE, by its name.")
]


@trace_app.command()
def export(
    file: File,
    to: Annotated[str, typer.Option("--to", help="perfetto, for ui.perfetto.dev, or chrome: JSON.")] = "perfetto",
    output: Target = None,
) -> None:
    """Write a trace for a viewer: threads, workers and GPUs on one timeline, arrows from calls to their kernels."""
    import json

    from layerzero.client.cli.output import note
    from layerzero.client.traces.chrome import to_chrome
    from layerzero.client.traces.form import load
    from layerzero.client.traces.perfetto import to_perfetto
    from layerzero.ipc.errors import InvalidArgument

    if to not in ("perfetto", "chrome"):
        raise InvalidArgument(f"--to {to!r:.40}; allowed: perfetto, chrome")
    found = load(file)
    data = to_perfetto(found) if to == "perfetto" else json.dumps(to_chrome(found), separators=(",", ":")).encode()
    target = output or file.with_name(f"{file.stem}{'.pftrace' if to == 'perfetto' else '.json'}")
    target.write_bytes(data)
    note(f"{target}: {len(data):,} bytes; open it at https://ui.perfetto.dev, which reads it in the browser")


@trace_app.command()
def merge(
    file: File,
    torch: Annotated[Path, typer.Argument(metavar="TORCH.json", help="Of torch.profiler's export_chrome_trace.")],
    output: Target = None,
) -> None:
    """Write a trace and what torch.profiler recorded at the same time on one timeline, as Chrome's JSON."""
    import json

    from layerzero.client.cli.output import note
    from layerzero.client.traces.chrome import merged
    from layerzero.client.traces.form import load

    data = json.dumps(merged(load(file), torch), separators=(",", ":")).encode()
    target = output or file.with_name(f"{file.stem}.merged.json")
    target.write_bytes(data)
    note(f"{target}: {len(data):,} bytes; open it at https://ui.perfetto.dev, which reads it in the browser")


@trace_app.command()
def run(
    file: File,
    backend: OnBackends = None,
    env: Everywhere = None,
    times: Times = 1,
    timeout_s: TimeoutS = None,
    seed: Seed = 0,
    everything: Annotated[bool, typer.Option("--all", help="All rows.")] = False,
    as_json: Json = False,
) -> None:
    """Make a trace's calls again, by a broker of its own: on the backends that served them, on others, or on all.

    Ends with 1 when a call gave no answer, or a wrong one."""
    from rich.text import Text

    from layerzero.client.cli.output import FAILED, err, out, print_json
    from layerzero.client.tools.replay import own_broker
    from layerzero.client.traces.form import load
    from layerzero.client.traces.rerun import MAX_ROWS, run_again

    everywhere = is_everywhere(env, backend)
    contents = load(file)
    with own_broker() as session, err().status("...") as status:
        found = run_again(
            session,
            contents,
            backends=backend,
            everywhere=everywhere,
            times=times,
            timeout_s=timeout_s,
            seed=seed,
            begins=lambda call: status.update(f"{call.number} of {len(contents.calls)}: {call.name} ..."),
        )
    if as_json:
        print_json(found.to_dict())
    else:
        said = found.text(None if everything else MAX_ROWS).replace("text(most=None)", "--all")
        out().print(Text(said), soft_wrap=True)
    if not found.is_right:
        raise typer.Exit(FAILED)
