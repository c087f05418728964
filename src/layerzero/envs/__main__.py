"""`lz env`: list, build, probe, lock, gc, add, remove, export and import. Data on stdout, progress on stderr.

client/cli/env.py runs it: who does gives a LoadSite (envs/cli/additions.py) as the context's `obj`.

Exit codes: 0 done, 1 a build, probe or lock failed, 2 wrong usage.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from layerzero.capabilities.profiles import ALL
from layerzero.envs import functions, profiles, signing
from layerzero.envs.build.build import command, find
from layerzero.envs.build.env import Env
from layerzero.envs.build.installers import pick
from layerzero.envs.build.lock import is_in_a_package
from layerzero.envs.build.lock import lock as write_lock
from layerzero.envs.build.several import ensure_all
from layerzero.envs.cli import add_cli, locking, transfer_cli
from layerzero.envs.cli.options import (
    STORE,
    Base,
    Folders,
    HubFolder,
    InstallerChoice,
    Json,
    Minor,
    Names,
    ProfileName,
    StoreDir,
    Timeout,
    Variant,
    VariantChoice,
    WheelhouseDir,
)
from layerzero.envs.cli.rows import (
    NOT_RUN,
    choose,
    end_cleanly_on_sigterm,
    err,
    fail_on,
    failing_cleanly,
    lacking,
    megabytes,
    out,
    print_json,
    refused_row,
    report,
    row_of,
    show_plans,
    showing_progress,
    verdict,
    with_imports,
    with_never_run,
)
from layerzero.envs.descriptors import read_all
from layerzero.envs.hub import lock as hub_lock
from layerzero.envs.hub.placing import KEYS, HubAccess
from layerzero.envs.hub.repository import Repository
from layerzero.envs.manifest import EnvManifest, VariantName
from layerzero.envs.probe.probe import DEFAULT_TIMEOUT_S
from layerzero.envs.transfer.gc import collect
from layerzero.ipc.errors import ConfigError, EnvError

app = typer.Typer(
    help="Backend environments: list, build, probe, lock, gc, add, remove, export, import.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("add")(add_cli.add)
app.command("remove")(add_cli.remove)
app.command("export")(transfer_cli.export)
app.command("import")(transfer_cli.import_)


@app.command("list")
def list_(
    ctx: typer.Context,
    store: StoreDir = STORE,
    manifests: Folders = None,
    variant: VariantChoice = Variant.CPU,
    overlay: Base = None,
    profile: ProfileName = ALL.name,
    shows_all: Annotated[bool, typer.Option("--all", help="Those that are not made for the variant, too.")] = False,
    as_json: Json = False,
) -> None:
    """Show every environment: built or not, over which interpreter, and what its last probe said."""
    with failing_cleanly():
        wanted = profiles.read(profile, store)
    found, problems = add_cli.site(ctx, store, manifests).discover()
    claims, refused = read_all(found)
    rows = [
        row_of(manifest, variant.value, store, overlay, wanted)
        | (refused_row(refused[name], manifest) if name in refused else {})
        for name, manifest in found.items()
    ]
    rows += [{"name": p.name, "state": "disabled", "cause": p.message, "repair": f"edit {p.path}"} for p in problems]
    rows = with_never_run(with_imports(rows, store), claims)
    if as_json:
        print_json(rows)
        return
    others = [] if shows_all else [row for row in rows if row["state"] in ("other variant", NOT_RUN)]
    table = Table("environment", "state", "python", "size", "probe", "about", box=None)
    for row in (row for row in rows if row not in others):
        size, about = megabytes(row.get("size_bytes")), row.get("cause") or row["summary"]
        table.add_row(row["name"], row["state"], row.get("python", ""), size, row.get("probe", ""), escape(about))
    for column in table.columns[:-1]:
        column.no_wrap = True
    out.print(table)
    told = {
        "other variant": f"not made for the variant {variant.value}, --all shows for which",
        NOT_RUN: "not run by this project on any machine, nor on this one, --all shows why",
    }
    for state, text in told.items():
        if names := ", ".join(row["name"] for row in others if row["state"] == state):
            out.print(f"{text}: {names}", markup=False, highlight=False)
    if overlay is not None:
        out.print(f"overlay: over {overlay}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An environment of functions, also in short.")],
    store: StoreDir = STORE,
    as_json: Json = False,
) -> None:
    """Show what a program has declared with lz.env: what it requires, its lock, whether it is built, and why it cannot
    be in the interpreter of this command."""
    locking.show(name, store, as_json=as_json)


@app.command()
def build(
    ctx: typer.Context,
    names: Names = None,
    store: StoreDir = STORE,
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
    python: Minor = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only tell what is built, what is cached and what would be downloaded.")
    ] = False,
    profile: ProfileName = ALL.name,
    no_probe: Annotated[
        bool, typer.Option("--no-probe", help="Build only: for an image that will run where the accelerator is.")
    ] = False,
    hub_folder: HubFolder = None,
    unsigned: Annotated[
        bool, typer.Option("--allow-unsigned", help="Take kernels of the hub that nobody has signed: you know whose.")
    ] = False,
    keys: Annotated[
        Path, typer.Option("--keys", envvar="LAYERZERO_KEYS", help="The folder of the keys that are trusted.")
    ] = KEYS,
    as_json: Json = False,
) -> None:
    """Build environments from their locks, then probe them. With --overlay: a few wheels over an interpreter that has
    a heavy stack already."""
    end_cleanly_on_sigterm()
    with failing_cleanly():
        wanted = profiles.read(profile, store)
    if offline and wheelhouse is None and overlay is None:
        raise typer.BadParameter("needs --wheelhouse DIR, --overlay PYTHON or both", param_hint="--offline")
    known = add_cli.site(ctx, store, manifests)
    names = add_cli.versions_of(names, known, variant)
    choice = choose(names, manifests, python, known)
    refused = choice.refused
    chosen = [
        manifest
        for manifest in choice.manifests
        if names
        or manifest.interpreter == "host"
        or (manifest.variant_for(variant.value) in manifest.variants and not choice.claims[manifest.name].not_run)
    ]
    lacks = {} if no_probe else lacking(choice._replace(manifests=chosen))
    with failing_cleanly():
        tool = pick(installer.value if installer else None)
    if dry_run:
        show_plans(chosen, variant.value, store, tool, overlay, wheelhouse, jobs, lacks=lacks, as_json=as_json)
        return
    with showing_progress() as progress:
        for manifest in filter(functions.is_ours, chosen):
            with failing_cleanly():
                functions.lock_where_missing(manifest, progress)
        built = lacks | ensure_all(
            [manifest for manifest in chosen if manifest.name not in lacks],
            store=store,
            variant=variant.value,
            installer=tool,
            progress=progress,
            force=force,
            jobs=jobs,
            base=overlay,
            wheelhouse=wheelhouse,
            hub=HubAccess(_repository(chosen, refused, hub_folder), keys, unsigned),
        )
    limit_s = None if no_probe else timeout
    rows = [verdict(m, built[m.name], limit_s, is_anew=force, profile=wanted) for m in chosen]
    report([*rows, *refused], as_json)


@app.command()
def probe(
    ctx: typer.Context,
    names: Names = None,
    store: StoreDir = STORE,
    manifests: Folders = None,
    variant: VariantChoice = Variant.CPU,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    overlay: Base = None,
    python: Minor = None,
    profile: ProfileName = ALL.name,
    verify: Annotated[bool, typer.Option("--verify", help="Hash every file: has it changed since the build?")] = False,
    as_json: Json = False,
) -> None:
    """Probe built environments anew: import, compute, certify each kernel per dtype and shape class. Without names: all
    that are built."""
    end_cleanly_on_sigterm()
    with failing_cleanly():
        wanted = profiles.read(profile, store)
    rows = []
    chosen, refused, _ = choose(names, manifests, python, add_cli.site(ctx, store, manifests))
    for manifest in chosen:
        try:
            env: Env | EnvError | ConfigError = find(manifest, variant=variant.value, store=store, base=overlay)
        except (EnvError, ConfigError) as exc:
            env = exc
        if isinstance(env, Env) and not env.is_built:
            repair = command("build", env)
            env = EnvError(f"{manifest.name} is not built", env=manifest.name, cause="not built", repair=repair)
        if names or isinstance(env, Env):
            rows.append(verdict(manifest, env, timeout, verify=verify, profile=wanted))
    report([*rows, *refused], as_json)


@app.command()
def lock(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME|FILE]...",
            help="Environments, all of LayerZero's if left out; or what a program is declared by: requirements.txt, "
            "pyproject.toml, a script, a lock file.",
        ),
    ] = None,
    store: StoreDir = STORE,
    manifests: Folders = None,
    variant: Annotated[Variant | None, typer.Option("--variant", help="Default: all of the manifest's.")] = None,
    python: Minor = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="LOCK", help="Of a file; default: STEM.lock.txt beside it.")
    ] = None,
    extras: Annotated[list[str] | None, typer.Option("--extra", help="Of a pyproject.toml, to be locked, too.")] = None,
    hub_folder: HubFolder = None,
    key_file: Annotated[
        Path | None, typer.Option("--key", metavar="FILE", help="Sign the locks of kernels of the hub (lz lift key).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Resolve requirements afresh and write the locks. Needs uv; downloads metadata only, and kernels of the hub."""
    rows: list[dict[str, Any]] = []
    files = [name for name in names or () if os.sep in name or Path(name).exists()]
    if files or output or extras:
        if len(files) != 1 or len(names or ()) != 1:
            raise typer.BadParameter("name one file, and no environment", param_hint="FILE")
        locking.lock_file(Path(files[0]), store, python=python, output=output, extras=extras or (), as_json=as_json)
        return
    with failing_cleanly():
        names = [functions.full_name(name, store) for name in names or ()]
    folders = [*functions.folders(store, manifests or ())] if names else manifests
    chosen, refused, _ = choose(names, folders, python, takes_programs=True)
    fail_on(refused)
    repository = _repository(chosen, refused, hub_folder)
    with failing_cleanly():
        key = None if key_file is None else signing.read_private(key_file)
    for manifest in chosen:
        if manifest.locked_by is not None:
            rows.append(locking.lock_program(manifest, store, as_json=as_json))
            continue
        wanted: list[VariantName] = [variant.value] if variant else list(manifest.variants)
        for name in wanted:
            if is_in_a_package(manifest):
                text = f"{manifest.lock_path(name)} is of the installed package, whose next installation replaces it"
                err.print(f"rewriting a file of LayerZero: {text}", style="yellow", highlight=False, soft_wrap=True)
            with failing_cleanly():
                written = write_lock(manifest, name)
                kernels = hub_lock.write(manifest, name, repository, key)
            rows.append({"name": manifest.name, "variant": name, "path": str(written.path), "pins": written.pins})
            if kernels is not None:
                rows[-1]["hub"] = {"path": str(kernels.path), "revision": kernels.content.revision, "signed": bool(key)}
            if as_json:
                continue
            out.print(f"{written.path}: {len(written.pins)} packages", highlight=False, soft_wrap=True)
            if kernels is not None:
                text = f"{kernels.path}: {len(kernels.content.files)} files of {kernels}"
                out.print(f"{text}, {'signed' if key else 'not signed'}", highlight=False, soft_wrap=True)
    if as_json:
        print_json(rows)


