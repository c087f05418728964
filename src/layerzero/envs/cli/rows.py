"""What `lz env` shows of environments, as rows of a table or of JSON. Data on stdout, progress on stderr."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from layerzero.capabilities.descriptor import Capability, DescriptorError
from layerzero.capabilities.device import DeviceSpec
from layerzero.capabilities.profiles import ALL, Profile
from layerzero.envs import accelerators
from layerzero.envs.build.base import inspect
from layerzero.envs.build.build import base_drift, command, drift, find
from layerzero.envs.build.downloads import Downloads, of_lock, of_wheels
from layerzero.envs.build.env import Env
from layerzero.envs.build.existing import look
from layerzero.envs.build.installers import Installer
from layerzero.envs.build.interpreters import find as find_python
from layerzero.envs.build.lock import find_lock, read_lock
from layerzero.envs.build.progress import Lines, Progress
from layerzero.envs.build.resolution import resolve, select
from layerzero.envs.build.wheelhouse import Wheelhouse
from layerzero.envs.cli.additions import Site
from layerzero.envs.cli.spinners import Spinners
from layerzero.envs.descriptors import read_all
from layerzero.envs.hub.lock import HubLock
from layerzero.envs.hub.lock import read as read_hub_lock
from layerzero.envs.lifted.imports import Imports
from layerzero.envs.manifest import EnvManifest, VariantName, discover
from layerzero.envs.probe.probe import cached_probe, probe_cached
from layerzero.ipc.errors import ConfigError, EnvError
from layerzero.ipc.wording import counted

_CLASSES = 2  # named of each refusal; --json has all
out = Console()
err = Console(stderr=True)


NOTHING = "null"  # the descriptor of environments that serve nothing
NOT_RUN = "not run"  # the state of a backend without a certificate on any machine of this project, and on this one


class Chosen(NamedTuple):
    """The manifests that a command is for, and rows of the report for those whose descriptors no broker would take.
    `claims`: what the others' kernels can do, by name."""

    manifests: list[EnvManifest]
    refused: list[dict[str, Any]]
    claims: Mapping[str, Capability]


def choose(
    names: list[str] | None,
    folders: list[Path] | None,
    python: str | None = None,
    site: Site | None = None,
    *,
    takes_programs: bool = False,
) -> Chosen:
    """The manifests of those names, or all that may be built; for another Python than their first choice. With `site`
    those from outside, too; with `takes_programs` those of programs, which serve nothing."""
    found, problems = discover(folders or ()) if site is None else site.discover()
    for problem in problems:
        err.print(f"disabled: {problem.message}", style="yellow", markup=False, soft_wrap=True)
    unknown = [name for name in names or () if name not in found]
    if unknown:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; known: {', '.join(sorted(found))}", param_hint="NAME")
    wanted = {name: found[name] for name in names or (n for n, one in found.items() if one.is_allowed)}
    claims, errors = read_all(found)
    if takes_programs:
        errors = {name: error for name, error in errors.items() if found[name].descriptor != NOTHING}
    refused = [refused_row(errors[name], one) for name, one in wanted.items() if name in errors]
    chosen = [one for name, one in wanted.items() if name not in errors]
    if python is None:
        return Chosen(chosen, refused, claims)
    try:
        chosen = [one.with_python(python) for one in chosen if names or python in one.pythons]
        return Chosen(chosen, refused, claims)
    except ConfigError as exc:
        raise typer.BadParameter(exc.message, param_hint="--python") from exc


def lacking(chosen: Chosen) -> dict[str, EnvError]:
    """Those that are for AMD's or Intel's GPUs or Gaudi cards, where this machine has none: nothing of them is
    downloaded or probed."""
    devices = accelerators.detect()
    told = {one.name: accelerators.lacks(chosen.claims[one.name].platform, devices) for one in chosen.manifests}
    repair = "a machine that has one; --no-probe builds an image for it"
    return {name: EnvError(f"{name} {why}", env=name, cause=why, repair=repair) for name, why in told.items() if why}


