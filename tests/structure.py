"""The structure of the source, read from its import statements: folders, and how many imports run between them.

    python -m tests.structure  (at the top of the repository) writes the part of docs/design.md that shows it

A place is a folder below src/layerzero, or a file that lies in a package's own folder: such files put its folders
together, or are what all of them use.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "layerzero"
DESIGN = ROOT / "docs" / "design.md"
PACKAGES = (
    "transformers",
    "diffusers",
    "torch",
    "client",
    "broker",
    "envs",
    "workers",
    "capabilities",
    "ipc",
)  # callers first
BEGIN, END = "<!-- python -m tests.structure: begin -->\n", "<!-- python -m tests.structure: end -->\n"


class Import(NamedTuple):
    """`target`: dotted name of the imported module. `is_typed`: it is for the type checker alone."""

    target: str
    is_typed: bool


@cache
def modules() -> dict[str, Path]:
    """Every module of ours by its dotted name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """All imports of a file, inside functions, too. `from package import module` is an import of the module."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    typed = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    return tuple(Import(name, id(node) in typed) for node in ast.walk(tree) for name in names(node))


def names(node: ast.AST) -> Iterator[str]:
    """Dotted names that a statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = node.module or "."
        inner = [f"{module}.{alias.name}" for alias in node.names]
        yield from {name if name in modules() else module for name in inner}


def place(module: str) -> str:
    """Where a module of ours lies, as documents write it: "broker/core", "broker/server.py", or "" for layerzero."""
    path = modules()[module].relative_to(SOURCE)
    return path.as_posix() if len(path.parts) == 2 and path.name != "__init__.py" else path.parent.as_posix().strip(".")


def edges() -> dict[tuple[str, str], list[tuple[str, str]]]:
    """(importing place, imported place) -> (importing module, imported module); what lies in one place is left out."""
    found = defaultdict(list)
    for module, path in modules().items():
        for one in imports(path):
            if one.target in modules() and place(module) not in ("", place(one.target)):  # "" loads what users name
                found[place(module), place(one.target)].append((module, one.target))
    return dict(found)


def closure(start: Iterable[str]) -> dict[str, set[str]]:
    """What is loaded with the modules of `start`: every module of ours, and what each imports from elsewhere. Imports
    for the type checker load nothing; those inside functions count."""
    found: dict[str, set[str]] = {}
    waiting = list(start)
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        targets = {one.target for one in imports(modules()[module]) if not one.is_typed}
        found[module] = targets - set(modules())
        waiting += targets & set(modules())
        waiting += [parent for parent in (module.rpartition(".")[0],) if parent]
    return found


def floors(links: Mapping[tuple[str, str], object]) -> list[str]:
    """Places, those that import others first. Raises graphlib.CycleError where places import each other."""
    below: dict[str, list[str]] = {place: [] for ends in sorted(links) for place in ends}
    for importing, imported in sorted(links):
        below[importing].append(imported)
    return list(TopologicalSorter(below).static_order())[::-1]


def _purpose(where: str) -> str:
    path = SOURCE / where
    text = (path if path.suffix else path / "__init__.py").read_text(encoding="utf-8")
    doc = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    return doc.split(". ")[0].rstrip(".:")


def _table(package: str, counts: Mapping[tuple[str, str], int]) -> Iterator[str]:
    inside = {ends: count for ends, count in counts.items() if all(one.split("/")[0] == package for one in ends)}
    files = Counter(place(module) for module in modules())
    order = floors(inside)
    order += sorted(one for one in files if one.split("/")[0] == package and one not in order)
    yield f"| `{package}/` | what it has | files | imports, how many |\n| --- | --- | ---: | --- |\n"
    for where in order:
        if where == package:  # its __init__.py
            continue
        used = sorted(
            (target.removeprefix(f"{package}/"), count) for (source, target), count in inside.items() if source == where
        )
        name = where.removeprefix(f"{package}/")
        yield f"| `{name}` | {_purpose(where)} | {files[where]} | {', '.join(f'{t} {n}' for t, n in used)} |\n"


def drawing() -> str:
    """The part of docs/design.md that shows the structure."""
    counts = {ends: len(found) for ends, found in edges().items()}
    between: Counter[tuple[str, str]] = Counter()
    for (source, target), count in counts.items():
        ends = (source.split("/")[0], target.split("/")[0])
        if ends[0] != ends[1] and all(ends):
            between[ends] += count
    parts = ["```mermaid\nflowchart TD\n"]
    parts += [f"    {source} -->|{count}| {target}\n" for (source, target), count in sorted(between.items())]
    parts.append("```\n")
    for package in PACKAGES:
        parts += ["\n", *_table(package, counts)]
    return "".join(parts)


def shown() -> str:
    """The same part, as docs/design.md has it now."""
    return DESIGN.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    text = DESIGN.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    DESIGN.write_text(f"{before}{BEGIN}{drawing()}{END}{after}", encoding="utf-8")
