"""`lz env` and `python -m layerzero.envs`: list, build, probe, lock and gc. Data on stdout, progress on stderr.

Exit codes: 0 done, 1 a build, probe or lock failed, 2 wrong usage.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import platformdirs
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from layerzero.envs.base import inspect
from layerzero.envs.build import Env, command, drift, ensure_all, find
from layerzero.envs.gc import collect
from layerzero.envs.installers import pick
from layerzero.envs.lock import lock as write_lock
from layerzero.envs.manifest import EnvManifest, VariantName, discover
from layerzero.envs.probe import DEFAULT_TIMEOUT_S, ProbeRecord, cached_probe, probe_cached
from layerzero.envs.progress import Lines, Progress, Spinners
from layerzero.ipc.errors import ConfigError, EnvError


class Variant(str, Enum):
    CPU = "cpu"
    CU12 = "cu12"
    CU13 = "cu13"


class InstallerChoice(str, Enum):
    UV = "uv"
    PIP = "pip"


app = typer.Typer(help="Backend environments: list, build, probe, lock, gc.", no_args_is_help=True)
_out = Console()
_err = Console(stderr=True)

Names = Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Environments; all of them if left out.")]
StoreDir = Annotated[
    Path,
    typer.Option("--store", envvar="LAYERZERO_STORE", help="Where environments are kept.", file_okay=False),
]
Folders = Annotated[
    list[Path] | None,
    typer.Option(
        "--manifests",
        envvar="LAYERZERO_MANIFEST_DIRS",
        exists=True,
        file_okay=False,
        help="A further folder of manifests; may be repeated.",
    ),
]
VariantChoice = Annotated[
    Variant,
    typer.Option(
        "--variant",
        envvar="LAYERZERO_VARIANT",
        help="Which build of the environment; those without builds for accelerators are used as they are.",
    ),
]
Base = Annotated[
    Path | None,
    typer.Option(
        "--overlay",
        metavar="PYTHON",
        envvar="LAYERZERO_OVERLAY",
        help="An interpreter to build over: what it has is used, the rest comes from the wheelhouse.",
    ),
]
WheelhouseDir = Annotated[
    Path | None,
    typer.Option(
        "--wheelhouse",
        metavar="DIR",
        envvar="LAYERZERO_WHEELHOUSE",
        help="A folder of wheels that is the only source; no network is used.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Timeout = Annotated[float, typer.Option("--timeout", min=1, help="Seconds that a probe may take.")]

_STORE = platformdirs.user_cache_path("layerzero")


@app.command("list")
def list_(
    store: StoreDir = _STORE,
    manifests: Folders = None,
    variant: VariantChoice = Variant.CPU,
    overlay: Base = None,
    as_json: Json = False,
) -> None:
    """Show every environment: built or not, over which interpreter, and what its last probe said."""
    found, problems = discover(manifests or ())
    rows = [_row(manifest, variant.value, store, overlay) for manifest in found.values()]
    rows += [{"name": p.name, "state": "disabled", "cause": p.message, "repair": f"edit {p.path}"} for p in problems]
    if as_json:
        _print_json(rows)
        return
    table = Table("environment", "state", "python", "size", "probe", "about", box=None)
    for row in rows:
        size, about = _megabytes(row.get("size_bytes")), row.get("cause") or row["summary"]
        table.add_row(row["name"], row["state"], row.get("python", ""), size, row.get("probe", ""), escape(about))
    for column in table.columns[:-1]:
        column.no_wrap = True
    _out.print(table)
    if overlay is not None:
        _out.print(f"overlay: over {overlay}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def build(
    names: Names = None,
    store: StoreDir = _STORE,
    manifests: Folders = None,
    variant: VariantChoice = Variant.CPU,
    installer: Annotated[InstallerChoice | None, typer.Option(help="Default: uv where there is one.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Build again even if it is there.")] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Builds side by side.")] = 2,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    offline: Annotated[
        bool, typer.Option("--offline", help="Use no network; needs --wheelhouse or --overlay, which imply it.")
    ] = False,
    wheelhouse: WheelhouseDir = None,
    overlay: Base = None,
    as_json: Json = False,
) -> None:
    """Build environments from their locks, then probe them. With --overlay: a few wheels over an interpreter that has
    a heavy stack already."""
    _end_cleanly_on_sigterm()
    if offline and wheelhouse is None and overlay is None:
        raise typer.BadParameter("needs --wheelhouse DIR, --overlay PYTHON or both", param_hint="--offline")
    chosen = [
        manifest
        for manifest in _choose(names, manifests)
        if names or manifest.interpreter == "host" or manifest.variant_for(variant.value) in manifest.variants
    ]
    with _failing_cleanly(), _progress() as progress:
        tool = pick(installer.value if installer else None)
        built = ensure_all(
            chosen,
            store=store,
            variant=variant.value,
            installer=tool,
            progress=progress,
            force=force,
            jobs=jobs,
            base=overlay,
            wheelhouse=wheelhouse,
        )
    _report([_verdict(m, built[m.name], timeout) for m in chosen], as_json)


@app.command()
def probe(
    names: Names = None,
    store: StoreDir = _STORE,
    manifests: Folders = None,
    variant: VariantChoice = Variant.CPU,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    overlay: Base = None,
    as_json: Json = False,
) -> None:
    """Probe built environments anew: import, compute, certify each kernel per dtype and shape class. Without names: all
    that are built."""
    _end_cleanly_on_sigterm()
    rows = []
    for manifest in _choose(names, manifests):
        try:
            env: Env | EnvError | ConfigError = find(manifest, variant=variant.value, store=store, base=overlay)
        except (EnvError, ConfigError) as exc:
            env = exc
        if isinstance(env, Env) and not env.is_built:
            repair = command("build", env)
            env = EnvError(f"{manifest.name} is not built", env=manifest.name, cause="not built", repair=repair)
        if names or isinstance(env, Env):
            rows.append(_verdict(manifest, env, timeout))
    _report(rows, as_json)


@app.command()
def lock(
    names: Names = None,
    manifests: Folders = None,
    variant: Annotated[Variant | None, typer.Option("--variant", help="Default: all of the manifest's.")] = None,
    as_json: Json = False,
) -> None:
    """Resolve requirements afresh and write the locks. Needs uv; downloads metadata only."""
    rows: list[dict[str, Any]] = []
    for manifest in _choose(names, manifests):
        wanted: list[VariantName] = [variant.value] if variant else list(manifest.variants)
        for name in wanted:
            with _failing_cleanly():
                written = write_lock(manifest, name)
            rows.append({"name": manifest.name, "variant": name, "path": str(written.path), "pins": written.pins})
            if as_json:
                continue
            _out.print(f"{written.path}: {len(written.pins)} packages", highlight=False, soft_wrap=True)
    if as_json:
        _print_json(rows)


@app.command()
def gc(store: StoreDir = _STORE, manifests: Folders = None, as_json: Json = False) -> None:
    """Remove environments and code that no manifest asks for and nobody uses."""
    result = collect(store, manifests or ())
    if as_json:
        removed = [{"path": str(item.path), "freed_bytes": item.freed_bytes} for item in result.removed]
        in_use = [str(path) for path in result.in_use]
        typer.echo(json.dumps({"schema": 1, "removed": removed, "in_use": in_use}, indent=1))
        return
    for item in result.removed:
        _out.print(f"removed {item.path} ({_megabytes(item.freed_bytes)})", highlight=False, soft_wrap=True)
    for path in result.in_use:
        _out.print(f"in use, kept: {path}", highlight=False, soft_wrap=True)
    _out.print(f"{result.freed_bytes} bytes freed", highlight=False)


def _end_cleanly_on_sigterm() -> None:
    """As an exception, so that a probe's process and folder go first."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _choose(names: list[str] | None, folders: list[Path] | None) -> list[EnvManifest]:
    found, problems = discover(folders or ())
    for problem in problems:
        _err.print(f"disabled: {problem.message}", style="yellow", markup=False, soft_wrap=True)
    unknown = [name for name in names or () if name not in found]
    if unknown:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; known: {', '.join(sorted(found))}", param_hint="NAME")
    return [found[name] for name in dict.fromkeys(names or found)]