def refused_row(error: DescriptorError, manifest: EnvManifest) -> dict[str, Any]:
    """Of the report and of the list."""
    cause, repair = error.message, f"mend {manifest.descriptor_path}"
    return {
        "name": manifest.name,
        "ok": False,
        "stage": "descriptor",
        "state": "refused",
        "cause": cause,
        "repair": repair,
    }


def fail_on(refused: Sequence[Mapping[str, Any]]) -> None:
    """Exits with 1 when there is one, for a command that cannot go on with the others."""
    for row in refused:
        err.print(row["cause"], style="red", markup=False, soft_wrap=True)
    if refused:
        raise typer.Exit(1)


def end_cleanly_on_sigterm() -> None:
    """As an exception, so that processes and folders of this command go first."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextlib.contextmanager
def failing_cleanly() -> Iterator[None]:
    try:
        yield
    except (EnvError, ConfigError) as exc:
        err.print(exc.message, style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from exc


@contextlib.contextmanager
def showing_progress() -> Iterator[Progress]:
    if not err.is_terminal:
        yield Lines()
        return
    with Spinners(err) as spinners:
        yield spinners


def row_of(
    manifest: EnvManifest, variant: VariantName, store: Path, overlay: Path | None, profile: Profile = ALL
) -> dict[str, Any]:
    row: dict[str, Any] = {"name": manifest.name, "summary": manifest.summary, "variants": list(manifest.variants)}
    if manifest.source is not None:
        row |= {"origin": manifest.source.origin, "sha256": manifest.source.sha256}
        if not manifest.is_allowed:
            cause, repair = manifest.source.refusal, manifest.source.repair
            return {**row, "state": "refused", "cause": f"{cause}; repair: {repair}", "repair": repair}
    if manifest.variants and manifest.variant_for(variant) not in manifest.variants:
        made = ", ".join(manifest.variants)
        repair = f"lz env build {manifest.name} --variant {next(iter(manifest.variants))}"
        return {**row, "state": "other variant", "cause": f"made for {made}, which need a GPU", "repair": repair}
    try:
        env = find(manifest, variant=variant, store=store, base=overlay)
        changed = drift(env)
    except (EnvError, ConfigError) as exc:
        return {**row, "state": "unavailable", "cause": exc.message, "repair": exc.facts.get("repair", "")}
    state = "host" if env.on_host else "built" if env.is_built else "not built"
    record = cached_probe(env, manifest, profile)
    said = "" if record is None else "ok" if record.ok else record.kind
    python = env.other_python or manifest.python or "host"
    if env.base is not None:
        state, python = ("overlay" if env.is_built else state), inspect(env.base).python.minor
        row["base"] = str(env.base)
    if env.existing is not None:
        found = look(env.existing)
        state, python = ("existing" if env.is_built else state), found.base.python.minor
        row["interpreter"] = str(found.path)
    if record is not None and not record.ok:
        row |= {"cause": record.cause, "repair": record.repair}
    if changed:
        row |= {"cause": changed, "repair": command("build", env)}
        state = "outdated" if base_drift(env) else "changed"
    return {**env.record(), **row, "state": state, "id": env.id, "probe": said, "python": python}


def with_never_run(rows: Sequence[dict[str, Any]], claims: Mapping[str, Capability]) -> list[dict[str, Any]]:
    """The rows, of which those of backends that no machine of this project has run say so, unless their probe has
    passed here."""
    devices = accelerators.detect()
    return [never_run(row, claims[row["name"]], devices) if row["name"] in claims else row for row in rows]


def never_run(row: dict[str, Any], claim: Capability, devices: tuple[DeviceSpec, ...]) -> dict[str, Any]:
    """As `with_never_run`, of one."""
    if not claim.not_run or row.get("probe") == "ok" or row["state"] in ("refused", "imported"):
        return row
    why = accelerators.lacks(claim.platform, devices)
    cause = why or row.get("cause") or ("its probe has not passed" if row["state"] == "built" else row["state"])
    return {**row, "state": NOT_RUN, "cause": f"by no machine of this project; this one: {cause}"}


def with_imports(rows: Sequence[dict[str, Any]], store: Path) -> list[dict[str, Any]]:
    """The list, with what imported lifted calls serve in the place of environments that are not here."""
    found, _ = Imports(store).all()
    counts = {name: len(one.calls_of(name)) for one in reversed(found) for name in one.backends}
    told = []
    for row in rows:
        count = counts.pop(row["name"], 0)
        if count and row["state"] in ("not built", "other variant", "unavailable"):
            said = f"imported, {counted(count, 'lifted call')}"
            cause = f"{said}; {row.get('cause') or 'not built'}"
            told.append({**row, "state": "imported", "cause": cause, "imported": count})
        else:
            told.append(row)
    told += [
        {"name": name, "state": "imported", "summary": f"imported, {counted(count, 'lifted call')}", "imported": count}
        for name, count in sorted(counts.items())
    ]
    return told


def show_plans(
    chosen: Sequence[EnvManifest],
    variant: VariantName,
    store: Path,
    installer: Installer,
    overlay: Path | None,
    wheelhouse: Path | None,
    jobs: int,
    *,
    lacks: Mapping[str, EnvError],
    as_json: bool,
) -> None:
    """What `build` would do, and what it would download. `lacks`: those for which the machine has no device. Exits with
    1 where one cannot be built."""

    def plan_of(manifest: EnvManifest) -> dict[str, Any]:
        try:
            if manifest.name in lacks:
                raise lacks[manifest.name]
            own = manifest.variant_for(variant)
            env = find(manifest, variant=own, store=store, base=overlay, wheelhouse=wheelhouse)
            if env.on_host or (env.is_built and not drift(env)):
                return {"name": manifest.name, "state": "host" if env.on_host else "built", "text": "nothing to do"}
            if env.existing is not None:
                wanting = ", ".join(asked for asked, _ in look(env.existing).lacks)
                text = f"used as it is; put beside it: {wanting}" if wanting else "used as it is, nothing is downloaded"
                return {"name": manifest.name, "state": "to build", "text": text}
            planned = _downloads(manifest, own, installer, overlay, wheelhouse)
            kernels = read_hub_lock(manifest, own)
        except (EnvError, ConfigError) as exc:
            return {"name": manifest.name, "state": "unavailable", "text": exc.message}
        return {
            "name": manifest.name,
            "state": "to build",
            "text": str(planned) if kernels is None else f"{planned}\n{_told(kernels)}",
            "wheels": planned.wheels,
            "download": dict(planned.sizes),
            "download_bytes": planned.nbytes,
            "problem": planned.problem,
        }

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        rows = list(pool.map(plan_of, chosen))
    total = sum(row.get("download_bytes", 0) for row in rows)
    if as_json:
        print_json(rows)
    else:
        table = Table("environment", "state", "wheels", box=None)
        for row in rows:
            table.add_row(row["name"], row["state"], escape(row["text"]))
        out.print(table)
        free = shutil.disk_usage(next(path for path in (store, *store.absolute().parents) if path.exists())).free
        text = f"to download: {megabytes(total)} in all; free in {store}: {megabytes(free)}"
        out.print(text, markup=False, highlight=False, soft_wrap=True)
    if any(row["state"] == "unavailable" for row in rows):
        raise typer.Exit(1)


def _told(kernels: HubLock) -> str:
    files = counted(len(kernels.content.files), "file")
    return f"and {files} of the hub's {kernels}, {megabytes(kernels.nbytes)}"


def _downloads(
    manifest: EnvManifest, variant: VariantName, installer: Installer, overlay: Path | None, wheelhouse: Path | None
) -> Downloads:
    if overlay is not None:
        wanted, without = manifest.requirements(variant), manifest.variants[variant].without
        house, lock = Wheelhouse(wheelhouse), find_lock(manifest, variant)
        return of_wheels(resolve(manifest.name, wanted, inspect(overlay), house, lock=lock, without=without))
    lock, python = read_lock(manifest, variant), find_python(str(manifest.python), manifest.name)
    if wheelhouse is not None:
        return of_wheels(select(manifest.name, lock, inspect(python.path), Wheelhouse(wheelhouse)))
    return of_lock(lock, python, installer)


def verdict(
    manifest: EnvManifest,
    env: Env | EnvError | ConfigError,
    timeout_s: float | None,
    *,
    verify: bool = False,
    is_anew: bool = True,
    profile: Profile = ALL,
) -> dict[str, Any]:
    """A row of the report; without `timeout_s` of the build alone. `is_anew`: probe although a verdict that it is in
    order is known of exactly this environment, code and machine."""
    if not isinstance(env, Env):
        repair = env.facts.get("repair", f"edit {manifest.path}")
        cause = env.facts.get("cause", env.message)
        return {"name": manifest.name, "ok": False, "stage": "build", "cause": cause, "repair": repair}
    size = env.record().get("size_bytes")
    if timeout_s is None:
        made = {"name": env.name, "ok": True, "stage": "build", "cause": "", "repair": ""}
        return {**made, "id": env.id, "prefix": str(env.prefix), "size_bytes": size}
    # Of our own interpreter nothing says what else is installed there.
    kept = None if is_anew or env.on_host else cached_probe(env, manifest, profile)
    is_kept = kept is not None and kept.ok
    record = probe_cached(env, manifest, timeout_s=timeout_s, refresh=not is_kept, verify=verify, profile=profile)
    return {
        "name": env.name,
        "ok": record.ok,
        "stage": "probe",
        "cause": record.cause,
        "repair": record.repair,
        "id": env.id,
        "prefix": str(env.prefix),
        "size_bytes": size,
        "classes": record.counts,  # certified and refused triples of kernel, dtype and shape class
        "probe": record.to_json(),
        "probe_is_kept": is_kept,
    }


def report(rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(rows)
    else:
        table = Table("environment", "result", "certified", "refused", "size", "probe", box=None)
        for row in rows:
            seconds = f"{row['probe']['seconds']:.1f} s" if "probe" in row else ""
            if row.get("probe_is_kept"):
                seconds = "unchanged"
            result = "ok" if row["ok"] else f"{row['stage']} failed"
            counts = [f"{n:,}" if "probe" in row else "" for n in row.get("classes", (0, 0))]
            table.add_row(row["name"], result, *counts, megabytes(row.get("size_bytes")), seconds)
        out.print(table)
        for text in (text for row in rows if "probe" in row for text in refusals(row["probe"]["failures"])):
            out.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
        if profiles := {row["probe"]["profile"] for row in rows if "probe" in row} - {""}:
            text = f"profile {', '.join(profiles)}: no calls but its are probed and served; lz profile show"
            err.print(text, style="dim", highlight=False)
        if any(row.get("probe_is_kept") for row in rows):
            err.print("unchanged: as its last probe said; lz env probe does it anew", style="dim", highlight=False)
        for row in (row for row in rows if not row["ok"]):
            text = f"{row['name']}: {row['cause']}\n  repair: {row['repair']}"
            out.print(text, markup=False, highlight=False, soft_wrap=True)
    if not all(row["ok"] for row in rows):
        raise typer.Exit(1)


def refusals(failures: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each kernel and cause: the dtypes and classes that are not certified, and the worst case."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for one in failures:
        cause = re.sub(r"\d[\d.,e+-]*|inf|nan", "N", one["detail"].replace(f"{one['case']}: ", ""))
        groups.setdefault((one["kernel_id"], cause), []).append(one)
    for (kernel_id, cause), group in groups.items():
        worst = max(group, key=lambda one: float(one["error"]))
        dtypes = ", ".join(dict.fromkeys(one["dtype"] for one in group))
        classes = list(dict.fromkeys(one["shape_class"] for one in group))
        named = ", ".join(classes[:_CLASSES])
        memory = ", ".join(sorted({name.rpartition("/")[2] for name in classes}))
        more = f" and {len(classes) - _CLASSES:,} more classes, of {memory} memory" if len(classes) > _CLASSES else ""
        hint = "; does it need requires_contiguous?" if "wrote between the elements" in cause else ""
        detail = worst["detail"].replace(f"{worst['case']}: ", "")
        yield f"not certified: {kernel_id} in {dtypes}, {named}{more}: {detail} (case {worst['case']!r}){hint}"


def print_json(rows: object) -> None:
    typer.echo(json.dumps({"schema": 1, "environments": rows}, indent=1))


def megabytes(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e6:.1f} MB"
