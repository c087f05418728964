"""`lz matrix`: which backends can share an environment, and what happens when they must."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from layerzero.client.cli.output import err, note, out, print_json
from layerzero.envs.build.progress import Lines
from layerzero.envs.matrix import kept, page, report
from layerzero.envs.matrix.engine import Cell, Isolated, Matrix, OnCell, make
from layerzero.envs.matrix.resolver import the_uv
from layerzero.envs.matrix.subjects import Subject, choose
from layerzero.envs.matrix.trial import Lab
from layerzero.ipc import kept_files
from layerzero.ipc.errors import ConfigError, InvalidArgument

SEPARATOR = " + "


def matrix(
    words: Sequence[str],
    *,
    sets: Sequence[str],
    html: Path | None,
    store: Path,
    folders: Sequence[Path],
    jobs: int,
    timeout_s: float,
    fresh: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Make the matrix and print it. Raises EnvError, ConfigError, InvalidArgument."""
    subjects, groups = _choose(words, sets, folders)
    if not (words or sets or yes) and not _is_wanted(subjects, store, jobs):
        return
    if html is not None and not os.access(html.absolute().parent, os.W_OK):  # a quarter of an hour before it is written
        raise InvalidArgument(f"--html {str(html)!r}: its folder does not exist or cannot be written to")
    tool = the_uv()
    with Lab(store, tool, timeout_s, is_fresh=fresh) as lab, ending_on_sigterm(), _progress() as on_cell:
        made = make(
            subjects,
            lab,
            sets=groups,
            isolate=lambda backends: _isolate(backends, store, folders),
            jobs=jobs,
            on_cell=on_cell,
        )
    machine = report.this_machine(_version(tool.binary))
    _keep(made, machine, store)
    if html is not None:
        html.write_text(page.render(made, machine), encoding="utf-8")
        note(f"wrote {html}")
    if as_json:
        print_json(report.to_json(made, machine))
    else:
        _print(made)


def _keep(made: Matrix, machine: report.Machine, store: Path) -> None:
    """For lz dashboard."""
    with contextlib.suppress(OSError):  # a store that cannot be written to: the matrix is printed all the same
        kept_files.write(kept.last(store.absolute()), json.dumps(report.to_json(made, machine)).encode())


def _is_wanted(subjects: Sequence[Subject], store: Path, jobs: int) -> bool:
    """Ask before the whole default matrix is tried. Raises InvalidArgument where there is nobody to ask."""
    cells = len(subjects) * (len(subjects) + 1) // 2
    minutes = max(1, round(cells * kept.cell_seconds(store.absolute()) / jobs / 60))
    what = (
        f"lz matrix without words tries {len(subjects)} libraries, alone and in pairs: {cells} environments, "
        f"about {minutes} minutes, and downloads of what uv's cache lacks. What earlier runs found is not tried again."
    )
    if not (sys.stdin.isatty() and err().is_terminal):
        raise InvalidArgument(f"nobody is there to be asked: add --yes, or name a few: lz matrix torch mlx\n{what}")
    note(what)
    err().print("Go on? [y/N] ", end="", markup=False, highlight=False)
    return input().strip().lower() in ("y", "yes")


def _choose(
    words: Sequence[str], sets: Sequence[str], folders: Sequence[Path]
) -> tuple[list[Subject], list[tuple[str, ...]]]:
    """The subjects, and which sets of three and more to try; what only a set names becomes a subject, too."""
    groups = [tuple(dict.fromkeys(part.strip() for part in text.split(SEPARATOR))) for text in sets]
    for text, group in zip(sets, groups, strict=True):
        if len(group) < 2 or not all(group):
            raise InvalidArgument(f"--set {text!r}; allowed: names joined by ' + ', such as \"torch + mlx + jax-0.10\"")
    named = [*words, *(name for group in groups for name in group)]
    try:
        subjects = choose(named, folders)
    except ConfigError as exc:
        raise InvalidArgument(exc.message) from exc
    if len(words) > 2:
        groups.insert(0, tuple(dict.fromkeys(words)))
    return subjects, [group for group in dict.fromkeys(groups) if len(group) > 2]


def _isolate(backends: Sequence[Subject], store: Path, folders: Sequence[Path]) -> dict[str, Isolated]:
    from layerzero.client.tools.isolated import through_workers

    os.environ["LAYERZERO_STORE"] = str(store.absolute())  # of the broker that is started now
    note(f"isolated: {', '.join(one.name for one in backends)}, each through a worker of its own")
    return through_workers(backends, store=store, folders=folders, progress=Lines())


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """As an exception, so that environments and processes go first."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _progress() -> Iterator[OnCell]:
    if not err().is_terminal:
        yield _say
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=err(), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(done: int, total: int, cell: Cell) -> None:
            bar.update(
                task, completed=done, total=total, description=f"{SEPARATOR.join(cell.subjects)}: {cell.kind.value}"
            )

        yield show


def _say(done: int, total: int, cell: Cell) -> None:
    print(f"{done}/{total} {report.cell_text(cell)}", file=sys.stderr, flush=True)


def _version(binary: Path) -> str:
    return subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout.strip()


def _print(made: Matrix) -> None:
    console = out()
    console.print(report.grid(made), soft_wrap=True)
    console.print(report.legend(made), markup=False, highlight=False, soft_wrap=True)
    for cell in report.notable(made):
        console.print(report.cell_text(cell), markup=False, highlight=False, soft_wrap=True)
    for name, apart in made.isolated.items():
        if not apart.ok:
            console.print(f"{name} isolated: {apart.summary}", markup=False, highlight=False, soft_wrap=True)
    for line in report.environments_text(made):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
