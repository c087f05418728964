"""`lz capsule` and `lz replay`: calls whose worker died or hung, as they were kept, and the same calls again."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerzero.client.cli.options import Json

if TYPE_CHECKING:
    from layerzero.client.capsules.form import Capsule
    from layerzero.client.tools.replay import Outcome

capsule_app = typer.Typer(help="Look at calls whose worker died or hung, as they were kept.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Of lz capsule list, its beginning, or a folder.")]
LOG_LINES = 12
WHY_LINES = 4
FAULT = "Fatal Python error"  # what faulthandler begins with


def _folder() -> Path:
    from layerzero.client.capsules.store import folder_of

    return folder_of(os.environ)


def _find(name: str) -> tuple[Path, Capsule]:
    from layerzero.client.capsules.form import read
    from layerzero.client.capsules.store import find

    folder = find(_folder(), name)
    return folder, read(folder)


@capsule_app.command("list")
def show_all(as_json: Json = False) -> None:
    """Print the capsules that are kept, the newest first."""
    from rich.table import Table

    from layerzero.client.capsules.store import entries
    from layerzero.client.cli.output import note, out, print_json

    folder = _folder()
    found = list(entries(folder))[::-1]
    if as_json:
        rows = [_row(name, capsule, problem) for name, capsule, problem in found]
        print_json({"folder": str(folder), "capsules": rows})
        return
    if not found:
        note(f"no capsules in {folder}: no worker has died of a call, or LAYERZERO_CAPSULES is off")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for head in ("capsule", "kernel", "ended by", "data"):
        table.add_column(head, overflow="fold", no_wrap=head != "kernel")  # a name is there to be copied
    for name, capsule, problem in found:
        if capsule is None:
            table.add_row(name, problem)
        else:
            data = f"{capsule.nbytes:,} B" if capsule.has_data else "shapes"
            table.add_row(name, capsule.failed.kernel_id, capsule.failed.what, data)
    out().print(table)
    note("lz replay NAME makes the call again, on all backends with --env all")


def _last_words(lines: list[str]) -> list[str]:
    """The last lines, and all from where the fault is told on."""
    told = [n for n, line in enumerate(lines) if FAULT in line]
    return lines[min([*told[-1:], max(len(lines) - LOG_LINES, 0)]) :]


def _row(name: str, capsule: Capsule | None, problem: str) -> dict[str, Any]:
    return {"name": name, "problem": problem} if capsule is None else capsule.to_dict()


@capsule_app.command()
def show(name: Name, as_json: Json = False) -> None:
    """Print what is known of a call: arguments, attempts, versions, and the end of its worker's log."""
    from rich.text import Text

    from layerzero.client.capsules.form import LOG, MAX_TEXT_BYTES
    from layerzero.client.cli.output import out, print_json
    from layerzero.ipc import files

    folder, capsule = _find(name)
    try:
        lines = files.read(folder / LOG, MAX_TEXT_BYTES).decode(errors="replace").splitlines()
    except OSError:
        lines = []
    if as_json:
        print_json({**capsule.to_dict(), "log": lines})
        return
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(capsule.made_s))
    said = [f"{capsule.name}, {when}", capsule.label]
    for a in capsule.arguments:
        strides = "" if a.spec.is_contiguous else f", strides {list(a.spec.strides)}"
        said.append(
            f"  {a.name}: {a.spec.dtype}{list(a.spec.shape)}{strides}, in memory {a.segment} from byte {a.start}"
        )
    said += [f"  {name} = {value!r:.120}" for name, value in capsule.params.items() if value is not None]
    said += [f"attempt on {f.kernel_id} ({f.backend}): {f.what}: {f.detail}" for f in capsule.failures]
    said.append(f"answered by {capsule.served_by}" if capsule.served_by else "no kernel answered")
    kept = f"{capsule.nbytes:,} bytes in {len(capsule.segments)} pieces"
    said.append(f"arguments: {kept if capsule.has_data else f'not kept: {capsule.left_out}'}")
    said += [f"{key}: {value}" for key, value in capsule.facts.items()]
    if lines:
        said += ["end of the worker's log:", *(f"  {line}" for line in _last_words(lines))]
    out().print(Text("\n".join(said)), soft_wrap=True)


