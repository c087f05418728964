"""`lz matrix --bisect "NAME FROM..TO" --test FILE`: the first version that fails a user's test."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from layerzero.client.cli.matrix import ending_on_sigterm
from layerzero.client.cli.output import note, out, print_json
from layerzero.envs.build import interpreters
from layerzero.envs.matrix.bisect import Found, Outcome, Tried, parse_range, search
from layerzero.envs.matrix.resolver import the_uv, versions_between
from layerzero.envs.matrix.subjects import choose
from layerzero.envs.matrix.trial import Lab
from layerzero.envs.matrix.trier import trier
from layerzero.ipc.errors import ConfigError, EnvError, InvalidArgument

_STYLES = {Outcome.PASSED: "green", Outcome.FAILED: "red", Outcome.SKIPPED: "dim"}


def bisect(
    text: str,
    words: Sequence[str],
    *,
    test: str,
    store: Path,
    folders: Sequence[Path],
    timeout_s: float,
    as_json: bool,
) -> None:
    """Find the version and print it. `words`: what else the environment has. Raises EnvError, InvalidArgument."""
    file, separator, node = test.partition("::")
    if not Path(file).is_file():
        raise InvalidArgument(f"--test {test!r}: there is no such file")
    try:
        wanted = parse_range(text)
        beside = choose(words, folders) if words else []
    except ConfigError as exc:
        raise InvalidArgument(exc.message) from exc
    tool = the_uv()
    python = interpreters.find(next((one.python for one in beside), interpreters.host().minor), wanted.name)
    versions = versions_between(tool, wanted.name, wanted.first, wanted.last, python)
    if not versions:
        raise EnvError(
            f"no release of {wanted.name} from {wanted.first} to {wanted.last} has a wheel for Python {python.minor}",
            env="",
            cause="no versions",
            repair=f"another range, or check the name: pip index versions {wanted.name}",
        )
    note(f"{len(versions)} versions: {', '.join(versions)}")
    with Lab(store, tool, timeout_s) as lab, ending_on_sigterm():
        run = trier(lab, wanted, beside, str(Path(file).absolute()) + separator + node)

        def tell(version: str) -> Tried:
            tried = run(version)
            note(f"{wanted.name} {version}: {tried.outcome.value}: {tried.why}")
            return tried

        found = search(versions, tell)
    if as_json:
        print_json({"name": wanted.name, "versions": versions, **dataclasses.asdict(found)})
    else:
        _print(wanted.name, versions, found)


def _print(name: str, versions: Sequence[str], found: Found) -> None:
    table = Table(name, "outcome", "why", box=None)
    for tried in sorted(found.tried, key=lambda one: versions.index(one.version)):
        table.add_row(
            tried.version, f"[{_STYLES[tried.outcome]}]{tried.outcome.value}[/]", tried.why.replace("[", r"\[")
        )
    out().print(table)
    for line in answer(name, versions, found):
        out().print(line, markup=False, highlight=False, soft_wrap=True)


def answer(name: str, versions: Sequence[str], found: Found) -> list[str]:
    """What was found, in words."""
    count = f"{len(found.tried)} of {len(versions)} versions were tried"
    span = f"{versions[0]} to {versions[-1]}"
    verb = {"broken": "fails", "mended": "passes"}.get(found.answer, "")
    match found.answer:
        case "passes":
            lines = [f"no failure: the oldest and the newest version of {name} from {span} pass"]
        case "fails":
            lines = [f"no version passes: the oldest and the newest version of {name} from {span} fail"]
        case "nothing":
            lines = [f"no version of {name} from {span} could be installed"]
        case _:
            lines = [f"{name} {found.at} is the first version that {verb}; {found.before} is the last that does not"]
    if found.between:
        lines.append(f"it may also be one of {', '.join(found.between)}, which could not be installed")
    return [*lines, count]
