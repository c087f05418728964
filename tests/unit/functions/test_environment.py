"""lz.env: what it takes, from where, and what it refuses. Nothing is built here."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import layerzero as lz
from layerzero.envs import functions, manifest
from layerzero.envs.build.build import ensure, plan
from layerzero.envs.declared import Declared
from layerzero.functions.environment import HERE


def test_a_declaration_is_named_by_what_it_asks_for() -> None:
    """Order and repeats do not count; another Python does."""
    one = lz.env("np", requires=["numpy<2", "msgpack"], python="3.11")
    assert one.backend == lz.env("np", requires=["msgpack", "numpy<2", "msgpack"], python="3.11").backend
    others = [lz.env("np", requires=["numpy<2"], python="3.11"), lz.env("np", requires=one.requires, python="3.12")]
    assert len({one.backend, *(other.backend for other in others)}) == 3
    assert one.backend.startswith("np.")
    assert lz.env("np").python == HERE


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"name": "No"}, "name is 'No'"),
        ({"name": "a" * 41}, "name is"),
        ({"requires": "numpy"}, r"pass a list: requires=\['numpy'\]"),
        ({"requires": ["numpy=1"]}, "'numpy=1' is no requirement"),
        ({"requires": ["a @ https://example.org/a.whl"]}, "names a URL"),
        ({"requires": [3]}, "no requirement"),
        ({"python": "2.7"}, "a version such as '3.11'"),
        ({"python": "/usr/bin/python3"}, "an interpreter of yours is from_interpreter='/usr/bin/python3'"),
        ({"build": "later"}, 'allowed: "now"'),
        ({"image": "a:1", "requires": ["numpy"]}, "an image has its Python and its packages"),
        ({"image": "a:1", "build": "now"}, "nothing is built; leave python and build out"),
        ({"image": "a b"}, "image is 'a b'"),
    ],
)
def test_what_is_wrong_is_said_at_once(options: dict[str, object], text: str) -> None:
    with pytest.raises(lz.InvalidArgument, match=text):
        lz.env(**{"name": "a", **options})  # type: ignore[arg-type]


def test_an_image_is_a_manifest_that_brokers_read_and_commands_do_not_build(tmp_path: Path) -> None:
    declared = Declared.of("boxed", (), "3.11", image="registry.example/boxed:1")
    written = functions.declare(declared, tmp_path)
    assert (written.image, written.variants) == ("registry.example/boxed:1", {})
    assert functions.declared_by(written) == declared
    assert declared.backend != Declared.of("boxed", (), "3.11", image="registry.example/boxed:2").backend
    assert functions.is_of_image(declared.backend, tmp_path)
    assert not functions.is_of_image("../boxed", tmp_path)
    for attempt in (ensure, plan):
        with pytest.raises(lz.EnvError, match=r"from containers of registry\.example/boxed:1: nothing of it is built"):
            attempt(written, store=tmp_path)


def test_what_is_declared_is_a_manifest_that_brokers_and_commands_read(tmp_path: Path) -> None:
    declared = Declared.of("np", ['numpy<2; python_version > "3.8"'], "3.11")
    written = functions.declare(declared, tmp_path)
    assert written.variants["cpu"].requirements == declared.requires
    assert functions.is_ours(written)
    found, problems = manifest.discover(functions.folders(tmp_path))
    assert declared.backend in found
    assert problems == []
    assert functions.folders(tmp_path, [tmp_path / "functions"]) == (tmp_path / "functions",)
    assert functions.built(declared, tmp_path) is None
    assert functions.remove(declared.backend, tmp_path)
    assert not functions.remove(declared.backend, tmp_path)
    assert not functions.remove("../np", tmp_path)
    assert [path for path in (tmp_path / "functions").iterdir() if path.is_file()] == []


def test_requirements_files(tmp_path: Path) -> None:
    file = tmp_path / "Old Stack.txt"
    file.write_text("# ours\nnumpy<2  # the last\n\nmsgpack[x]>=1\n")
    found = lz.env.from_requirements(file, python="3.12")
    assert (found.name, found.requires, found.python) == ("old-stack", ("msgpack[x]>=1", "numpy<2"), "3.12")
    for line in ("-r other.txt", "-e .", "numpy==1 --hash=sha256:00", "numpy \\"):
        file.write_text(f"msgpack\n{line}\n")
        with pytest.raises(lz.ConfigError, match=r"Old Stack.txt:2: .* is an option"):
            lz.env.from_requirements(file)


def test_pyproject(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text(
        '[project]\nname = "My.App"\ndependencies = ["numpy"]\n[project.optional-dependencies]\nold = ["msgpack<1"]\n'
    )
    assert lz.env.from_pyproject(tmp_path).requires == ("numpy",)
    found = lz.env.from_pyproject(file, extras=["old"])
    assert (found.name, found.requires) == ("my-app", ("msgpack<1", "numpy"))
    with pytest.raises(lz.ConfigError, match="has no 'new'; it has: old"):
        lz.env.from_pyproject(file, extras=["new"])
    file.write_text("[tool.x]\n")
    with pytest.raises(lz.ConfigError, match=r"has no table \[project\]"):
        lz.env.from_pyproject(file)
    file.write_text("[")
    with pytest.raises(lz.ConfigError, match="cannot be read as TOML"):
        lz.env.from_pyproject(file)


def test_scripts_with_inline_metadata(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(
        '# /// script\n# requires-python = ">=3.10"\n# dependencies = [\n#   "numpy",\n# ]\n# ///\nprint(1)\n'
    )
    assert lz.env.from_script(file).requires == ("numpy",)
    file.write_text('# /// script\n# requires-python = ">=3.99"\n# ///\n')
    with pytest.raises(lz.ConfigError, match=r"requires-python is >=3.99, and Python .* pass python="):
        lz.env.from_script(file)
    file.write_text("print(1)\n")
    with pytest.raises(lz.ConfigError, match="has 0 blocks"):
        lz.env.from_script(file)
    with pytest.raises(lz.ConfigError, match="cannot be read"):
        lz.env.from_script(tmp_path / "none.py")


def test_threads_that_declare_the_same_at_once_all_have_it(tmp_path: Path) -> None:
    for round_ in range(20):
        declared = Declared.of(f"env{round_}", ["numpy<2"], "3.11")
        together = threading.Barrier(8)

        def declare(declared: Declared = declared, together: threading.Barrier = together) -> str:
            together.wait()
            return functions.declare(declared, tmp_path).name

        with ThreadPoolExecutor(8) as pool:
            found = [pool.submit(declare) for _ in range(8)]
        assert {future.result() for future in found} == {declared.backend}