@capsule_app.command()
def share(
    name: Name,
    target: Annotated[Path, typer.Argument(metavar="FILE.tar.gz", help="To write; must not be there yet.")],
    no_data: Annotated[
        bool, typer.Option("--no-data", help="Leave the arguments' bytes and the worker's log out.")
    ] = False,
) -> None:
    """Write a capsule into one file, for `lz replay FILE.tar.gz` elsewhere."""
    from layerzero.client.capsules.store import pack
    from layerzero.client.cli.output import note

    folder, capsule = _find(name)
    pack(folder, capsule, target, with_data=not no_data)
    held = "its arguments' bytes and its worker's log" if capsule.has_data and not no_data else "no bytes of arguments"
    note(f"{target}: {target.stat().st_size:,} bytes, with {held}")


@capsule_app.command()
def script(
    name: Name,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.py", help="To write; must not be there yet.")
    ] = None,
    with_data: Annotated[
        bool, typer.Option("--data", help="With the arguments' bytes, where they were kept; else random numbers.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of random arguments.")] = 0,
) -> None:
    """Write a Python program that makes a capsule's call with its library alone, for an issue of that library."""
    from layerzero.client.capsules.form import memory
    from layerzero.client.cli.output import note, out
    from layerzero.client.tools.script import write
    from layerzero.ipc.errors import InvalidArgument

    folder, capsule = _find(name)
    if with_data and not capsule.has_data:
        raise InvalidArgument(f"leave --data out: {capsule.name} has no bytes of arguments: {capsule.left_out}")
    for path in () if output is None else (output, output.with_suffix(".npz")):
        if path.exists():
            raise InvalidArgument(f"{path} is there already; name another file")
    data = memory(folder, capsule) if with_data else []
    text = write(capsule, data, _locked(capsule.failed.backend), output, seed)
    if output is None:
        out().print(text, soft_wrap=True, end="", markup=False, highlight=False)
        return
    output.write_text(text)
    held = "its arguments' bytes" if data else "random numbers"
    note(f"{output}: needs the library and NumPy alone; with {held}. Look at it before you send it")


def _locked(backend: str) -> list[str]:
    """The requirement lines of a backend's lock, none where it has no lock here."""
    from layerzero.envs.manifest import discover

    manifest = discover()[0].get(backend)
    path = None if manifest is None else manifest.lock_path(manifest.variant_for("cpu"))
    if path is None or not path.is_file():
        return []
    lines = (line.partition("\\")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line and not line.startswith(("#", "--"))]


@capsule_app.command()
def remove(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME...]", help="Of lz capsule list.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
) -> None:
    """Remove capsules."""
    from layerzero.client.capsules import store
    from layerzero.client.cli.output import note
    from layerzero.ipc.errors import InvalidArgument

    folder = _folder()
    if bool(names) == everything:
        raise InvalidArgument("name capsules to remove, or say --all")
    gone = store.names(folder) if everything else [_kept(folder, name) for name in names or ()]
    for name in gone:
        store.remove(folder / name)
    note(f"removed: {', '.join(gone) or 'nothing was there'}")


def _kept(folder: Path, name: str) -> str:
    """One in the store: what lies elsewhere is not ours to remove."""
    from layerzero.client.capsules.store import find
    from layerzero.ipc.errors import InvalidArgument

    found = find(folder, name)
    if found.parent != folder:
        raise InvalidArgument(f"{name!r:.80} is not in {folder}; remove it yourself")
    return found.name


