"""`lz bisect`, with real environments that are built from a folder of wheels: no network, and nothing of them left."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.envs.wheels import make_wheel, pack
from tests.process.harness import BACKENDS, ROOT, Site

from layerzero.client.capsules.form import CALL, Argument, Capsule, Failure, Segment
from layerzero.client.capsules.of_function import FunctionCall, Part, Target
from layerzero.envs import functions
from layerzero.envs.declared import Declared
from layerzero.ipc.vocabulary.tensors import TensorSpec

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
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
# From 1.4 on wrong for large arrays, and the end of its worker for those of one shape: certification has neither.
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
    if toy_lib.VERSION >= "1.4" and target.spec.shape == (3, 77):
        return os.abort
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
        (("1.0..1.5",), "name a TARGET, or a capsule: --call NAME"),
        (("1.0..1.5", "mine:works", "--call", "x"), "name a TARGET, or a capsule: --call NAME"),
        (("1.0..1.5", "--call", "x"), "no capsule is called 'x'"),
        (("1.0..1.5", "mine:works", "--times", "2"), "belong to --call"),
        (("1.5..1.0", "mine:works"), "name the lower version first: toy-lib 1.0..1.5"),
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


@pytest.fixture
def toy(store: Path) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """Words and variables by which a backend of the library is known, and toys to compare it with."""
    site = Site(store)
    site.add_backend("toy", provider=PROVIDER)
    path = site.manifests / "toy.toml"
    variant = '[variants.cpu]\nrequirements = ["toy-lib==1.0"]\n'
    text = path.read_text().replace('interpreter = "host"', f'python = "{PYTHON}"')
    path.write_text(text + variant)
    given = {name: value for name, value in site.environ.items() if name not in ("LAYERZERO_STORE",)}
    yield ("--manifests", str(site.manifests), "--manifests", str(BACKENDS)), given
    site.stop()


def kept(folder: Path, capsule: Capsule) -> str:
    """The path of a capsule that is written as it would be kept."""
    path = folder / capsule.name
    path.mkdir()
    (path / CALL).write_text(json.dumps(capsule.to_dict()))
    return str(path)


def capsule_of(name: str, op: str, served_by: str = "", **more: Any) -> Capsule:
    failure = Failure("toy", "toy.silu", "BACKEND_ERROR", "it died", 6, None)
    its: dict[str, Any] = {"arguments": (), "segments": (), "params": {}, **more}
    return Capsule(
        name, op, 1.0, output=None, failures=(failure,), served_by=served_by, left_out="shapes", facts={}, **its
    )


@pytest.mark.timeout(300)
def test_the_first_release_that_dies_of_a_capsules_call_is_named(
    folder: Path, wheels: Path, toy: tuple[tuple[str, ...], dict[str, str]], tmp_path: Path
) -> None:
    """With random numbers: the capsule has shapes alone. Several versions die of it, and each is asked."""
    spec = TensorSpec.contiguous("float32", (3, 77))
    its = {"arguments": (Argument("x", spec, 0, 0),), "segments": (Segment(spec.span_bytes, 0),)}
    words = ("1.1..1.5", "--call", kept(tmp_path, capsule_of("one", "silu", "alpha.silu", **its)), "--json")
    answer = bisect(folder, wheels, *words, *toy[0], **toy[1])
    data = found(answer)
    assert (data["answer"], data["before"], data["at"]) == ("broken", "1.3", "1.4")
    tried = {one["version"]: one for one in data["tried"]}
    assert tried["1.3"]["why"].startswith("ok 1, error ")
    assert tried["1.4"]["why"].startswith("signal 6 1: the toy@1.4 worker died")
    assert tried["1.5"]["why"].startswith("signal 6 1: the toy@1.5 worker died")
    assert "compared with alpha" in answer.stderr
    assert not list((folder / ".store" / "versions").glob("toy@*"))


def test_the_first_release_that_fails_a_functions_capsule_is_named(folder: Path, wheels: Path, tmp_path: Path) -> None:
    """In environments like the declared one, which go again; the function's file must be the one of then, and a capsule
    of somebody else be trusted."""
    mine, store = folder / "mine.py", folder / ".store"
    old = Declared.of("old", ("toy-lib==1.1",), PYTHON)
    functions.declare(old, store)
    sha256 = hashlib.sha256(mine.read_bytes()).hexdigest()
    target = Target(old.backend, "mine", "works", str(mine), sha256, str(folder), is_main=False)
    part = Part("call", "", 0, ([0], [2]), (0, 1))
    function = FunctionCall("mine.works", (target,), (part,))
    capsule = capsule_of("works", "function", function=function, segments=(Segment(3, 0), Segment(0, 0)))
    path = kept(tmp_path, capsule)
    others = bisect(folder, wheels, "1.1..1.4", "--call", path)
    assert (others.returncode, "--trust" in others.stderr, str(mine) in others.stderr) == (2, True, True)
    data = found(bisect(folder, wheels, "1.1..1.4", "--call", path, "--trust", "--json"))
    assert (data["answer"], data["before"], data["at"], data["between"]) == ("broken", "1.1", "1.3", ["1.2"])
    tried = {one["version"]: one for one in data["tried"]}
    assert (
        "raised AssertionError 1: mine.works in old raised AssertionError: 1.3 has changed the numbers"
        in (tried["1.3"]["why"])
    )
    assert [one.name for one in (store / "functions").glob("*.toml")] == [f"{old.backend}.toml"]
    none = bisect(folder, wheels, "1.1..1.4", "--call", path, "--file", str(tmp_path / "gone.py"))
    assert (none.returncode, "--file FILE" in none.stderr) == (2, True)


@pytest.mark.timeout(300)
def test_the_first_bad_release_for_an_op_call_is_named(
    folder: Path, wheels: Path, toy: tuple[tuple[str, ...], dict[str, str]]
) -> None:
    """By results: certification has found nothing. What was built for it is gone afterwards."""
    words = ("1.3..1.5", "silu", "100x100:f32", "--backend", "toy", "--reference", "alpha", "--json")
    data = found(bisect(folder, wheels, *words, *toy[0], **toy[1]))
    assert (data["answer"], data["before"], data["at"]) == ("broken", "1.3", "1.4")
    tried = {one["version"]: one for one in data["tried"]}
    assert tried["1.3"]["why"].startswith("error ")
    assert "allowed" in tried["1.4"]["why"]
    versions, envs = folder / ".store" / "versions", folder / ".store" / "envs"
    assert not list(versions.glob("toy@*"))
    assert not list(envs.glob("toy@*"))
