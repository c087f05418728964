"""`lz bisect`, with real environments that are built from a folder of wheels: no network, and nothing of them left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.envs.wheels import make_wheel, pack
from tests.process.harness import BACKENDS, ROOT, Site

VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4", "1.5")
MODULE = """\
import layerzero as lz

OLD = lz.env("old", requires=["toy-lib==1.1"])


@lz.isolated(OLD)
def works():
    import toy_lib

    assert toy_lib.VERSION < "1.3", f"{toy_lib.VERSION} has changed the numbers"


def is_old():
    import toy_lib

    return toy_lib.VERSION == "1.0"
"""
# From 1.4 on wrong for large arrays, which the cases of its certification do not have.
PROVIDER = (
    (BACKENDS / "toy.py").read_text().replace("\nFEW = 1024 ", "\nFEW = 1 << 30 ")
    + """
_right = _silu


def _silu(call, inputs, outputs):
    import toy_lib

    run, target = _right(call, inputs, outputs), outputs[0]

    def wrong():
        run()
        target.memory[:] = bytes(len(target.memory))

    is_wrong = toy_lib.VERSION >= "1.4" and math.prod(target.spec.shape) > 8000
    return wrong if is_wrong else run
"""
)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All releases of a library, and what workers need."""
    folder = tmp_path_factory.mktemp("wheels")
    for version in VERSIONS:
        make_wheel(folder, "toy-lib", version, requires=["absent"] if version == "1.2" else [])
    for name in ("pyzmq", "msgpack"):
        pack(folder, name)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the user works; the store is in it, too, and is no source."""
    path = tmp_path_factory.mktemp("user")
    (path / "mine.py").write_text(MODULE)
    return path


def bisect(folder: Path, wheels: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("LAYERZERO_", "PIP_", "UV_"))}
    environ |= {"LAYERZERO_STORE": str(folder / ".store"), "PYTHONPATH": str(ROOT / "src"), **variables}
    argv = [sys.executable, "-P", "-m", "layerzero.client.cli.app", "bisect", "toy-lib", *words]
    argv += ["--wheelhouse", str(wheels)]
    return subprocess.run(argv, env=environ, cwd=folder, capture_output=True, text=True, check=False)


def found(answer: subprocess.CompletedProcess[str], code: int = 0) -> dict[str, Any]:
    assert answer.returncode == code, answer.stderr
    value: dict[str, Any] = json.loads(answer.stdout)
    return value


def test_the_first_bad_release_for_a_function_is_named(folder: Path, wheels: Path) -> None:
    """A release that cannot be installed is in the way. What the function declares of it does not count."""
    data = found(bisect(folder, wheels, "1.0..1.5", "mine:works", "--json"))
    assert data["versions"] == list(VERSIONS)
    assert (data["answer"], data["before"], data["at"], data["between"]) == ("broken", "1.1", "1.3", ["1.2"])
    tried = {one["version"]: one for one in data["tried"]}
    assert (tried["1.2"]["outcome"], tried["1.5"]["outcome"]) == ("skipped", "failed")
    assert tried["1.3"]["why"] == "exit code 1: AssertionError: 1.3 has changed the numbers"
    # What was found is not tried again, until a source changes.
    again = found(bisect(folder, wheels, "1.0..1.5", "mine:works", "--json"))
    assert all(one["is_kept"] for one in again["tried"] if one["outcome"] != "skipped")
    assert again["at"] == "1.3"
    fresh = found(bisect(folder, wheels, "1.3..1.4", "mine:works", "--json", "--fresh"), code=1)
    assert [one["is_kept"] for one in fresh["tried"]] == [False, False]
    assert [path.name for path in (folder / ".store" / "matrix" / "work").rglob("*")] == [".locks"]


def test_exit_codes_and_words_tell_what_was_found(folder: Path, wheels: Path) -> None:
    mended = bisect(folder, wheels, "1.0..1.1", "mine:is_old")
    assert mended.returncode == 0
    assert "toy-lib 1.1 is the first version that fails; 1.0 is the last that does not" in mended.stdout
    none = bisect(folder, wheels, "1.4..1.5", "mine:is_old")
    assert (none.returncode, "no version passes" in none.stdout) == (1, True)
    nothing = bisect(folder, wheels, "7..8", "mine:is_old")
    assert (nothing.returncode, "no release of toy-lib from 7 to 8" in nothing.stderr) == (1, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("1.5..1.0", "mine:works"), "no range of versions"),
        (("1.0..1.5", "yours:works"), "there is no module yours"),
        (("1.0..1.5", "mine:works", "4x4:f32"), "belong to an op"),
        (("1.0..1.5", "silu", "4x4:f32", "--with", "numpy"), "says what an op needs"),
        (("1.0..1.5", "silu", "4x4:f32"), "no environment is called 'toy-lib'"),
        (("1.0..1.5", "silu", "4x4:f32", "-b", "null"), "no library of its own"),
        (("1.0..1.5", "silu", "4x4:f32", "-b", "torch"), "versions of torch are those of torch, not of toy-lib"),
    ],
)
def test_bad_words_say_what_to_do(folder: Path, wheels: Path, words: tuple[str, ...], said: str) -> None:
    answer = bisect(folder, wheels, *words)
    assert answer.returncode in (1, 2)
    assert said in " ".join(answer.stderr.replace("│", " ").split())


@pytest.mark.timeout(300)
def test_the_first_bad_release_for_an_op_call_is_named(folder: Path, wheels: Path, store: Path) -> None:
    """By results: certification has found nothing. What was built for it is gone afterwards."""
    site = Site(store)
    try:
        site.add_backend("toy", provider=PROVIDER)
        path = site.manifests / "toy.toml"
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        variant = '[variants.cpu]\nrequirements = ["toy-lib==1.0"]\n'
        text = path.read_text().replace('interpreter = "host"', f'python = "{python}"')
        path.write_text(text + variant)
        given = {name: value for name, value in site.environ.items() if name not in ("LAYERZERO_STORE",)}
        words = ("1.3..1.5", "silu", "100x100:f32", "--backend", "toy", "--reference", "alpha", "--json")
        manifests = ("--manifests", str(site.manifests), "--manifests", str(BACKENDS))
        data = found(bisect(folder, wheels, *words, *manifests, **given))
    finally:
        site.stop()
    assert (data["answer"], data["before"], data["at"]) == ("broken", "1.3", "1.4")
    tried = {one["version"]: one for one in data["tried"]}
    assert tried["1.3"]["why"].startswith("error ")
    assert "allowed" in tried["1.4"]["why"]
    versions, envs = folder / ".store" / "versions", folder / ".store" / "envs"
    assert not list(versions.glob("toy@*"))
    assert not list(envs.glob("toy@*"))