def replay(
    name: Annotated[
        str | None, typer.Argument(metavar="[CAPSULE]", help="A name of lz capsule list, a folder, or a .tar.gz.")
    ] = None,
    backend: Annotated[
        list[str] | None, typer.Option("--backend", "-b", metavar="NAME", help="On this one; may be repeated.")
    ] = None,
    env: Annotated[
        str | None, typer.Option("--env", metavar="all", help="all: on every backend that has the op.")
    ] = None,
    times: Annotated[int, typer.Option("--times", "-n", min=1, help="So often on each.")] = 1,
    timeout_s: Annotated[float | None, typer.Option("--timeout", help="Seconds for each call.")] = None,
    seed: Annotated[int, typer.Option(help="Of random arguments, where a capsule has no data.")] = 0,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Find a smaller call that fails in the same way, and keep its capsule.")
    ] = False,
    under: Annotated[
        str | None,
        typer.Option(
            "--under", metavar="TOOL", help="gdb: the stacks where its worker dies or hangs; coredump: its memory, too."
        ),
    ] = None,
    core: Annotated[
        Path | None, typer.Option("--core", metavar="FILE", help="Of --under coredump; default: core.NAME here.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option("--log", metavar="FILE", help="In place of a capsule: a record of lz up --record.")
    ] = None,
    call: Annotated[
        str | None, typer.Option("--call", metavar="CLIENT:SEQ", help="With --log: what became of this call.")
    ] = None,
    worker: Annotated[
        str | None, typer.Option("--worker", metavar="BACKEND", help="With --log: what became of its workers.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a capsule's call again, by a broker of its own: on the backend that failed, on others, or on all. Or tell
    the broker's core again what was recorded (--log), and see whether it does the same.

    Ends with 1 when a run gave no answer, or a wrong one, or the core did something else."""
    if log is not None:
        raise typer.Exit(_replay_log(log, name, call, worker, as_json=as_json))
    from layerzero.client.capsules import form, store
    from layerzero.client.cli.output import FAILED, err, note, print_json
    from layerzero.client.tools.replay import is_far, replay
    from layerzero.ipc.errors import InvalidArgument

    if name is None or call is not None or worker is not None:
        raise InvalidArgument("name a capsule of lz capsule list, or a record: --log FILE, with --call or --worker")
    if under not in (None, "gdb", "coredump"):
        raise InvalidArgument(f"--under {under!r:.40}; allowed: gdb, coredump")
    if env not in (None, "all"):
        raise InvalidArgument(f"--env {env!r:.40}; allowed: all, or --backend NAME")
    with tempfile.TemporaryDirectory(prefix="lz-capsule-") as unpacked:
        if name.endswith(".tar.gz"):
            folder = store.unpack(Path(name), Path(unpacked))
            capsule = form.read(folder)
        else:
            folder, capsule = _find(name)
        data = form.memory(folder, capsule) if capsule.has_data else []
    if not capsule.has_data:
        note(f"its arguments were not kept ({capsule.left_out}): random ones, of seed {seed}")
    wanted = None if env == "all" else list(dict.fromkeys(backend or [capsule.failed.backend]))
    if shrink:
        if env == "all" or (wanted is not None and len(wanted) > 1):
            raise InvalidArgument(
                "--shrink looks at one backend: name it with --backend, or none for the one that failed"
            )
        _shrink(capsule, data, (wanted or [capsule.failed.backend])[0], times, timeout_s, seed, as_json=as_json)
        return
    if under in ("gdb", "coredump"):
        one = (wanted or [capsule.failed.backend])[0]
        file = (core or Path(f"core.{capsule.name}")).absolute() if under == "coredump" else None
        _under_gdb(capsule, data, one, file, timeout_s, seed, as_json=as_json)
        return
    with err().status(f"{capsule.op} ...") as status:
        found = replay(
            capsule,
            data,
            backends=wanted,
            times=times,
            timeout_s=timeout_s,
            seed=seed,
            begins=lambda one: status.update(f"{capsule.op} on {one} ..."),
        )
    far = {one.backend for one in found if is_far(one, capsule)}
    if env == "all":
        note("left out: backends that cannot serve on this machine; lz status --all shows why")
    if as_json:
        rows = [{**one.to_dict(), "is_far": one.backend in far} for one in found]
        print_json({"capsule": capsule.name, "call": capsule.label, "has_data": capsule.has_data, "backends": rows})
    else:
        _show_outcomes(capsule, found, far)
    if far or not all(one.is_right for one in found):
        raise typer.Exit(FAILED)


def _under_gdb(
    capsule: Capsule,
    data: list[bytes],
    backend: str,
    core: Path | None,
    timeout_s: float | None,
    seed: int,
    *,
    as_json: bool,
) -> None:
    from rich.text import Text

    from layerzero.client.cli.output import FAILED, err, note, out, print_json
    from layerzero.client.tools.debugger import under_gdb
    from layerzero.ipc.errors import InvalidArgument

    if core is not None and (core.exists() or any(one.isspace() for one in str(core))):
        raise InvalidArgument(f"{core} is there already, or has a space in it; name another file: --core FILE")
    with err().status(f"{capsule.op} on {backend}, and gdb at its worker ..."):
        what, said = under_gdb(capsule, data, backend, core=core, timeout_s=timeout_s, seed=seed)
    if as_json:
        print_json({"capsule": capsule.name, "backend": backend, "ended": what, "gdb": said})
    else:
        out().print(Text(said), soft_wrap=True)
        note(f"{capsule.op} on {backend}: {what}")
        if core is not None and core.exists():
            note(f"{core}: {core.stat().st_size:,} bytes, with all of the worker's memory; gdb PYTHON {core} reads it")
    if what != "ok":
        raise typer.Exit(FAILED)


def _shrink(
    capsule: Capsule,
    data: list[bytes],
    backend: str,
    times: int,
    timeout_s: float | None,
    seed: int,
    *,
    as_json: bool,
) -> None:
    from rich.text import Text

    from layerzero.client.cli.output import err, note, out, print_json
    from layerzero.client.tools.replay import lay_out, own_broker
    from layerzero.client.tools.shrink import save, shrink

    with err().status(f"{capsule.op} ...") as status, own_broker() as session:
        arguments = lay_out(capsule.op, capsule.arguments, capsule.segments, data, seed)
        found = shrink(
            session,
            capsule,
            arguments,
            backend,
            times=times,
            timeout_s=timeout_s,
            tried=lambda shapes: status.update(f"{capsule.op} of {shapes} ..."),
        )
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = save(folder, capsule, found)
    if as_json:
        shapes = {its: list(one.shape) for its, one in found.arguments.items()}
        print_json({"capsule": name, "from": capsule.name, "why": found.what, "tries": found.tries, "shapes": shapes})
        return
    out().print(Text(f"{capsule.op}({found.label}) on {backend} fails, too: {found.what}"), soft_wrap=True)
    note(f"found with {found.tries} calls; lz replay {name} makes it again")


def _replay_log(log: Path, name: str | None, call: str | None, worker: str | None, *, as_json: bool) -> int:
    from layerzero.client.cli.replay_log import replay_log
    from layerzero.ipc.errors import InvalidArgument

    if name is not None:
        raise InvalidArgument("a capsule and --log are two things to replay: name one of them")
    return replay_log(log, call=call, worker=worker, as_json=as_json)


def _show_outcomes(capsule: Capsule, found: list[Outcome], far: set[str]) -> None:
    import statistics
    from itertools import islice

    from rich.table import Table
    from rich.text import Text

    from layerzero.client.cli.output import out
    from layerzero.client.connection.report import time_text

    out().print(Text(capsule.label), soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for head in ("backend", "runs", "kernel", "from the reference"):
        table.add_column(head, overflow="fold")
    for one in found:
        runs = ", ".join(f"{what} {count}" for what, count in one.runs.items())
        error = "" if one.error is None else "same numbers" if not one.error else f"{one.error:.1e}"
        error += ", WRONG" if one.backend in far else ""
        error += ", other bits at each run" if not one.is_same else ""
        kernel = time_text(statistics.median(one.kernel_us)) if one.kernel_us else ""
        table.add_row(one.backend, runs, kernel, error.removeprefix(", "))
    out().print(table)
    for one in found:
        for what, detail in one.details.items():
            if what != "ok":
                told = "\n".join(islice(detail.splitlines(), WHY_LINES))
                out().print(Text(f"{one.backend}, {what}: {told}"), soft_wrap=True)
