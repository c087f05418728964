"""`lz replay`: a capsule's call once more, by a broker of its own; or what a broker recorded (--log)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerzero.client.cli.capsule import capsules_folder, opened
from layerzero.client.cli.options import Everywhere, Json, OnBackends, Seed, TimeoutS, Times, is_everywhere

if TYPE_CHECKING:
    from layerzero.client.capsules.form import Capsule
    from layerzero.client.tools.debugger import Runs
    from layerzero.client.tools.replay import Outcome

WHY_LINES = 4
ONE_ALONE = "--shrink looks at one backend: name it with --backend, or none for the one that failed"
How = tuple[list[str] | None, int, float | None, int, Path | None, bool, str | None, Path | None, str]


def replay(
    name: Annotated[
        str | None, typer.Argument(metavar="[CAPSULE]", help="A name of lz capsule list, a folder, or a .tar.gz.")
    ] = None,
    backend: OnBackends = None,
    env: Everywhere = None,
    times: Times = 1,
    timeout_s: TimeoutS = None,
    seed: Seed = 0,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Find a smaller call that fails in the same way, and keep its capsule.")
    ] = False,
    under: Annotated[
        str | None,
        typer.Option(
            "--under",
            metavar="TOOL",
            help="gdb: the stacks where its worker dies or hangs; coredump: its memory, too. Of a call on a GPU also "
            "blocking: CUDA_LAUNCH_BLOCKING=1; sanitizer: NVIDIA's compute-sanitizer.",
        ),
    ] = None,
    core: Annotated[
        Path | None, typer.Option("--core", metavar="FILE", help="Of --under coredump; default: core.NAME here.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:1. Default: where the capsule's call was.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Of a capsule of a function: where its file is, in the place of where it was."
        ),
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Of somebody else's capsule of a function: call what it names.")
    ] = False,
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
    from layerzero.client.capsules import form
    from layerzero.client.cli.output import FAILED, err, note, print_json
    from layerzero.client.tools.debugger import runs_of
    from layerzero.client.tools.replay import is_far, replay
    from layerzero.client.tools.under import COREDUMP, GDB, SANITIZER, TOOLS, findings, variables
    from layerzero.ipc.errors import InvalidArgument

    if name is None or call is not None or worker is not None:
        raise InvalidArgument("name a capsule of lz capsule list, or a record: --log FILE, with --call or --worker")
    if under is not None and under not in TOOLS:
        raise InvalidArgument(f"--under {under!r:.40}; allowed: {', '.join(TOOLS)}")
    everywhere = is_everywhere(env, backend)
    capsule, data, is_own = opened(name)
    if not capsule.has_data:
        note(f"its arguments were not kept ({capsule.left_out}): random ones, of seed {seed}")
    if file is not None and capsule.function is None:
        raise InvalidArgument(f"leave --file out: {capsule.name} is of the op {capsule.op}, not of a function")
    if trust and capsule.function is None:
        raise InvalidArgument(f"leave --trust out: {capsule.name} is of the op {capsule.op}, not of a function")
    own = [capsule.failed.backend]
    if capsule.failed.outcome == form.WRONG:
        if shrink or under:
            raise InvalidArgument("replay it without --shrink and --under: they look at deaths, and its worker lived")
        own.append(capsule.served_by.partition(".")[0])  # wrong beside what
    wanted = None if everywhere else list(dict.fromkeys(backend or own))
    if capsule.function is not None:
        how = (backend, times, timeout_s, seed, file, is_own or trust, under, core, device or "")
        raise typer.Exit(_replay_function(capsule, data, how, everywhere=everywhere, shrink=shrink, as_json=as_json))
    if shrink:
        if everywhere or (wanted is not None and len(wanted) > 1):
            raise InvalidArgument(ONE_ALONE)
        one = (wanted or own)[0]
        _shrink(capsule, data, one, times, timeout_s, seed, device or "", as_json=as_json)
        return
    if under in (GDB, COREDUMP):
        one = (wanted or own)[0]
        kept_in = _core_file(capsule, core) if under == COREDUMP else None
        _under_gdb(capsule, runs_of(capsule, data, one, seed, device or ""), one, kept_in, timeout_s, as_json=as_json)
        return
    written: dict[str, str] = {}
    with err().status(f"{capsule.op} ...") as status:
        found = replay(
            capsule,
            data,
            backends=wanted,
            times=times,
            timeout_s=timeout_s,
            seed=seed,
            begins=lambda one: status.update(f"{capsule.op} on {one} ..."),
            device=device or "",
            variables={} if under is None else variables(under, capsule),
            log=written.__setitem__,
        )
    said = {name: findings(text) for name, text in written.items()} if under == SANITIZER else {}
    far = {one.backend for one in found if is_far(one, capsule)}
    if everywhere:
        note("left out: backends that cannot serve on this machine; lz status --all shows why")
    if as_json:
        rows = [
            {**one.to_dict(), "is_far": one.backend in far, "sanitizer": said.get(one.backend, [])} for one in found
        ]
        print_json({"capsule": capsule.name, "call": capsule.label, "has_data": capsule.has_data, "backends": rows})
    else:
        _show_outcomes(capsule, found, far)
        _show_findings(said)
    if far or not all(one.is_right for one in found):
        raise typer.Exit(FAILED)


def _core_file(capsule: Capsule, core: Path | None) -> Path:
    return (core or Path(f"core.{capsule.name}")).absolute()


def _under_gdb(
    capsule: Capsule,
    runs: Callable[[Any], Runs],
    backend: str,
    core: Path | None,
    timeout_s: float | None,
    *,
    as_json: bool,
) -> None:
    from rich.text import Text

    from layerzero.client.cli.output import FAILED, err, note, out, print_json
    from layerzero.client.tools.debugger import under_gdb
    from layerzero.ipc.errors import InvalidArgument

    if core is not None and (core.exists() or any(one.isspace() for one in str(core))):
        raise InvalidArgument(f"{core} is there already, or has a space in it; name another file: --core FILE")
    call = capsule.op if capsule.function is None else capsule.function.label
    with err().status(f"{call} on {backend}, and gdb at its worker ..."):
        what, said = under_gdb(runs, core=core, timeout_s=timeout_s)
    if as_json:
        print_json({"capsule": capsule.name, "backend": backend, "ended": what, "gdb": said})
    else:
        out().print(Text(said), soft_wrap=True)
        note(f"{call} on {backend}: {what}")
        if core is not None and core.exists():
            note(f"{core}: {core.stat().st_size:,} bytes, with all of the worker's memory; gdb PYTHON {core} reads it")
    if what != "ok":
        raise typer.Exit(FAILED)


def _replay_function(
    capsule: Capsule,
    data: list[bytes],
    how: How,
    *,
    everywhere: bool,
    shrink: bool,
    as_json: bool,
) -> int:
    """The exit code."""
    from layerzero.client.cli.output import FAILED, err, print_json
    from layerzero.client.tools.replay import is_far
    from layerzero.client.tools.under import COREDUMP, GDB, variables
    from layerzero.functions import replaying
    from layerzero.ipc.errors import InvalidArgument

    backends, times, timeout_s, seed, file, is_trusted, under, core, device = how
    if shrink:
        if everywhere or len(backends or ()) > 1:
            raise InvalidArgument(ONE_ALONE)
        _shrink_function(capsule, data, how, as_json=as_json)
        return 0
    if under is not None and under not in (GDB, COREDUMP):
        variables(under, capsule)
    if under is not None:
        one = (backends or [capsule.failed.backend])[0]
        kept_in = _core_file(capsule, core) if under == COREDUMP else None
        runs = replaying.runs_of(capsule, data, one, seed, file, is_trusted=is_trusted, device=device)
        _under_gdb(capsule, runs, one, kept_in, timeout_s, as_json=as_json)
        return 0
    label = capsule.label
    with err().status(f"{label} ...") as status:
        found = replaying.replay(
            capsule,
            data,
            backends=None if everywhere else backends or (),
            times=times,
            timeout_s=timeout_s,
            seed=seed,
            begins=lambda one: status.update(f"{label} in {one} ..."),
            file=file,
            is_trusted=is_trusted,
            device=device,
        )
    far = {one.backend for one in found if is_far(one, capsule)}
    if as_json:
        rows = [{**one.to_dict(), "is_far": one.backend in far} for one in found]
        print_json({"capsule": capsule.name, "call": label, "has_data": capsule.has_data, "backends": rows})
    else:
        _show_outcomes(capsule, found, far)
    return int(FAILED) if far or not all(one.is_right for one in found) else 0


def _shrink_function(capsule: Capsule, data: list[bytes], how: How, *, as_json: bool) -> None:
    from rich.text import Text

    from layerzero.client.cli.output import err, note, out, print_json
    from layerzero.client.tools.replay import own_broker
    from layerzero.functions import replaying, shrinking

    backends, times, timeout_s, seed, file, is_trusted, _, _, device = how
    name = (backends or [capsule.failed.backend])[0]
    env, code, told = replaying.to_call(capsule, data, name, seed, file, is_trusted=is_trusted)
    ordinal = replaying.place_of(capsule, device)
    with err().status(f"{capsule.label} ...") as status, own_broker() as session:
        replaying.learn(session, env)
        found = shrinking.shrink(
            session,
            capsule,
            code,
            env,
            told,
            times=times,
            timeout_s=timeout_s,
            ordinal=ordinal,
            tried=lambda shapes: status.update(f"{capsule.op} of {shapes} ..."),
        )
    folder = capsules_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = shrinking.save(folder, capsule, found)
    if as_json:
        print_json(
            {"capsule": kept, "from": capsule.name, "why": found.what, "tries": found.tries, "shapes": found.shapes}
        )
        return
    shapes = ", ".join("x".join(map(str, shape)) for shape in found.shapes) or "no arrays"
    out().print(Text(f"{capsule.label} with {shapes} in {env} ends likewise: {found.what}"), soft_wrap=True)
    note(f"found with {found.tries} calls; lz replay {kept} makes it again")


def _shrink(
    capsule: Capsule,
    data: list[bytes],
    backend: str,
    times: int,
    timeout_s: float | None,
    seed: int,
    device: str,
    *,
    as_json: bool,
) -> None:
    from rich.text import Text

    from layerzero.client.cli.output import err, note, out, print_json
    from layerzero.client.tools.replay import lay_out, own_broker, where
    from layerzero.client.tools.shrink import save, shrink

    ordinal = where(capsule, device)
    with err().status(f"{capsule.op} ...") as status, own_broker() as session:
        arguments = lay_out(capsule.op, capsule.arguments, capsule.segments, data, seed)
        found = shrink(
            session,
            capsule,
            arguments,
            backend,
            times=times,
            timeout_s=timeout_s,
            device=ordinal,
            tried=lambda shapes: status.update(f"{capsule.op} of {shapes} ..."),
        )
        folder = capsules_folder()
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


def _show_findings(said: dict[str, list[str]]) -> None:
    from rich.text import Text

    from layerzero.client.cli.output import out

    for name, lines in said.items():
        told = "\n".join(f"  {line}" for line in lines) or "  nothing"
        out().print(Text(f"{name}, compute-sanitizer:\n{told}"), soft_wrap=True)


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
        error = one.difference or ("" if one.error is None else "same numbers" if not one.error else f"{one.error:.1e}")
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
