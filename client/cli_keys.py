"""`lz keys`: what those who connect to a broker prove themselves with. Nothing secret is printed."""

from __future__ import annotations

from pathlib import Path

from layerzero.client.cli_output import out, print_json
from layerzero.ipc import secret


def secret_file(path: Path, *, as_json: bool) -> None:
    """Make the secret of a stack."""
    secret.create(path)
    if as_json:
        print_json({"file": str(path)})
    else:
        out().print(f"{path}: a new secret, mode 0600", soft_wrap=True, highlight=False)
