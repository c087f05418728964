from __future__ import annotations

import subprocess

import typer
from typer.testing import CliRunner

from layerzero.client.cli.group import Group
from layerzero.client.cli.output import FAILED


def test_a_program_that_is_not_there_is_no_file_to_be_named() -> None:
    """subprocess raises FileNotFoundError of it, too."""
    app = typer.Typer(cls=Group)

    @app.callback()
    def root(traceback: bool = False) -> None:
        pass

    @app.command()
    def go() -> None:
        subprocess.run(["no-such-program"], check=True)

    shown = CliRunner().invoke(app, ["go"])
    assert shown.exit_code == FAILED
    assert shown.stderr.startswith("error: install no-such-program, which is to be run: No such file or directory")
