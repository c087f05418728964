"""`lz lift`: lifted calls for machines that do not have their library. Works on files, with a broker or without."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerzero.client.cli.options import Json, Keys

if TYPE_CHECKING:
    from layerzero.envs.lifted.imports import Imports

lift_app = typer.Typer(help="Carry lifted calls to machines that do not have their library.", no_args_is_help=True)
_READ_AT_START = "a broker that runs reads it when it starts: lz down"
_Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Of lifted calls.", file_okay=False)]
_Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the import: lz lift list.")]


def _imports() -> Imports:
    from layerzero.broker.configuration import settings
    from layerzero.envs.lifted.imports import Imports

    return Imports(settings.load().store)


@lift_app.command("key")
def key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where the private key is to be.", dir_okay=False)],
    as_json: Json = False,
) -> None:
    """Make a key that signs exports: FILE, of mode 0600, and FILE.pub for those who trust it."""
    from layerzero.client.cli.output import out, print_json
    from layerzero.envs import signing

    fingerprint = signing.make(file)
    public = signing.public_path(file)
    if as_json:
        print_json({"file": str(file), "public": str(public), "fingerprint": fingerprint})
    else:
        out().print(f"{file}: a new key, mode 0600; give {public} to those who import ({fingerprint})", soft_wrap=True)


@lift_app.command("trust")
def trust(
    file: Annotated[Path, typer.Argument(metavar="FILE.pub", help="A public key of lz lift key.", dir_okay=False)],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="What to call whoever has the private key.")],
    folder: Keys = None,
    as_json: Json = False,
) -> None:
    """Import what this key has signed from now on."""
    from layerzero.client.cli import keys
    from layerzero.client.cli.output import out, print_json
    from layerzero.envs import signing

    fingerprint = signing.trust(keys.where(folder), name, file)
    if as_json:
        print_json({"name": name, "fingerprint": fingerprint})
    else:
        out().print(f"{name} is trusted ({fingerprint})", soft_wrap=True)


@lift_app.command("distrust")
def distrust(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As it was given to lz lift trust.")],
    folder: Keys = None,
    as_json: Json = False,
) -> None:
    """Import nothing more that this key has signed. What was imported stays: lz lift remove."""
    from layerzero.client.cli import keys
    from layerzero.client.cli.output import FAILED, out, print_json
    from layerzero.envs import signing

    was_trusted = signing.distrust(keys.where(folder), name)
    if as_json:
        print_json({"name": name, "was_trusted": was_trusted})
    else:
        out().print(f"{name} is trusted no more" if was_trusted else f"{name} was not trusted", soft_wrap=True)
    raise typer.Exit(0 if was_trusted else FAILED)


@lift_app.command("export")
def export(
    folder: _Folder,
    key_file: Annotated[
        Path | None, typer.Option("--key", metavar="FILE", help="Sign with this key (lz lift key).", dir_okay=False)
    ] = None,
    unsigned: Annotated[bool, typer.Option("--unsigned", help="Sign nothing; who imports must allow that.")] = False,
    backend: Annotated[
        list[str] | None, typer.Option("--backend", "-b", metavar="NAME", help="Only these; may be repeated.")
    ] = None,
    kernel: Annotated[
        list[str] | None, typer.Option("--kernel", "-k", metavar="ID", help="Only these; may be repeated.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write lifted calls with their machine code, and all that a machine without their library needs to serve them."""
    from layerzero.broker.configuration import settings
    from layerzero.broker.lifting.export import collect
    from layerzero.broker.processes.cuda_driver import detect_gpus
    from layerzero.client.cli.output import out, print_json
    from layerzero.envs import signing
    from layerzero.envs.lifted import folder as folders
    from layerzero.ipc.wording import counted

    if (key_file is None) != unsigned:
        raise typer.BadParameter("one of --key FILE and --unsigned is needed", param_hint="--key")
    secret = None if key_file is None else signing.read_private(key_file)
    collected = collect(settings.load(), detect_gpus(), backend or (), kernel or ())
    manifest = folders.write(folder, collected.contents(), secret)
    facts = {
        "folder": str(folder),
        "signer": manifest.signer or None,
        "calls": len(collected.calls),
        "backends": sorted(collected.backends),
        "bytes": manifest.nbytes,
        "left_out": dict(collected.left_out),
    }
    if as_json:
        print_json(facts)
        return
    by = f"signed by {manifest.signer}" if manifest.signer else "unsigned"
    what = f"{counted(len(collected.calls), 'lifted call')} of {', '.join(sorted(collected.backends))}"
    out().print(f"{folder}: {what}, {manifest.nbytes / 1e6:,.1f} MB, {by}", soft_wrap=True)
    for why, count in collected.left_out.items():
        out().print(f"left out: {count} that {why}", soft_wrap=True)


