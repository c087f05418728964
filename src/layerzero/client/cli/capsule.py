"""`lz capsule`: calls whose worker died or hung, as they were kept. cli/replay.py makes them again."""

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
    from layerzero.client.capsules.of_function import FunctionCall

capsule_app = typer.Typer(help="Look at calls whose worker died or hung, as they were kept.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Of lz capsule list, its beginning, or a folder.")]
LOG_LINES = CALL_LINES = 12
FAULT = "Fatal Python error"  # what faulthandler begins with


def capsules_folder() -> Path:
    from layerzero.client.capsules.store import folder_of

    return folder_of(os.environ)


def find_capsule(name: str) -> tuple[Path, Capsule]:
    from layerzero.client.capsules.form import read
    from layerzero.client.capsules.store import find

    folder = find(capsules_folder(), name)
    return folder, read(folder)


def opened(name: str) -> tuple[Capsule, list[bytes], bool]:
    """A capsule, its memory, and whether it is one of this user's own; by a name of `lz capsule list`, a folder or a
    .tar.gz."""
    from layerzero.client.capsules import form, store

    with tempfile.TemporaryDirectory(prefix="lz-capsule-") as unpacked:
        if name.endswith(".tar.gz"):
            folder = store.unpack(Path(name), Path(unpacked))
            capsule, is_own = form.read(folder), False
        else:
            folder, capsule = find_capsule(name)
            is_own = store.is_own(capsules_folder(), folder)
        return capsule, form.memory(folder, capsule) if capsule.has_data else [], is_own


@capsule_app.command("list")
def show_all(as_json: Json = False) -> None:
    """Print the capsules that are kept, the newest first."""
    from rich.table import Table

    from layerzero.client.capsules.store import entries
    from layerzero.client.cli.output import note, out, print_json

    folder = capsules_folder()
    found = list(entries(folder))[::-1]
    if as_json:
        rows = [_row(name, capsule, problem) for name, capsule, problem in found]
        print_json({"folder": str(folder), "capsules": rows})
        return
    if not found:
        note(f"no capsules in {folder}: no worker has died of a call, or LAYERZERO_CAPSULES is off")
        return
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for head in ("capsule", "backend", "ended by", "data"):
        table.add_column(head, overflow="fold", no_wrap=head != "backend")  # a name is there to be copied
    for name, capsule, _ in found:
        if capsule is None:
            table.add_row(name, "-", "cannot be read")
        else:
            data = _size(capsule.nbytes) if capsule.has_data else "shapes"
            table.add_row(name, capsule.failed.backend, capsule.failed.what, data)
    out().print(table)
    for name, _, problem in found:
        if problem:
            note(f"{name}: {problem}")
    note("lz replay NAME makes the call again, on all backends with --env all")


def _size(nbytes: int) -> str:
    """Short, whatever it is."""
    unit, each = ("B", 1) if nbytes < 1 << 10 else ("KiB", 1 << 10) if nbytes < 1 << 20 else ("MiB", 1 << 20)
    return f"{nbytes / each:.0f} {unit}"


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

    from layerzero.client.capsules.form import LAST_CALLS, LOG, MAX_TEXT_BYTES
    from layerzero.client.cli.output import out, print_json
    from layerzero.ipc import files

    folder, capsule = find_capsule(name)
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
    if capsule.function is not None:
        said += _function_lines(capsule.function)
    else:
        said += [f"  {name} = {value!r:.120}" for name, value in capsule.params.items() if value is not None]
    said += [f"attempt on {f.kernel_id} ({f.backend}): {f.what}: {f.detail}" for f in capsule.failures]
    said.append(f"answered by {capsule.served_by}" if capsule.served_by else "no kernel answered")
    kept = f"{capsule.nbytes:,} bytes in {len(capsule.segments)} pieces"
    said.append(f"arguments: {kept if capsule.has_data else f'not kept: {capsule.left_out}'}")
    calls = capsule.facts.get(LAST_CALLS)
    facts = {k: ", ".join(map(str, v)) if isinstance(v, list) else v for k, v in capsule.facts.items()}
    said += [f"{key}: {value}" for key, value in facts.items() if key != LAST_CALLS or not isinstance(calls, list)]
    if isinstance(calls, list):
        shown = f", {CALL_LINES} of {len(calls)}; --json has all" if len(calls) > CALL_LINES else ""
        said += [f"{LAST_CALLS}, before its end{shown}:", *(f"  {line}" for line in calls[-CALL_LINES:])]
    if lines:
        said += ["end of the worker's log:", *(f"  {line}" for line in _last_words(lines))]
    out().print(Text("\n".join(said)), soft_wrap=True)


def _function_lines(function: FunctionCall) -> list[str]:
    said = []
    for part in function.parts[:-1]:
        said.append(f"  of an object that was constructed before; {len(part.given[0]) - 1} arguments of that are kept")
    for target in function.targets:
        of = f"{target.file} (SHA-256 {target.sha256[:12]})" if target.file else "a package of the environment"
        said.append(f"  {target.module}.{target.qualname} of {of}, in {target.env}")
    return [*said, *([f"  not to be made again: {function.problem}"] if function.problem else [])]


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

    folder, capsule = find_capsule(name)
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
    """Write a Python program that makes a capsule's call with its library alone, or with a function's file, for an
    issue of that library."""
    from layerzero.client.capsules.form import memory
    from layerzero.client.cli.output import note, out
    from layerzero.client.tools.script import write
    from layerzero.ipc.errors import InvalidArgument

    folder, capsule = find_capsule(name)
    if with_data and not capsule.has_data:
        raise InvalidArgument(f"leave --data out: {capsule.name} has no bytes of arguments: {capsule.left_out}")
    for path in () if output is None else (output, output.with_suffix(".npz")):
        if path.exists():
            raise InvalidArgument(f"{path} is there already; name another file")
    data = memory(folder, capsule) if with_data else []
    if capsule.function is not None:
        from layerzero.functions.capsule_script import write as write_function

        text = write_function(capsule, data, output, seed)
    else:
        text = write(capsule, data, _locked(capsule.failed.backend), output, seed)
    if output is None:
        out().print(text, soft_wrap=True, end="", markup=False, highlight=False)
        return
    output.write_text(text)
    held = "its arguments' bytes" if data else "random numbers"
    what = "the library" if capsule.function is None else "the environment's packages, the function's file"
    note(f"{output}: needs {what} and NumPy alone; with {held}. Look at it before you send it")


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

    folder = capsules_folder()
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
