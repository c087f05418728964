"""Variables that are set and have no effect are told, by `lz` and at lz.connect()."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.process.harness import BACKENDS, Site
from tests.process.test_cli import command, data, lz

Sites = Callable[..., Site]


@pytest.fixture
def site(new_site: Sites) -> Site:
    return new_site().start()


def python(site: Site, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run an application; its warnings are on stderr."""
    given = command(site, (), **variables)
    given["args"] = [sys.executable, "-c", f"import layerzero as lz\n{code}"]
    return subprocess.run(**given, capture_output=True, timeout=120, check=True)


def test_a_misspelt_variable_is_told_by_lz_and_at_connect(site: Site) -> None:
    """A setting that is ignored in silence is in force for who has set it."""
    text = "LAYERZERO_AVOID_SOURCE has no effect: did you mean LAYERZERO_AVOID_SOURCES?"
    shown = lz(site, "status", "--json", LAYERZERO_AVOID_SOURCE="alpha")
    assert shown.stderr.count(text) == 1
    assert json.loads(shown.stdout)["schema"] == 1
    connected = python(site, "lz.connect()", LAYERZERO_AVOID_SOURCE="alpha")
    assert f"SettingWarning: {text}" in connected.stderr
    assert python(site, "lz.connect()").stderr == ""


def test_a_policy_that_the_running_broker_does_not_follow_is_told(site: Site, tmp_path: Path) -> None:
    """The lock that its author relies on is not in force, and nothing else says so."""
    own = site.folder / "layerzero" / "policy.yaml"
    file = tmp_path / "mine.yaml"  # whether it exists or not: no broker reads it
    text = f"the broker (pid {site.broker_pid}) uses {own}; LAYERZERO_POLICY here names {file}; run: lz down"
    for words in (("policy", "show"), ("run", "silu", "8:float32"), ("up",)):
        assert lz(site, *words, LAYERZERO_POLICY=str(file)).stderr.count(text) == 1
    assert text in python(site, "lz.connect()", LAYERZERO_POLICY=str(file)).stderr
    assert "LAYERZERO_POLICY" not in lz(site, "policy", "show", LAYERZERO_POLICY=str(own)).stderr


def test_folders_of_manifests_that_the_running_broker_does_not_know_are_told(site: Site, tmp_path: Path) -> None:
    """Likewise: their backends are unknown to it."""
    text = f"knows no backend of {tmp_path}, which LAYERZERO_MANIFEST_DIRS here names; run: lz down"
    shown = lz(site, "status", LAYERZERO_MANIFEST_DIRS=f"{BACKENDS}:{tmp_path}")
    assert shown.stderr.count(text) == 1
    assert "LAYERZERO_MANIFEST_DIRS" not in lz(site, "status", LAYERZERO_MANIFEST_DIRS=str(BACKENDS)).stderr


def test_a_path_is_that_of_the_folder_where_it_was_given(new_site: Sites, tmp_path: Path) -> None:
    """A broker that an application starts runs elsewhere."""
    site = new_site()
    (tmp_path / "mine.yaml").write_text("strict_mode: true\n")
    given = command(site, ("up", "--json"), LAYERZERO_POLICY="mine.yaml", LAYERZERO_MANIFEST_DIRS="")
    subprocess.run(**given, capture_output=True, timeout=120, check=True, cwd=tmp_path)
    answer = data(lz(site, "policy", "show", "--json"))
    assert (answer["file"], answer["values"]["strict_mode"]) == (str(tmp_path / "mine.yaml"), True)
