"""Which broker a process of a node finds, without Ray: its module is looked for among those that are there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from layerzero.client.connection import node

ID = "a408d523b47ef5556e4d28fb1c564dd9bdfbe098e52d89ed3c63764f"


def ray(is_initialized: bool) -> SimpleNamespace:
    context = SimpleNamespace(get_node_id=lambda: ID)
    return SimpleNamespace(is_initialized=lambda: is_initialized, get_runtime_context=lambda: context)


def test_a_task_finds_the_folder_of_its_node_once_there_is_an_agent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where a cluster's owner has not run `lz cluster up`, all is as without Ray."""
    monkeypatch.setitem(sys.modules, "ray", ray(True))  # type: ignore[arg-type]
    assert node.broker_folder(tmp_path) is None
    folder = node.folder_of(ID, tmp_path)
    folder.mkdir()
    node.lock_of(folder).touch()
    assert node.broker_folder(tmp_path) == folder
    assert len(str(folder.name)) <= 17  # the names of sockets follow it


@pytest.mark.parametrize("module", [None, SimpleNamespace(), ray(False)])
def test_without_a_cluster_nothing_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: object
) -> None:
    """Ray may be imported, or just being imported, in a program that has no cluster."""
    if module is None:
        monkeypatch.delitem(sys.modules, "ray", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "ray", module)  # type: ignore[arg-type]
    assert node.here() is None
    assert node.broker_folder(tmp_path) is None


def test_nothing_but_a_command_of_clusters_imports_ray() -> None:
    """It takes a third of a second, and is no base dependency."""
    code = "import layerzero as lz, sys; lz.connect; import layerzero.cluster.agent.fleet; print('ray' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