@lift_app.command("import")
def import_(
    folder: _Folder,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Of the import; the folder's, if left out.")
    ] = None,
    unsigned: Annotated[
        bool, typer.Option("--allow-unsigned", help="Take a folder without a signature: you know whose it is.")
    ] = False,
    keys_folder: Keys = None,
    as_json: Json = False,
) -> None:
    """Take over a folder of lifted calls, or nothing of it. One that is there under its name is replaced."""
    from layerzero.client.cli import keys
    from layerzero.client.cli.output import out, print_json
    from layerzero.envs.lifted.folder import open_folder
    from layerzero.ipc.wording import counted

    opened = open_folder(folder, keys.where(keys_folder), allows_unsigned=unsigned)
    made = _imports().install(opened, name or folder.resolve().name.lower())
    facts = {
        "name": made.name,
        "signer": made.signer or None,
        "backends": {backend: len(made.calls_of(backend)) for backend in made.backends},
    }
    if as_json:
        print_json(facts)
        return
    by = f"signed by {made.signer}" if made.signer else "UNSIGNED, as --allow-unsigned allows"
    what = ", ".join(f"{counted(len(made.calls_of(one)), 'lifted call')} of {one}" for one in made.backends)
    out().print(f"{made.name}: {what}, {by}; {_READ_AT_START}", soft_wrap=True)


@lift_app.command("list")
def show(keys_folder: Keys = None, as_json: Json = False) -> None:
    """Print what was imported, and whose signatures are trusted."""
    from layerzero.client.cli import keys
    from layerzero.client.cli.output import out, print_json
    from layerzero.envs import signing
    from layerzero.ipc.wording import counted

    found, problems = _imports().all()
    place = keys.where(keys_folder)
    has_signers = any((place / "signers").glob("*.pub"))  # who trusts nobody needs no library for it
    trusted = {one: signing.fingerprint(k) for one, k in signing.trusted(place).items()} if has_signers else {}
    rows = [
        {
            "name": one.name,
            "signer": one.signer or None,
            "imported_s": one.imported_s,
            "backends": {backend: len(one.calls_of(backend)) for backend in one.backends},
        }
        for one in found
    ]
    if as_json:
        print_json({"imports": rows, "trusted": trusted, "problems": problems})
        return
    for one in found:
        what = ", ".join(f"{counted(len(one.calls_of(name)), 'lifted call')} of {name}" for name in one.backends)
        by = f"signed by {one.signer}" if one.signer else "unsigned"
        hours = (time.time() - one.imported_s) / 3600
        out().print(f"{one.name}: {what}, {by}, imported {hours:,.1f} h ago", soft_wrap=True)
    for text in [*([] if found else ["nothing was imported"]), *problems]:
        out().print(text, soft_wrap=True)
    for one_name, fingerprint in trusted.items():
        out().print(f"trusted: {one_name} ({fingerprint})", soft_wrap=True)


@lift_app.command("remove")
def remove(name: _Name, as_json: Json = False) -> None:
    """Remove an import. Exit code 1 when there is none of that name."""
    from layerzero.client.cli.output import FAILED, out, print_json

    was_there = _imports().remove(name)
    if as_json:
        print_json({"name": name, "removed": was_there})
    else:
        text = f"removed {name}; {_READ_AT_START}" if was_there else f"no import is called {name!r}; lz lift list"
        out().print(text, soft_wrap=True, markup=False)
    raise typer.Exit(0 if was_there else FAILED)