@contextlib.contextmanager
def _failing_cleanly() -> Iterator[None]:
    try:
        yield
    except (EnvError, ConfigError) as exc:
        _err.print(exc.message, style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from exc


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    if not _err.is_terminal:
        yield Lines()
        return
    with Spinners(_err) as spinners:
        yield spinners


def _row(manifest: EnvManifest, variant: VariantName, store: Path, overlay: Path | None) -> dict[str, Any]:
    row: dict[str, Any] = {"name": manifest.name, "summary": manifest.summary, "variants": list(manifest.variants)}
    try:
        env = find(manifest, variant=variant, store=store, base=overlay)
        changed = drift(env)
    except (EnvError, ConfigError) as exc:
        return {**row, "state": "unavailable", "cause": exc.message, "repair": exc.facts.get("repair", "")}
    state = "host" if env.on_host else "built" if env.is_built else "not built"
    record = cached_probe(env, manifest)
    verdict = "" if record is None else "ok" if record.ok else record.kind
    python = manifest.python or "host"
    if env.base is not None:
        state, python = ("overlay" if env.is_built else state), inspect(env.base).python.minor
        row["base"] = str(env.base)
    if changed:
        row |= {"cause": changed, "repair": command("build", env)}
        state = "outdated"
    return {**env.record(), **row, "state": state, "id": env.id, "probe": verdict, "python": python}


def _verdict(manifest: EnvManifest, env: Env | EnvError | ConfigError, timeout_s: float) -> dict[str, Any]:
    if not isinstance(env, Env):
        repair = env.facts.get("repair", f"edit {manifest.path}")
        cause = env.facts.get("cause", env.message)
        return {"name": manifest.name, "ok": False, "stage": "build", "cause": cause, "repair": repair}
    record: ProbeRecord = probe_cached(env, manifest, timeout_s=timeout_s, refresh=True)
    cause = "" if record.ok else f"{record.kind}: {record.message}"
    return {
        "name": env.name,
        "ok": record.ok,
        "stage": "probe",
        "cause": cause,
        "repair": record.repair,
        "id": env.id,
        "prefix": str(env.prefix),
        "size_bytes": env.record().get("size_bytes"),
        "classes": record.counts,  # certified and refused triples of kernel, dtype and shape class
        "probe": record.to_json(),
    }


def _report(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        _print_json(rows)
    else:
        table = Table("environment", "result", "certified", "refused", "size", "probe", box=None)
        for row in rows:
            seconds = f"{row['probe']['seconds']:.1f} s" if "probe" in row else ""
            result = "ok" if row["ok"] else f"{row['stage']} failed"
            counts = [f"{n:,}" if "probe" in row else "" for n in row.get("classes", (0, 0))]
            table.add_row(row["name"], result, *counts, _megabytes(row.get("size_bytes")), seconds)
        _out.print(table)
        for failure in (failure for row in rows if "probe" in row for failure in row["probe"]["failures"]):
            subject = f"{failure['kernel_id']} in {failure['dtype']}, class {failure['shape_class']}"
            text = f"not certified: {subject}: {failure['detail']} (case {failure['case']!r})"
            _out.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
        for row in (row for row in rows if not row["ok"]):
            text = f"{row['name']}: {row['cause']}\n  repair: {row['repair']}"
            _out.print(text, markup=False, highlight=False, soft_wrap=True)
    if not all(row["ok"] for row in rows):
        raise typer.Exit(1)


def _print_json(rows: object) -> None:
    typer.echo(json.dumps({"schema": 1, "environments": rows}, indent=1))


def _megabytes(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e6:.1f} MB"


if __name__ == "__main__":
    app(prog_name="python -m layerzero.envs")