def _repository(chosen: Sequence[EnvManifest], refused: Sequence[Any], folder: Path | None) -> Repository:
    """Where kernels of the hub come from. Exits with 2 where a folder is given and it is not clear for which; the
    report says what is wrong with the `refused`."""
    having = [manifest.name for manifest in chosen if manifest.hub is not None]
    if folder is not None and len(having) != 1 and not refused:
        known = ", ".join(having) or "none of these has kernels of the hub"
        raise typer.BadParameter(f"name one environment with kernels of the hub: {known}", param_hint="--hub-folder")
    return Repository(folder)


@app.command()
def gc(
    ctx: typer.Context,
    store: StoreDir = STORE,
    manifests: Folders = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would be removed.")] = False,
    as_json: Json = False,
) -> None:
    """Remove environments and code that no manifest asks for and nobody uses."""
    copies, undecided = add_cli.site(ctx, store, manifests).wanted()
    result = collect(store, (*(manifests or ()), *copies), undecided, dry_run=dry_run)
    if as_json:
        removed = [{"path": str(item.path), "freed_bytes": item.freed_bytes} for item in result.removed]
        in_use = [str(path) for path in result.in_use]
        answer = {"schema": 1, "dry_run": dry_run, "removed": removed, "in_use": in_use}
        typer.echo(json.dumps(answer, indent=1))
        return
    for item in result.removed:
        verb = "would remove" if dry_run else "removed"
        out.print(f"{verb} {item.path} ({megabytes(item.freed_bytes)})", highlight=False, soft_wrap=True)
    for path in result.in_use:
        out.print(f"in use, kept: {path}", highlight=False, soft_wrap=True)
    end = "would be freed; nothing was removed" if dry_run else "freed"
    out.print(f"{result.freed_bytes} bytes {end}", highlight=False)


if __name__ == "__main__":
    raise SystemExit("run: lz env ..., which knows what policy allows (python -m layerzero.client.cli.app env ...)")
