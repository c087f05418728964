"""`lz env export` and `lz env import`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from layerzero.envs.cli import add_cli
from layerzero.envs.cli.options import (
    STORE,
    Folders,
    Json,
    Minor,
    StoreDir,
    Timeout,
    Variant,
    VariantChoice,
    WheelhouseDir,
)
from layerzero.envs.cli.rows import (
    choose,
    end_cleanly_on_sigterm,
    err,
    fail_on,
    failing_cleanly,
    megabytes,
    out,
    print_json,
    report,
    showing_progress,
    verdict,
)
from layerzero.envs.probe.probe import DEFAULT_TIMEOUT_S, probe_cached
from layerzero.envs.transfer import transfer


def export(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The environment.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What to write, for one NAME.tar.gz.", dir_okay=False)],
    store: StoreDir = STORE,
    manifests: Folders = None,
    variant: VariantChoice = Variant.CPU,
    python: Minor = None,
    wheelhouse: WheelhouseDir = None,
    as_json: Json = False,
) -> None:
    """Put an environment's manifest, lock, wheels and certificate into one file, for a machine without a network."""
    end_cleanly_on_sigterm()
    chosen, refused, _ = choose([name], manifests, python, add_cli.site(ctx, store, manifests))
    fail_on(refused)
    [manifest] = chosen
    with failing_cleanly(), showing_progress() as progress:
        made = transfer.export(
            manifest,
            file,
            store=store,
            variant=manifest.variant_for(variant.value),
            wheelhouse=wheelhouse,
            progress=progress,
        )
    wheels, has = made.index.named("wheels"), bool(made.index.named("probe"))
    if as_json:
        row = {"name": name, "path": str(file), "nbytes": made.nbytes, "sha256": made.sha256}
        print_json([{**row, "wheels": len(wheels), "certificate": has, "python": made.index.python}])
        return
    what = f"{len(wheels)} wheels for Python {made.index.minor} on {made.index.platform}"
    text = f"{file}: {what}, {megabytes(made.nbytes)}, {'with its certificate' if has else 'no certificate'}"
    out.print(f"{text}\nsha256: {made.sha256}", markup=False, highlight=False, soft_wrap=True)


def import_(
    ctx: typer.Context,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="What lz env export wrote.", exists=True, dir_okay=False)
    ],
    store: StoreDir = STORE,
    manifests: Folders = None,
    into: Annotated[
        Path | None,
        typer.Option(
            "--into",
            metavar="DIR",
            file_okay=False,
            help="Where manifest, provider and descriptor go of an environment that this installation does not have.",
        ),
    ] = None,
    sha256: Annotated[str | None, typer.Option("--sha256", help="What the file must have.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Build again even if it is there.")] = False,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    as_json: Json = False,
) -> None:
    """Check a file of lz env export, build its environment without a network, and probe it here."""
    if sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise typer.BadParameter(f"{sha256!r} is no SHA-256: 64 hexadecimal digits", param_hint="--sha256")
    end_cleanly_on_sigterm()
    known = [*(manifests or []), *add_cli.site(ctx, store, manifests).usable()]
    with failing_cleanly(), showing_progress() as progress:
        made = transfer.import_(
            file, store=store, folders=known, into=into, sha256=sha256, progress=progress, force=force
        )
    row = verdict(made.manifest, made.env, timeout)
    lost = []
    if made.certificate is not None:
        lost = transfer.lost(made.certificate, probe_cached(made.env, made.manifest, timeout_s=timeout))
    row["certified_there_only"] = lost
    for subject in lost:
        err.print(f"certified where it was exported, not here: {subject}", style="yellow", markup=False, soft_wrap=True)
    if into is not None:
        err.print(f"its manifest is in {into}: add that to LAYERZERO_MANIFEST_DIRS", markup=False, soft_wrap=True)
    report([row], as_json)
