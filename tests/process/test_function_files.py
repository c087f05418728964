"""The files that functions are in, and what a running broker learns of their environments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from tests.process import isolated_functions as fn
from tests.process.function_site import site, store
from tests.process.harness import ROOT, Site, wait_until

import layerzero as lz

__all__ = ["site", "store"]

pytestmark = pytest.mark.usefixtures("site")


def test_an_environment_that_is_not_built_is_an_error_with_the_command() -> None:
    with pytest.raises(lz.EnvError) as missing:
        fn.unbuilt()
    assert missing.value.message.splitlines()[0] == f"run: lz env build {fn.UNBUILT.backend}"
    assert missing.value.facts["repair"] == f"lz env build {fn.UNBUILT.backend}"


def test_other_clients_and_the_status_see_the_environment_as_a_backend(site: Site) -> None:
    fn.echo(1)
    wait_until(lambda: site.backend(fn.PLAIN.backend)["state"] == "ready")
    assert site.backend(fn.PLAIN.backend)["ops"] == ["function"]


SCRIPT = """
import sys
import warnings
import layerzero as lz
ENV = lz.env("plain")

@lz.isolated(ENV)
def which(n):
    import helper
    return __name__, helper.VALUE * n

if __name__ == "__main__":
    lz.connect(runtime_dir=sys.argv[1])
    print(*which(%d))
"""


def run_script(site: Site, folder: Path) -> subprocess.CompletedProcess[str]:
    with site.environment():
        return subprocess.run(
            [sys.executable, "script.py", str(site.folder)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            check=False,
        )


def test_a_script_is_imported_and_its_main_part_is_not_run(site: Site, tmp_path: Path) -> None:
    """Of a file that has changed since, and of another folder's helper of the same name, the worker takes the new."""
    for folder, value, factor in (("one", 7, 1), ("two", 8, 1), ("one", 9, 2)):
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        (place / "helper.py").write_text(f"VALUE = {value}\n")
        (place / "script.py").write_text(SCRIPT % factor)
        answer = run_script(site, place)
        assert answer.stdout == f"__lz_main__ {value * factor}\n", answer.stderr


def test_a_file_that_has_changed_since_its_import_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs there is what was imported here."""
    file = tmp_path / "lz_changing.py"
    file.write_text("import layerzero as lz\n@lz.isolated(lz.env('plain'))\ndef f(): return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import lz_changing  # type: ignore[import-not-found]

    file.write_text(file.read_text().replace("return 1", "return 2"))
    with pytest.raises(lz.InvalidArgument, match=r"lz_changing.py has changed .* start the program again"):
        lz_changing.f()
    with pytest.raises(lz.InvalidArgument, match="has changed"):
        lz_changing.f.options(timeout_s=9)()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("is_folder", [False, True])
def test_files_of_other_users_are_refused(site: Site, tmp_path: Path, *, is_folder: bool) -> None:
    """They may call a broker; their code is not to run as its user."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT % 1)
    os.chown(tmp_path if is_folder else script, 12345, -1)
    answer = run_script(site, tmp_path)
    assert "belongs to user 12345, and the worker is user 0" in answer.stderr
    assert answer.stdout == ""


def test_a_module_that_imports_what_is_not_there_says_what_to_do(site: Site, tmp_path: Path) -> None:
    """NumPy, which the caller has."""
    (tmp_path / "script.py").write_text(SCRIPT.replace("import sys", "import sys, numpy", 1) % 1)
    answer = run_script(site, tmp_path)
    assert "raised ModuleNotFoundError: No module named 'numpy'" in answer.stderr
    assert "import there only what that has, or in functions" in answer.stderr
    assert "importlib" not in answer.stderr


def test_a_running_broker_learns_of_what_is_built_later(store: Path) -> None:
    """Of a declaration that it has read, and of ones that it has not. The call that finds out is served."""
    with mock.patch.dict(os.environ, LAYERZERO_STORE=str(store)):
        fn.LATE.unready()  # as a call finds, which declares it
    own = Site(store)
    try:
        with own.environment():
            own.start().connect()
            for function in (fn.late, fn.later):
                with pytest.raises(lz.EnvError, match=r"^run: lz env build"):
                    function()
            fn.LATE.build(quiet=True)
            fn.LATER.build(quiet=True)
            assert fn.later.explain().state == "the broker learns of it by the first call"
            fn.LATEST.build(quiet=True)
            assert fn.late.submit().result() is None
            assert fn.late.last_report().failures == ()
            fn.later()
            with fn.Latest() as latest:
                assert latest.three() == 3
            for env in (fn.LATE, fn.LATER, fn.LATEST):
                assert own.backend(env.backend)["ops"] == ["function"]
                lz.session().ask("reset", backend=env.backend)  # lz restart
                assert env.is_served(lz.session().ask)
            fn.later()
            for name in ("nobody", "../late", "plain.00000000", 3):
                with pytest.raises(lz.InvalidArgument, match="no backend is called"):
                    lz.session().ask("learn", backend=name)
            assert fn.LATEST.backend in lz.session().ask("policy")["known"]["backends"]
            lz.disconnect()
    finally:
        own.stop()


def test_calls_that_find_out_together_are_all_served(store: Path) -> None:
    """One of them has the broker learn of the environment; the others were refused before it had."""
    own = Site(store)
    try:
        with own.environment():
            own.start().connect()
            fn.TOGETHER.build(quiet=True)
            assert [*fn.together.map(range(4))] == [0, 1, 2, 3]
            assert fn.together.submit(4).result() == 4
            lz.disconnect()
    finally:
        own.stop()


def test_a_declaration_that_is_broken_is_not_learned(store: Path) -> None:
    own = Site(store)
    try:
        with own.environment():
            own.start().connect()
            for name, text in (("broken.00000001", "= ["), ("other.00000002", OTHERS)):
                (store / "functions" / f"{name}.toml").write_text(text)
                with pytest.raises(lz.LayerZeroError):
                    lz.session().ask("learn", backend=name)
            assert lz.session().ask("ping")["pid"]
            lz.disconnect()
    finally:
        own.stop()
        for name in ("broken.00000001", "other.00000002"):
            (store / "functions" / f"{name}.toml").unlink()


OTHERS = """
[environment]
provider = "null"
"""
