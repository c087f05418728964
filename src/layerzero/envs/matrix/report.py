"""A matrix as JSON and as text, with the facts of the machine that it was made on."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from layerzero.envs.matrix.engine import Cell, Matrix
from layerzero.envs.matrix.verdict import MEANING, Kind

# (two letters, style) of a cell in a terminal
MARKS: Mapping[Kind, tuple[str, str]] = {
    Kind.OK: ("ok", "green"),
    Kind.PYTHON: ("py", "magenta"),
    Kind.RESOLVER: ("re", "blue"),
    Kind.INSTALL: ("in", "blue"),
    Kind.FILES: ("fi", "magenta"),
    Kind.SYMBOL: ("sy", "yellow"),
    Kind.STRUCT: ("st", "yellow"),
    Kind.VERSION: ("ve", "yellow"),
    Kind.CRASH: ("CR", "bold red"),
    Kind.HANG: ("HA", "bold red"),
    Kind.WRONG: ("WR", "bold red"),
    Kind.ERROR: ("er", "red"),
}


@dataclass(frozen=True)
class Machine:
    """Where and when, for the head of a report."""

    made_at: str
    cpu: str
    system: str
    python: str
    resolver: str


def this_machine(resolver: str) -> Machine:
    """The facts of this machine. `resolver`: its name and version."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")),
        platform.machine(),
    )
    return Machine(
        made_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        cpu=cpu,
        system=f"Linux {platform.machine()}, {' '.join(platform.libc_ver())}",
        python=platform.python_version(),
        resolver=resolver,
    )


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []


def to_json(matrix: Matrix, machine: Machine) -> dict[str, Any]:
    """Everything that was found; `lz matrix --json` adds the schema number."""
    return {
        "machine": asdict(machine),
        "kinds": {kind.value: text for kind, text in MEANING.items()},
        "subjects": [
            {
                "name": one.name,
                "requirements": list(one.requirements),
                "needs": list(one.needs),
                "env": dict(one.env),
                "python": one.python,
                "imports": list(one.imports),
                "backend": one.backend or None,
                "versions": dict(versions(matrix, one.name)),
                "isolated": asdict(matrix.isolated[one.name]),
            }
            for one in matrix.subjects
        ],
        "cells": [cell.to_json() for cell in matrix.cells.values()],
        "sets": [cell.to_json() for cell in matrix.sets],
        "environments": {
            "groups": [list(group) for group in matrix.cover.groups],
            "is_fewest": matrix.cover.is_fewest,
            "refused_sets": [list(group) for group in matrix.cover.refused],
            "unserved": list(matrix.unserved),
        },
    }


def versions(matrix: Matrix, name: str) -> Mapping[str, str]:
    """What an environment of the subject alone has: of the try that worked, or of the plain one."""
    cell = matrix.alone(name)
    verdict = cell.careful if cell.careful is not None and cell.careful.versions else cell.plain
    return verdict.versions


def cell_text(cell: Cell) -> str:
    """One line: who, what happens, and what helps."""
    text = f"{' + '.join(cell.subjects)}: {cell.kind.value}: {cell.plain.summary}"
    match cell.state:
        case "care":
            return f"{text}; works with {', '.join(cell.care)}"
        case "conflict" if cell.careful is not None:
            return f"{text}; with {', '.join(cell.care)}: {cell.careful.kind.value}: {cell.careful.summary}"
    return text


def notable(matrix: Matrix) -> list[Cell]:
    """What fails, without the pairs that say no more than that one of the two fails alone, too, and what helps it."""

    def is_old_news(cell: Cell) -> bool:
        culprit = cell.plain.subject
        alone = matrix.cells.get((culprit,))
        return cell.state == "care" and len(cell.subjects) > 1 and alone is not None and alone.state == "care"

    return [cell for cell in (*matrix.cells.values(), *matrix.sets) if not cell.plain.ok and not is_old_news(cell)]


def environments_text(matrix: Matrix) -> Iterator[str]:
    """The answer to "how many environments do I need?", as lines."""
    cover = matrix.cover
    count = len(cover.groups)
    word = "environment serves" if count == 1 else "environments serve"
    most = "" if cover.is_fewest else "at most "
    yield f"{most}{count} {word} {sum(map(len, cover.groups))} of {len(matrix.subjects)} subjects:"
    for number, group in enumerate(cover.groups, 1):
        yield f"  {number}. {', '.join(group)}"
    if cover.refused:
        yield f"sets that fail though their pairs work: {'; '.join(' + '.join(group) for group in cover.refused)}"
    if matrix.unserved:
        yield f"no environment serves: {', '.join(matrix.unserved)}"


def grid(matrix: Matrix) -> Table:
    """The heat map for a terminal; columns are numbered as the rows are."""
    table = Table("", "", *(str(number) for number in range(1, len(matrix.subjects) + 1)), "isolated", box=None)
    names = [one.name for one in matrix.subjects]
    for row, name in enumerate(names):
        cells = [
            _mark(matrix.cells[(names[column], name) if column < row else (name,)]) if column <= row else Text("")
            for column in range(len(names))
        ]
        apart = matrix.isolated[name]
        table.add_row(str(row + 1), name, *cells, Text("ok" if apart.ok else "fails", "green" if apart.ok else "red"))
    for column in table.columns:
        column.no_wrap = True
        column.overflow = "ignore"
    table.padding = (0, 1, 0, 0)
    return table


def _mark(cell: Cell) -> Text:
    mark, style = MARKS[cell.kind]
    return Text(mark + ("*" if cell.state == "care" else ""), style)


def legend(matrix: Matrix) -> str:
    used = [kind for kind in Kind if any(cell.kind is kind for cell in matrix.cells.values())]
    marks = [f"{MARKS[kind][0]} {MEANING[kind]}" for kind in used]
    if any(cell.state == "care" for cell in matrix.cells.values()):
        marks.append("* works with what the metadata does not say")
    return "; ".join(marks)
