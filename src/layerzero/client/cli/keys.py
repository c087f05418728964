"""`lz keys`: what those who connect to a broker prove themselves with. Nothing secret is printed."""

from __future__ import annotations

import os
from pathlib import Path

from layerzero.client.cli.output import out, print_json
from layerzero.ipc.errors import ConfigError
from layerzero.ipc.transport import keys, secret


def secret_file(path: Path, *, as_json: bool) -> None:
    """Make the secret of a stack."""
    secret.create(path)
    _say({"file": str(path)}, f"{path}: a new secret, mode 0600", as_json=as_json)


def make(folder: Path | None, *, as_json: bool) -> None:
    """Make this side's key pair."""
    path = keys.make(where(folder))
    public = path.read_text(encoding="ascii").strip()
    _say({"file": str(path), "public": public}, f"{path}: {public}", as_json=as_json)


def allow(folder: Path | None, name: str, given: str, *, as_json: bool) -> None:
    """Accept another side's public key."""
    keys.allow(where(folder), name, given)
    _say({"name": name}, f"{name} is accepted; a broker that runs reads it when it starts", as_json=as_json)


def show(folder: Path | None, *, as_json: bool) -> None:
    """Print this side's public key, and those that it accepts."""
    place = where(folder)
    try:
        own = keys.own(place).public.decode()
    except ConfigError as exc:
        own, why = "", exc.message
    accepted = {name: key.decode() for name, key in keys.allowed(place).items()}
    lines = [f"own: {own}" if own else why, *(f"{name}: {key}" for name, key in accepted.items())]
    _say({"own": own or None, "allowed": accepted}, "\n".join(lines), as_json=as_json)


def where(folder: Path | None) -> Path:
    """The folder of keys: as given, LAYERZERO_KEYS, or in the user's configuration folder."""
    given = folder or os.environ.get("LAYERZERO_KEYS")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "layerzero" / "keys"


def _say(facts: dict[str, object], text: str, *, as_json: bool) -> None:
    if as_json:
        print_json(facts)
    else:
        out().print(text, soft_wrap=True, highlight=False, markup=False)
