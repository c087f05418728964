"""A matrix as one HTML page for a report: no other file, nothing from a network, readable without its script.

A cell is a link to its evidence; CSS shows the one that the address names, and prints those of all conflicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

from layerzero.envs.matrix.engine import Cell, Isolated, Matrix
from layerzero.envs.matrix.report import MARKS, Machine, environments_text, versions
from layerzero.envs.matrix.subjects import FOLDER, Subject
from layerzero.envs.matrix.verdict import MEANING, Kind, Verdict

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def render(matrix: Matrix, machine: Machine) -> str:
    """The whole page. All text that comes from a library, a resolver or a user is escaped."""
    style, script = ((FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    body = "\n".join([*_head(matrix, machine), *_map(matrix), *_subjects(matrix), *_sets(matrix)])
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Conflict matrix, {escape(machine.made_at)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n{body}\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _head(matrix: Matrix, machine: Machine) -> Iterator[str]:
    facts = (machine.made_at, machine.cpu, machine.system, f"Python {machine.python}", machine.resolver)
    yield f'<h1>Conflict matrix</h1>\n<p class="facts">{escape(" · ".join(facts))}</p>'
    pairs = [cell for cell in matrix.cells.values() if len(cell.subjects) == 2]
    count = {state: sum(cell.state == state for cell in pairs) for state in ("ok", "care", "conflict")}
    yield (
        f"<p>{len(matrix.subjects)} backends, {len(pairs)} pairs: {count['ok']} work together, {count['care']} only "
        f"with what no metadata says, {count['conflict']} not at all.</p>"
    )
    first, *more = environments_text(matrix)
    yield f'<p class="answer">{escape(first.rstrip(":"))}</p>\n<ol class="groups">'
    for number, group in enumerate(matrix.cover.groups, 1):
        yield f"<li><b>environment {number}</b>{escape(', '.join(group))}</li>"
    yield "</ol>"
    for line in more[len(matrix.cover.groups) :]:
        yield f'<p class="facts">{escape(line)}</p>'


def _map(matrix: Matrix) -> Iterator[str]:
    names = [one.name for one in matrix.subjects]
    yield '<h2>Pairs</h2>\n<div class="split">\n<div>\n<div class="scroll"><table class="map">'
    yield (
        "<caption>Installed into one environment and imported into one process. Outlined: alone. "
        "Choose a cell for its evidence.</caption>"
    )
    columns = "".join(f'<th scope="col"><span>{escape(name)}</span></th>' for name in names)
    yield f'<thead><tr><td></td>{columns}<th scope="col"><span>isolated</span></th></tr></thead>\n<tbody>'
    for name in names:
        cells = "".join(f"<td>{_link(_cell(matrix, name, other))}</td>" for other in names)
        yield f'<tr><th scope="row">{escape(name)}</th>{cells}{_apart(matrix.isolated[name])}</tr>'
    yield f'</tbody></table></div>\n<ul class="legend">{"".join(_legend(matrix))}</ul>\n</div>\n<div class="panel">'
    yield '<p class="hint facts">The evidence of the chosen cell appears here. Arrow keys move over the map.</p>'
    for cell in matrix.cells.values():
        yield _evidence(cell, matrix.isolated)
    yield "</div>\n</div>"


def _cell(matrix: Matrix, row: str, column: str) -> Cell:
    if row == column:
        return matrix.alone(row)
    return matrix.cells.get((row, column)) or matrix.cells[(column, row)]


def _anchor(cell: Cell) -> str:
    """An id that is safe in a URL: names may hold spaces and signs."""
    return "cell-" + "-".join(name.encode().hex() for name in cell.subjects)


def _classes(cell: Cell) -> str:
    return " ".join(
        ["cell", f"k-{cell.kind.value}"]
        + (["care"] if cell.state == "care" else [])
        + (["alone"] if len(cell.subjects) == 1 else [])
    )


def _link(cell: Cell) -> str:
    text = f"{' + '.join(cell.subjects)}: {cell.kind.value}: {cell.plain.summary}"
    mark = MARKS[cell.kind][0].lower() + ("*" if cell.state == "care" else "")
    label = escape(text, quote=True)
    return f'<a class="{_classes(cell)}" href="#{_anchor(cell)}" title="{label}" aria-label="{label}">{mark}</a>'


def _apart(isolated: Isolated) -> str:
    text = f"{'ok' if isolated.ok else 'fails'}"
    return f'<td class="apart" title="{escape(isolated.summary, quote=True)}">{text}, {escape(isolated.through)}</td>'


def _legend(matrix: Matrix) -> Iterator[str]:
    for kind in Kind:
        if any(cell.kind is kind for cell in matrix.cells.values()):
            mark = MARKS[kind][0].lower()
            yield f'<li><span class="cell k-{kind.value}">{mark}</span>{escape(MEANING[kind])}</li>'
    if any(cell.state == "care" for cell in matrix.cells.values()):
        yield '<li><span class="cell care">*</span>fails so, and works with what no metadata says</li>'


def _evidence(cell: Cell, isolated: Mapping[str, Isolated]) -> str:
    parts = [
        f'<section class="evidence {cell.state}" id="{_anchor(cell)}" tabindex="-1">',
        f"<h3>{escape(' + '.join(cell.subjects))}</h3>",
        *_verdict("As their metadata has it", cell.plain),
    ]
    if cell.careful is not None:
        parts += _verdict(f"With {', '.join(cell.care)}", cell.careful)
    parts += [
        f"<p>Isolated: {escape(name)}: {'ok' if isolated[name].ok else 'fails'} through a {isolated[name].through} "
        f"of its own: {escape(isolated[name].summary)}</p>"
        for name in cell.subjects
    ]
    return "\n".join([*parts, "</section>"])


def _verdict(title: str, verdict: Verdict) -> Iterator[str]:
    yield (
        f'<p><b>{escape(title)}:</b> <span class="tag k-{verdict.kind.value}">{verdict.kind.value}</span> '
        f"{escape(verdict.summary)}</p>"
    )
    if len(verdict.orders) > 1:
        rows = "".join(
            f"<tr><td>{escape(', then '.join(one['order']))}</td><td>{escape(one['kind'])}</td>"
            f"<td>{escape(one['summary'])}</td></tr>"
            for one in verdict.orders
        )
        head = (
            '<thead><tr><th scope="col">imported</th><th scope="col">kind</th><th scope="col">outcome</th></tr></thead>'
        )
        yield f'<table class="plain">{head}<tbody>{rows}</tbody></table>'
    if verdict.evidence.strip():
        yield f"<pre>{escape(verdict.evidence.strip())}</pre>"
    if verdict.versions:
        listed = ", ".join(f"{name} {version}" for name, version in sorted(verdict.versions.items()))
        yield f"<details><summary>{len(verdict.versions)} distributions</summary><p>{escape(listed)}</p></details>"


def _subjects(matrix: Matrix) -> Iterator[str]:
    yield '<h2>Backends</h2>\n<div class="scroll"><table class="plain"><thead><tr>'
    yield "".join(
        f'<th scope="col">{text}</th>'
        for text in ("name", "installed with", "needs, and its metadata does not say", "resolved to", "served by")
    )
    yield "</tr></thead><tbody>"
    for one in matrix.subjects:
        cells = (
            " ".join(one.requirements),
            " ".join(one.care),
            ", ".join(_own_versions(one, versions(matrix, one.name))),
            f"a LayerZero worker ({one.backend})" if one.backend else "a process of its own",
        )
        columns = "".join(f"<td>{escape(text)}</td>" for text in cells)
        yield f'<tr><th scope="row">{escape(one.name)}</th>{columns}</tr>'
    yield "</tbody></table></div>"


def _own_versions(subject: Subject, found: Mapping[str, str]) -> Iterator[str]:
    for name in dict.fromkeys((*subject.distributions, "numpy", "protobuf")):  # the two that most conflicts are about
        if name in found:
            yield f"{name} {found[name]}"


def _sets(matrix: Matrix) -> Iterator[str]:
    if matrix.sets:
        yield '<h2>Larger sets that were tried</h2>\n<div class="panel all">'
        for cell in matrix.sets:
            yield _evidence(cell, matrix.isolated)
        yield "</div>"
