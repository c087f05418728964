"""`lz env lock` of what programs declare, for real: written, built, called, and drifted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.process import forks
from tests.process.harness import Site
from tests.process.test_cli import data
from tests.process.test_cli import lz as command

import layerzero as lz
from layerzero.envs.locked import LockFile


def test_environment_holds_to_the_lock_that_the_command_has_written(tmp_path: Path) -> None:
    """From a script, by its file; then by the name that an error says. What is locked is what is installed."""
    forks.start_server()
    (tmp_path / "store").mkdir()
    site, path, script = Site(tmp_path / "store"), tmp_path / "job.lock.txt", tmp_path / "job.py"
    script.write_text('# /// script\n# dependencies = ["packaging>=24"]\n# ///\n')
    try:
        with site.environment():
            [row] = data(command(site, "env", "lock", str(script), "--json"))["environments"]
            held = lz.env.from_script(script, lock=path)
            assert (row["name"], row["path"]) == (held.backend, str(path))
            held.build(quiet=True)
            found = LockFile.read(path)
            assert found.lock.pins == row["pins"]
            (record,) = (tmp_path / "store" / "envs").glob(f"{held.backend}-*/lz-files.json")
            installed = dict(one.split(" ") for one in json.loads(record.read_text())["dists"] if " " in one)
            assert {name: installed[name] for name in found.lock.pins} == found.lock.pins
            more = lz.env.from_script(script, python="3.12", lock=path)
            error = more.unready()
            assert error is not None
            assert error.message.startswith(f"run: lz env lock {more.backend}\n")
            with pytest.raises(lz.EnvError, match=r"for Python 3\.11, not 3\.12"):
                more.build(quiet=True)
            said = command(site, *error.facts["repair"].split()[1:])
            assert said.returncode == 0, said.stderr
            assert LockFile.read(path).python == "3.12"
            assert lz.env.from_script(script, python="3.12", lock=path).backend in said.stdout
    finally:
        site.stop()
