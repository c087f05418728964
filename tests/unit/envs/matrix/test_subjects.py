"""Rows of the matrix: from data, from our manifests and from requirements as a user types them."""

from __future__ import annotations

import pytest

from layerzero.envs.manifest import discover
from layerzero.envs.matrix.subjects import FOLDER, choose
from layerzero.ipc.errors import ConfigError


def test_the_default_rows_have_imports_and_an_op() -> None:
    """A row without an op would pass by importing alone."""
    rows = choose()
    assert len(rows) >= 12
    assert all(row.imports and row.probe is not None and row.probe.is_file() for row in rows)


def test_the_default_rows_have_all_backends_that_a_cpu_machine_builds() -> None:
    """A new manifest belongs into the matrix."""
    manifests, _ = discover()
    ours = {name for name, manifest in manifests.items() if "cpu" in manifest.variants}
    assert {row.backend for row in choose() if row.backend} == ours


def test_every_probe_is_of_a_known_distribution() -> None:
    """A probe that nothing names would never run."""
    used = {row.probe for row in choose()} | {choose(["numpy"])[0].probe}
    assert {path for path in (FOLDER / "probes").glob("*.py") if path.name != "__init__.py"} == used


def test_requirements_from_the_command_line() -> None:
    """The known distribution brings its op; nothing is added that the user did not ask for."""
    (row,) = choose(["onnxruntime==1.16.3 numpy>=2"])
    assert row.requirements == ("onnxruntime==1.16.3", "numpy>=2")
    assert row.needs == ()
    assert row.imports == ("onnxruntime",)
    assert row.probe == FOLDER / "probes" / "onnxruntime.py"


def test_a_distribution_that_is_not_known_is_imported_only() -> None:
    """Its modules are found once it is installed."""
    (row,) = choose(["colorama==0.4.6"])
    assert (row.imports, row.probe) == ((), None)


def test_a_name_twice_is_one_row() -> None:
    """A pair of one with itself would be a resolver's trivial yes."""
    assert len(choose(["mlx", "mlx"])) == 1


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("no such thing!", "neither a subject nor requirements"),
        ("", "must not be empty"),
        ("a @ https://example.org/a.whl", "neither a subject nor requirements"),
        ("a@https://example.org/a.whl", "is a URL"),
        ("null", "broker's own interpreter"),
        ("cupy", "no variant 'cpu'"),
    ],
)
def test_a_word_that_names_nothing_is_refused(word: str, text: str) -> None:
    """The message says what is allowed."""
    with pytest.raises(ConfigError, match=text):
        choose([word])
