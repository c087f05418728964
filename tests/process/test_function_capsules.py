"""Calls of functions whose worker died, hung or gave another result than its shadow leave capsules, and can be made
again in their environment and in others."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.process import capsule_functions as fn
from tests.process import forks
from tests.process.capsule_site import hashed
from tests.process.harness import Site
from tests.process.test_cli import DONE, FAILED, USAGE, data, lz

import layerzero as lz_
from layerzero.client.capsules import form, store
from layerzero.client.capsules.of_function import FunctionCall
from layerzero.functions import replaying
from layerzero.ipc.errors import InvalidArgument


@pytest.fixture(scope="module")
def kept_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    forks.start_server()
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def capsules(tmp_path: Path) -> Path:
    return tmp_path / "capsules"


@pytest.fixture
def site(kept_store: Path, capsules: Path) -> Iterator[Site]:
    """Not connected yet; capsules keep all."""
    one = Site(kept_store, restart_budget=100, backoff_s=0.01, backoff_max_s=0.01)
    one.environ |= {"LAYERZERO_CAPSULES": "full", "LAYERZERO_CAPSULE_DIR": str(capsules)}
    with one.environment():
        fn.ONE.build(quiet=True)
        yield one
        lz_.disconnect()
    one.stop()


def only(folder: Path) -> tuple[form.Capsule, FunctionCall]:
    (name,) = store.names(folder)
    capsule = hashed(folder / name)
    assert capsule.function is not None
    return capsule, capsule.function


def run(site: Site, *words: str) -> dict[str, dict[str, object]]:
    rows = data(lz(site, "replay", *words, "--json"), FAILED)["backends"]
    return {row["backend"]: row for row in rows}


@pytest.mark.parametrize("path", ["broker", "express"])
def test_a_function_that_kills_its_worker_is_kept_and_dies_again(site: Site, capsules: Path, path: str) -> None:
    """With its arrays, lent or copied, its file and its environment; the error's report and the call's name it."""
    site.start().connect()
    shared = lz_.share(np.arange(4.0))
    if path == "express":
        for _ in range(6):
            fn.scaled(shared)
    shared[0] = 13
    with pytest.raises(lz_.BackendError, match="scaled in one: ") as error:
        fn.scaled(shared[:3], by=3.0, label=np.float32(1))
    capsule, function = only(capsules)
    note = f"capsule of the failure: lz replay {capsule.name}"
    assert note in error.value.report.notes  # type: ignore[attr-defined]
    assert fn.scaled.last_report().capsule == note
    assert (capsule.op, capsule.failed.what, "scaled-SIGSEGV" in capsule.name) == ("function", "signal11", True)
    target = function.targets[0]
    assert (target.env, target.file, target.qualname) == (fn.ONE.backend, fn.__file__, "scaled")
    assert capsule.label == f"{fn.__name__}.scaled(numpy 3:float64, by=3.0, label=1.0)"
    assert b"Fatal Python error" in (capsules / capsule.name / form.LOG).read_bytes()
    lz_.disconnect()
    row = run(site, capsule.name, "--times", "2")[fn.ONE.backend]
    assert row["runs"] == {"signal 11": 2}
    shown = lz(site, "capsule", "show", capsule.name)
    assert shown.returncode == DONE, shown.stderr
    for text in (target.file, target.sha256[:12], fn.ONE.backend, "Segmentation fault"):
        assert text in shown.stdout
    assert capsule.name in lz(site, "capsule", "list").stdout


def test_texts_are_left_out_by_default_and_a_replay_says_so(site: Site, capsules: Path) -> None:
    """Lengths of texts, no bytes of arrays: where there are texts, nothing stands for them."""
    site.environ["LAYERZERO_CAPSULES"] = "shapes"
    with site.environment():
        site.start().connect()
        with pytest.raises(lz_.BackendError):
            fn.scaled(np.ones(3), how="exit", secret={7: ["hush", b"hush"]})
        with pytest.raises(lz_.BackendError):
            fn.of_number(13)
    first, second = (
        form.read(capsules / name) for name in sorted(store.names(capsules), key=lambda n: "of_number" in n)
    )
    for path in (capsules / first.name).iterdir():
        assert b"hush" not in path.read_bytes(), path
    assert "how=text of 4, secret={7: [text of 4, bytes of 4]}" in first.label
    lz_.disconnect()
    done = lz(site, "replay", first.name)
    assert done.returncode == USAGE
    assert "LAYERZERO_CAPSULES=small" in done.stderr
    assert run(site, second.name)[fn.ONE.backend]["runs"] == {"signal 11": 1}


def test_a_deadline_is_kept(site: Site, capsules: Path) -> None:
    site.start().connect()
    with pytest.raises(lz_.DeadlineExceeded):
        fn.scaled.options(timeout_s=0.3)(np.ones(2), how="hang")
    capsule, _ = only(capsules)
    assert capsule.failed.what == "deadline"
    assert run(site, capsule.name, "--timeout", "0.5")[fn.ONE.backend]["runs"] == {"DEADLINE": 1}


def test_a_call_that_another_environment_served_is_kept_and_its_report_names_it(site: Site, capsules: Path) -> None:
    with site.environment():
        fn.OTHER.build(quiet=True)
    site.start().connect()
    assert fn.either(3) == 4
    capsule, _ = only(capsules)
    assert fn.either.last_report().capsule.endswith(capsule.name)
    assert (capsule.failed.backend, capsule.served_by) == (fn.ONE.backend, fn.OTHER.backend)
    lz_.disconnect()
    rows = run(site, capsule.name, "--env", "all")
    assert rows[fn.ONE.backend]["runs"] == {"exit 3": 1}
    assert rows[fn.OTHER.backend]["runs"] == {"ok": 1}


def test_a_method_dies_again_on_an_object_that_is_constructed_anew(site: Site, capsules: Path) -> None:
    site.start().connect()
    counter = fn.Counter(7)
    assert counter.add(1) == 8
    with pytest.raises(lz_.BackendError):
        counter.add(13)
    capsule, function = only(capsules)
    assert [part.kind for part in function.parts] == ["call", "method"]
    assert run(site, capsule.name)[fn.ONE.backend]["runs"] == {"exit 3": 1}
    store.remove(capsules / capsule.name)
    with pytest.raises(lz_.BackendError):
        fn.Forgotten().add(1)
    capsule, function = only(capsules)
    assert 'on_death="rebuild"' in function.problem
    lz_.disconnect()
    done = lz(site, "replay", capsule.name)
    assert done.returncode == USAGE
    assert 'on_death="rebuild"' in done.stderr


def test_many_calls_as_one_die_again(site: Site, capsules: Path) -> None:
    site.start().connect()
    with pytest.raises(lz_.BackendError):
        list(fn.of_number.map([1, 2, 13, 4], chunksize=4))
    capsule, function = only(capsules)
    assert function.parts[0].kind == "many"
    assert run(site, capsule.name)[fn.ONE.backend]["runs"] == {"signal 11": 1}


def test_a_wrong_result_of_a_shadow_check_is_kept_and_compared_again(site: Site, capsules: Path) -> None:
    """In both environments, each with its own function."""
    with site.environment():
        fn.OTHER.build(quiet=True)
    site.start().connect()
    assert fn.twice(2.0) == 4
    capsule, function = only(capsules)
    assert fn.twice.last_report().capsule.endswith(capsule.name)
    assert capsule.failed.outcome == form.WRONG
    assert [target.qualname for target in function.targets] == ["twice", "thrice"]
    lz_.disconnect()
    rows = run(site, capsule.name)
    assert set(rows) == {fn.ONE.backend, fn.OTHER.backend}
    assert rows[fn.ONE.backend]["difference"] == "result is 4.0 and 6.0"
    assert rows[fn.ONE.backend]["is_far"]
    assert not rows[fn.OTHER.backend]["is_far"]


def test_all_environments_that_are_built_make_the_call(site: Site, capsules: Path, tmp_path: Path) -> None:
    """Of a capsule of somebody else once it is trusted."""
    with site.environment():
        fn.OTHER.build(quiet=True)
    site.start().connect()
    with pytest.raises(lz_.BackendError):
        fn.of_number(13)
    capsule, _ = only(capsules)
    lz_.disconnect()
    archive = str(tmp_path / "shared.tar.gz")
    assert lz(site, "capsule", "share", capsule.name, archive).returncode == DONE
    refused = lz(site, "replay", archive)
    assert refused.returncode == USAGE
    for text in ("--trust", f"{fn.__name__}.of_number(13)", fn.__file__):
        assert text in refused.stderr
    assert run(site, archive, "--trust")[fn.ONE.backend]["runs"] == {"signal 11": 1}
    rows = run(site, capsule.name, "--env", "all")
    assert set(rows) == {fn.ONE.backend, fn.OTHER.backend}
    assert all(row["runs"] == {"signal 11": 1} for row in rows.values())
    done = lz(site, "replay", capsule.name, "-b", "other")
    assert done.returncode == FAILED, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_a_file_that_has_changed_is_refused_and_may_be_named_where_it_is(
    site: Site, capsules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.start().connect()
    with pytest.raises(lz_.BackendError):
        fn.of_number(13)
    capsule, function = only(capsules)
    root = tmp_path / "elsewhere"
    copy = root / "tests" / "process" / "capsule_functions.py"
    copy.parent.mkdir(parents=True)
    for folder in (copy.parent, copy.parent.parent):
        (folder / "__init__.py").touch()
    shutil.copy(fn.__file__, copy)
    assert replaying.code_of(function, fn.ONE.backend, copy).root == str(root)
    copy.write_text(copy.read_text() + "\n# later\n")
    with pytest.raises(
        InvalidArgument, match=r"name the file with .*of_number as it was, of SHA-256 .* by --file FILE"
    ):
        replaying.code_of(function, fn.ONE.backend, copy)
    done = lz(site, "replay", capsule.name, "--file", str(tmp_path / "none.py"))
    assert done.returncode == USAGE
    assert "--file FILE" in done.stderr
    assert os.path.exists(function.targets[0].file)


def test_a_call_is_made_smaller_as_long_as_it_ends_in_the_same_word(site: Site, capsules: Path) -> None:
    """Of an array in the frame, a view with gaps in shared memory, and one of another extent; the number that kills is
    what is left, other values stay, and the small capsule is a capsule like others."""
    site.start().connect()
    given = np.arange(48.0).reshape(6, 8)[:, ::2]
    given[3, 0] = 13
    lent = lz_.share(np.arange(24.0).reshape(6, 4))
    with pytest.raises(lz_.BackendError):
        fn.at_any_place(given, lent[:, 1:3], np.zeros((3, 5)), note="text")
    capsule, _ = only(capsules)
    found = data(lz(site, "replay", capsule.name, "--shrink", "--json"))
    assert (found["from"], found["why"]) == (capsule.name, f"signal {int(signal.SIGSEGV)}")
    assert found["shapes"] == [[1, 1], [1, 1], [1, 1]]
    assert found["tries"] < 40
    small = form.read(capsules / found["capsule"])
    assert small.facts["shrunk_from"] == capsule.name
    assert small.nbytes < capsule.nbytes
    assert small.function is not None
    assert "numpy 1x1:float64" in small.label
    assert run(site, found["capsule"])[fn.ONE.backend]["runs"] == {f"signal {int(signal.SIGSEGV)}": 1}
    refused = lz(site, "replay", capsule.name, "--shrink", "--env", "all")
    assert refused.returncode == USAGE
    assert "--shrink looks at one backend" in refused.stderr


def test_a_call_that_ends_well_is_not_made_smaller(site: Site, capsules: Path) -> None:
    """As one without bytes may: random numbers do not strike."""
    site.environ["LAYERZERO_CAPSULES"] = "shapes"
    site.start().connect()
    with pytest.raises(lz_.BackendError):
        fn.scaled(np.array([13.0, 1.0]))
    capsule, _ = only(capsules)
    done = lz(site, "replay", capsule.name, "--shrink")
    assert done.returncode == USAGE
    assert "nothing to shrink; --times runs more" in done.stderr


def test_functions_of_others_are_refused_where_they_are_damaged(site: Site, capsules: Path) -> None:
    site.start().connect()
    with pytest.raises(lz_.BackendError):
        fn.of_number(13)
    capsule, _ = only(capsules)
    path = capsules / capsule.name / form.CALL
    call = json.loads(path.read_text())
    part, target = call["function"]["parts"][0], call["function"]["targets"][0]
    for change in (
        {"parts": []},
        {"parts": [{**part, "memory": [0, 9]}]},
        {"parts": [{**part, "memory": [0]}]},
        {"parts": [{**part, "kind": "rm"}]},
        {"parts": [{**part, "given": [3, 4]}]},
        {"targets": []},
        {"targets": [{**target, "file": ""}]},
        {"targets": [{**target, "module": 3}]},
    ):
        path.write_text(json.dumps({**call, "function": {**call["function"], **change}}))
        with pytest.raises(InvalidArgument, match="damaged"):
            form.read(capsules / capsule.name)


def test_a_script_makes_the_call_without_layerzero(site: Site, capsules: Path, tmp_path: Path) -> None:
    """With arrays, keywords and what a method's object was constructed of; it dies as the worker did."""
    site.start().connect()
    given = np.arange(6.0).reshape(2, 3)[:, ::2]
    given[0, 0] = 13
    with pytest.raises(lz_.BackendError):
        fn.scaled(lz_.share(given)[:, 0], by=3.0, label=(1, float("inf")))
    counter = fn.Counter(7)
    with pytest.raises(lz_.BackendError):
        counter.add(13)
    lz_.disconnect()
    for name in store.names(capsules):
        script = tmp_path / f"{name}.py"
        done = lz(site, "capsule", "script", name, "--data", "-o", str(script))
        assert done.returncode == DONE, done.stderr
        ran = subprocess.run([sys.executable, "-I", str(script)], capture_output=True, text=True, check=False)
        expected = -signal.SIGSEGV if "scaled" in name else 3
        assert ran.returncode == expected, ran.stderr + ran.stdout
        assert "calling" in ran.stdout
