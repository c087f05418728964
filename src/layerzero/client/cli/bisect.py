"""`lz bisect`, and `lz matrix --bisect`: the first version with which a script, test, function or op call fails."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from layerzero.client.cli.options import Json, Params

if TYPE_CHECKING:
    from layerzero.client.cli.trying import Versions
    from layerzero.envs.build.installers import Uv
    from layerzero.envs.build.interpreters import Python
    from layerzero.envs.matrix.bisect import Found, Range, Tried
    from layerzero.envs.matrix.target import Target

NOT_FOUND = 1  # exit code: all versions do the same, or none could be tried


def bisect(
    requirement: Annotated[str, typer.Argument(metavar="REQUIREMENT", help="A distribution: onnxruntime.")],
    span: Annotated[str, typer.Argument(metavar="LOW..HIGH", help="Its releases, both included: 1.16..1.19")],
    target: Annotated[
        str | None,
        typer.Argument(metavar="TARGET", help="FILE.py, FILE.py::TEST, MODULE:FUNCTION or an op, with its arrays."),
    ] = None,
    words: Annotated[list[str] | None, typer.Argument(metavar="[SHAPE:DTYPE]...", help="Of an op.")] = None,
    beside: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="REQUIREMENT", help='What else is installed: "numpy<2"; may be repeated.'),
    ] = None,
    python: Annotated[str | None, typer.Option("--python", metavar="3.X", help="Default: this one.")] = None,
    param: Params = None,
    backend: Annotated[
        str | None, typer.Option("--backend", "-b", help="Of an op: whose versions; default: the distribution's name.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option("--reference", help="Of an op: the backend that is right; default: the most trusted.")
    ] = None,
    wheelhouse: Annotated[
        Path | None,
        typer.Option(
            "--wheelhouse",
            metavar="DIR",
            envvar="LAYERZERO_WHEELHOUSE",
            exists=True,
            file_okay=False,
            help="A folder of wheels that is the only source: its releases are tried, no network is used.",
        ),
    ] = None,
    store: Annotated[
        Path | None, typer.Option("--store", envvar="LAYERZERO_STORE", file_okay=False, help="Where verdicts are kept.")
    ] = None,
    manifests: Annotated[
        list[Path] | None,
        typer.Option("--manifests", envvar="LAYERZERO_MANIFEST_DIRS", help="A further folder of manifests."),
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds that one try may take.")] = 180.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Try again what earlier runs have found.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Of an op or --call: keep what was built.")] = False,
    call: Annotated[
        str | None,
        typer.Option(
            "--call", metavar="CAPSULE", help="In place of TARGET: the call of a capsule, of an op or function."
        ),
    ] = None,
    times: Annotated[int, typer.Option("--times", "-n", min=1, help="Of --call: so often with each version.")] = 1,
    seed: Annotated[int, typer.Option(help="Of --call: of random arguments, where the capsule has no data.")] = 0,
    device: Annotated[str | None, typer.Option(metavar="DEVICE", help="Of --call: as of lz replay.")] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of --call of a function: where its file is now.")
    ] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Of --call of a function: as of lz replay.")] = False,
    as_json: Json = False,
) -> None:
    """Find the first release with which a script, a test, a function or an op call fails, or passes again. Exit code 0
    where one was found, 1 where all versions do the same or none could be tried."""
    from layerzero.client.cli.bisect_op import OpTrial, op_trier
    from layerzero.envs.functions import default_store
    from layerzero.envs.matrix.target import Target
    from layerzero.ipc.errors import ConfigError, InvalidArgument
    from layerzero.ipc.vocabulary.ops import PUBLIC_OPS

    root = store or default_store(_environ())
    if (target is None) == (call is None):
        raise typer.BadParameter("name a TARGET, or a capsule: --call NAME", param_hint="TARGET")
    if call is None and (times != 1 or seed or device or file or trust):
        raise typer.BadParameter("--times, --seed, --device, --file and --trust belong to --call", param_hint="TARGET")
    if target is None:
        if words or param:
            raise typer.BadParameter("a capsule has its arrays and parameters", param_hint="--call")
        wanted, tool = _range(f"{requirement} {span}"), _tool(wheelhouse)
        how = _OfCall(str(call), beside, python, backend, reference, keep, times, seed, device or "", file, trust)
        with _call_trier(how, wanted, root, manifests or (), tool, wheelhouse, timeout) as (versions, run):
            found = _search(wanted, versions, run)
        _show(wanted.name, versions, found, as_json=as_json)
        raise typer.Exit(0 if found.at else NOT_FOUND)
    is_op = target in PUBLIC_OPS
    if not is_op and (words or param or backend or reference or keep):
        raise typer.BadParameter(
            "arrays, --param, --backend, --reference and --keep belong to an op", param_hint="TARGET"
        )
    wanted, tool = _range(f"{requirement} {span}"), _tool(wheelhouse)
    if is_op:
        if beside or python:
            raise typer.BadParameter("the backend's manifest says what an op needs", param_hint="--with, --python")
        trial = OpTrial([target, *(words or ())], param or (), backend or wanted.name, reference, keep)
        with op_trier(trial, wanted, root, manifests or (), tool, wheelhouse, timeout) as (versions, run):
            found = _search(wanted, versions, run)
    else:
        try:
            aim = Target.of(target, Path.cwd())
        except ConfigError as exc:
            raise InvalidArgument(exc.message) from exc
        asked, minor = (beside or [], python) if beside or aim.kind != "function" else _declared(aim, wanted, python)
        together = [" ".join(asked)] if asked else []
        versions, found = _of_target(wanted, together, (), aim, minor, root, tool, timeout, is_fresh=fresh)
    _show(wanted.name, versions, found, as_json=as_json)
    raise typer.Exit(0 if found.at else NOT_FOUND)


class _OfCall(NamedTuple):
    """What is wanted of the call of a capsule, as the words of `lz bisect` say it."""

    name: str
    beside: list[str] | None
    python: str | None
    backend: str | None
    reference: str | None
    keep: bool
    times: int
    seed: int
    device: str
    file: Path | None
    trust: bool


@contextlib.contextmanager
def _call_trier(
    how: _OfCall,
    wanted: Range,
    root: Path,
    folders: Sequence[Path],
    tool: Uv,
    wheelhouse: Path | None,
    timeout_s: float,
) -> Iterator[Versions]:
    """Raises InvalidArgument, EnvError, ConfigError."""
    from layerzero.client.cli.bisect_function import FunctionTrial, function_trier
    from layerzero.client.cli.bisect_op import CapsuleTrial, op_trier
    from layerzero.client.cli.capsule import opened
    from layerzero.client.cli.output import note

    capsule, data, is_own = opened(how.name)
    if not capsule.has_data:
        note(f"its arguments were not kept ({capsule.left_out}): random ones, of seed {how.seed}")
    if capsule.function is not None:
        if how.backend or how.reference or how.device:
            raise typer.BadParameter("--backend, --reference and --device belong to an op", param_hint="--call")
        its = (capsule, data, how.beside, how.python, how.keep, how.times, how.seed, how.file, is_own or how.trust)
        with function_trier(FunctionTrial(*its), wanted, root, tool, wheelhouse, timeout_s) as found:
            yield found
        return
    if how.beside or how.python or how.file or how.trust:
        raise typer.BadParameter("the backend's manifest says what an op needs", param_hint="--with, --python")
    backend = how.backend or capsule.failed.backend.partition("@")[0]
    trial = CapsuleTrial(capsule, data, backend, how.reference, how.keep, how.times, how.seed, how.device)
    with op_trier(trial, wanted, root, folders, tool, wheelhouse, timeout_s) as found:
        yield found


def of_matrix(
    text: str,
    words: Sequence[str],
    *,
    test: str,
    store: Path,
    folders: Sequence[Path],
    timeout_s: float,
    as_json: bool,
) -> None:
    """`lz matrix WORDS --bisect TEXT --test TEST`. `words`: what else the environment has. Raises EnvError,
    InvalidArgument."""
    from layerzero.envs.matrix.target import Target
    from layerzero.ipc.errors import ConfigError, InvalidArgument

    try:
        aim = Target.of(test, Path.cwd())
    except ConfigError as exc:
        raise InvalidArgument(f"--test {exc.message}") from exc
    wanted = _range(text)
    versions, found = _of_target(wanted, words, folders, aim, None, store, _tool(None), timeout_s)
    _show(wanted.name, versions, found, as_json=as_json)


def _environ() -> dict[str, str]:
    import os

    return dict(os.environ)


def _range(text: str) -> Range:
    from layerzero.envs.matrix.bisect import parse_range
    from layerzero.ipc.errors import ConfigError, InvalidArgument

    try:
        return parse_range(text)
    except ConfigError as exc:
        raise InvalidArgument(exc.message) from exc


def _tool(wheelhouse: Path | None) -> Uv:
    """uv; of a folder of wheels one that looks nowhere else."""
    from layerzero.envs.matrix.resolver import the_uv

    tool = the_uv()
    if wheelhouse is None:
        return tool
    return dataclasses.replace(tool, flags=("--offline", "--no-config", *_only(wheelhouse)), environ={})


def _only(wheelhouse: Path) -> tuple[str, ...]:
    return ("--no-index", "--find-links", str(wheelhouse.absolute()))


def _declared(aim: Target, wanted: Range, python: str | None) -> tuple[list[str], str | None]:
    """What an isolated function requires beside the distribution, and its Python; nothing of other functions."""
    import functools
    import importlib
    import sys

    from layerzero.client.cli.output import note
    from layerzero.envs.matrix.target import without

    sys.path.insert(0, str(aim.folder))
    try:
        function = functools.reduce(getattr, aim.node.split("."), importlib.import_module(aim.module))
    except Exception as exc:  # it may need what only the environment has
        note(f"{aim.module} cannot be imported here ({type(exc).__name__}: {exc}); --with says what it requires")
        return [], python
    where = getattr(function, "env", None)
    of_its = python or getattr(where, "python", None) or None  # one that has no Python of ours has an interpreter
    return without(wanted.name, getattr(where, "requires", ())), of_its


def _of_target(
    wanted: Range,
    words: Sequence[str],
    folders: Sequence[Path],
    aim: Target,
    python: str | None,
    store: Path,
    tool: Uv,
    timeout_s: float,
    *,
    is_fresh: bool = False,
) -> tuple[list[str], Found]:
    from layerzero.client.cli.matrix import ending_on_sigterm
    from layerzero.envs.build import interpreters
    from layerzero.envs.matrix.subjects import choose
    from layerzero.envs.matrix.trial import Lab
    from layerzero.envs.matrix.trier import trier
    from layerzero.ipc.errors import ConfigError, InvalidArgument

    try:
        beside = choose(words, folders) if words else []
    except ConfigError as exc:
        raise InvalidArgument(exc.message) from exc
    minor = python or next((one.python for one in beside if folders or one.backend), interpreters.host().minor)
    found_python = interpreters.find(minor, wanted.name)
    versions = list_versions(tool, wanted, found_python)
    with Lab(store, tool, timeout_s, is_fresh=is_fresh) as lab, ending_on_sigterm():
        return versions, _search(wanted, versions, trier(lab, wanted, beside, aim, found_python))


def list_versions(tool: Uv, wanted: Range, python: Python) -> list[str]:
    """Those of the range that have a wheel here. Raises EnvError where there are none."""
    from layerzero.client.cli.output import note
    from layerzero.envs.matrix.resolver import versions_between
    from layerzero.ipc.errors import EnvError

    versions = versions_between(tool, wanted.name, wanted.first, wanted.last, python)
    if not versions:
        raise EnvError(
            f"no release of {wanted.name} from {wanted.first} to {wanted.last} has a wheel for Python {python.minor}",
            env="",
            cause="no versions",
            repair=f"another range, or check the name: pip index versions {wanted.name}",
        )
    note(f"{len(versions)} versions: {', '.join(versions)}")
    return versions


def _search(wanted: Range, versions: Sequence[str], run: Callable[[str], Tried]) -> Found:
    from layerzero.client.cli.output import note
    from layerzero.envs.matrix.bisect import search

    def tell(version: str) -> Tried:
        tried = run(version)
        said = "; found before" if tried.is_kept else ""
        note(f"{wanted.name} {version}: {tried.outcome.value}: {tried.why}{said}")
        return tried

    return search(versions, tell)


def _show(name: str, versions: Sequence[str], found: Found, *, as_json: bool) -> None:
    from rich.table import Table

    from layerzero.client.cli.output import out, print_json
    from layerzero.envs.matrix.bisect import Outcome

    if as_json:
        print_json({"name": name, "versions": versions, **dataclasses.asdict(found)})
        return
    styles = {Outcome.PASSED: "green", Outcome.FAILED: "red", Outcome.SKIPPED: "dim"}
    table = Table(name, "outcome", "why", box=None)
    for tried in sorted(found.tried, key=lambda one: versions.index(one.version)):
        outcome = f"[{styles[tried.outcome]}]{tried.outcome.value}[/]"
        table.add_row(tried.version, outcome, tried.why.replace("[", r"\["))
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
