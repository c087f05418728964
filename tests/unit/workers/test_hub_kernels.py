"""A package of the Kernel Hub is found in its environment's folder, in either layout of builds."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerzero.ipc.errors import ConfigError
from layerzero.workers.hub_kernels import VARIABLE, load_package

INIT = "from .more import two\n\none = 1\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def write(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "__init__.py").write_text(INIT)
    (folder / "more.py").write_text("two = 2\n")


@pytest.mark.parametrize("inside", ["", "activation"])
def test_package_lies_in_the_build_or_one_folder_deeper(folder: Path, inside: str) -> None:
    """Newer builds and older ones. Its modules import each other."""
    write(folder / inside)
    package = load_package()
    assert (package.one, package.two) == (1, 2)


def test_folders_of_a_package_are_no_packages_beside_it(folder: Path) -> None:
    write(folder)
    write(folder / "layers")
    assert load_package().__file__ == str(folder / "__init__.py")


@pytest.mark.parametrize(("names", "says"), [([], "none"), (["one", "two"], "one, two")])
def test_what_is_not_one_package_is_refused(folder: Path, names: list[str], says: str) -> None:
    """Which of them it was to be is nobody's guess."""
    for name in names:
        write(folder / name)
    with pytest.raises(ConfigError, match=f"has these: {says}"):
        load_package()


def test_environment_without_kernels_of_the_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"add a table \[hub\]"):
        load_package()
