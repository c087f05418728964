"""The conflict matrix of the default set: writes bench/results/matrix.md, and matrix.html with all evidence.

    python bench/matrix.py [--quick]

A quarter of an hour with nothing kept, then a minute.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from common import RESULTS, parser


def main() -> None:
    args = parser(__doc__, "the report is printed").parse_args()
    command = [sys.executable, "-m", "layerzero.client.cli.app", "matrix", "--yes", "--json"]
    command += [] if args.quick else ["--html", str(RESULTS / "matrix.html")]
    made = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    report = "\n".join(lines(made)) + "\n"
    if args.quick:
        print(report)
    else:
        (RESULTS / "matrix.md").write_text(report, encoding="utf-8")


def lines(made: Mapping[str, Any]) -> Iterator[str]:
    """The report in Markdown."""
    machine, names = made["machine"], [one["name"] for one in made["subjects"]]
    pairs = [cell for cell in made["cells"] if len(cell["subjects"]) == 2]
    states = Counter(cell["state"] for cell in pairs)
    yield "# Conflict matrix of the default set"
    yield ""
    facts = ", ".join(machine[name] for name in ("made_at", "cpu", "system", "resolver"))
    yield f"`python bench/matrix.py`, {facts}. What cells and kinds mean: [docs/matrix.md](../../docs/matrix.md)."
    yield "All evidence: matrix.html beside this file."
    yield ""
    yield (
        f"{len(names)} backends, {len(pairs)} pairs: {states['ok']} work together as their metadata has it, "
        f"{states['care']} only with what no metadata says, {states['conflict']} not at all. Isolated, "
        f"{sum(one['isolated']['ok'] for one in made['subjects'])} of {len(names)} work."
    )
    yield ""
    yield from _environments(made["environments"])
    yield from _map(made, names)
    yield from _alone(made)
    yield from _conflicts(pairs)


def _environments(found: Mapping[str, Any]) -> Iterator[str]:
    most = "" if found["is_fewest"] else "At most "
    yield f"## {most}{len(found['groups'])} environments serve all"
    yield ""
    for group in found["groups"]:
        yield f"1. {', '.join(group)}"
    yield ""
    if found["unserved"]:
        yield f"No environment serves {', '.join(found['unserved'])}."
        yield ""
    if found["refused_sets"]:
        sets = "; ".join(" + ".join(group) for group in found["refused_sets"])
        yield f"Sets that fail although all their pairs work: {sets}."
        yield ""


def _map(made: Mapping[str, Any], names: list[str]) -> Iterator[str]:
    kinds = {frozenset(cell["subjects"]): cell for cell in made["cells"]}

    def text(row: str, column: str) -> str:
        cell = kinds[frozenset((row, column))]
        return cell["kind"] + ("*" if cell["state"] == "care" else "")

    yield "## Pairs"
    yield ""
    yield "`*`: with what no metadata says it works."
    yield ""
    yield "| | " + " | ".join(str(number) for number in range(1, len(names) + 1)) + " |"
    yield "| --- |" + " --- |" * len(names)
    for row, name in enumerate(names):
        cells = [text(name, names[column]) if column <= row else "" for column in range(len(names))]
        yield f"| {row + 1} {name} | " + " | ".join(cells) + " |"
    yield ""


def _alone(made: Mapping[str, Any]) -> Iterator[str]:
    yield "## Alone"
    yield ""
    yield "| backend | installed with | gives | works with | isolated through |"
    yield "| --- | --- | --- | --- | --- |"
    alone = {cell["subjects"][0]: cell for cell in made["cells"] if len(cell["subjects"]) == 1}
    for one in made["subjects"]:
        cell, isolated = alone[one["name"]], one["isolated"]
        gives = cell["kind"] if cell["state"] == "ok" else f"{cell['kind']}: {cell['plain']['summary']}"
        served = f"a {isolated['through']}: {'ok' if isolated['ok'] else 'fails'}"
        words = (one["name"], " ".join(one["requirements"]), gives, ", ".join(cell["care"]), served)
        yield f"| {' | '.join(_escaped(word) for word in words)} |"
    yield ""


def _conflicts(pairs: list[dict[str, Any]]) -> Iterator[str]:
    """One pair of each kind, the true conflicts first; the page has all."""
    yield "## One of each kind"
    yield ""
    yield "| kind | pairs | for example | what happens | with what each needs |"
    yield "| --- | --- | --- | --- | --- |"
    failing = [cell for cell in pairs if cell["state"] != "ok"]
    for kind, count in Counter(cell["kind"] for cell in failing).most_common():
        of_kind = sorted((cell for cell in failing if cell["kind"] == kind), key=lambda cell: cell["state"] == "care")
        cell = of_kind[0]
        careful = cell["careful"]
        help_ = "" if careful is None else f"{', '.join(cell['care'])}: {careful['kind']}: {careful['summary']}"
        words = (kind, str(count), " + ".join(cell["subjects"]), cell["plain"]["summary"], help_)
        yield f"| {' | '.join(_escaped(word) for word in words)} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


if __name__ == "__main__":
    main()
