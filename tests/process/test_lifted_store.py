"""The store of lifted calls, across brokers: what is believed, what is not, and `lz cache`. Over the GPU of threads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.process.gpu_site import close, randn, report, silu, soft
from tests.process.harness import Site, wait_until
from tests.process.lifted_site import LiftedSites, kernels, lift, lifted_site, lifted_store, rows
from tests.process.test_cli import DONE, FAILED, data
from tests.process.test_cli import lz as lz_command

import layerzero as lz
from layerzero.broker.lifting.store import Entry, LiftStore
from layerzero.client.gpu.lifting import loaded

__all__ = ["kernels", "lifted_site", "lifted_store", "soft"]


@pytest.fixture
def filled(lifted_site: LiftedSites, lifted_store: Path) -> Path:
    """The store after a broker whose client launched silu of 32 x 32; this process has forgotten it."""
    site = lifted_site()
    site.connect()
    x, _ = randn(32, 32)
    lift(lambda: lz.silu(x))
    lz.disconnect()
    loaded.forget()
    return lifted_store / "lifted"


def next_path(site: Site) -> Any:
    """Of the first call in this broker's session, whose result is right."""
    site.connect()
    x, values = randn(32, 32)
    close(lz.silu(x), silu(values))
    return report().path


def test_the_next_broker_needs_no_worker(filled: Path, lifted_site: LiftedSites, kernels: Any) -> None:
    site = lifted_site()
    for _ in range(2):
        assert next_path(site) == "lifted"
        assert site.backend("one")["pid"] is None
        assert rows() == [("one.silu", "lifted", "")]
        lz.disconnect()
    assert kernels.loads == 2  # of the first broker's, and once for these two


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("harm", [flip, cut, Path.unlink])
@pytest.mark.parametrize("folder", ["calls", "code"])
def test_what_does_not_hold_is_not_believed(
    filled: Path, lifted_site: LiftedSites, folder: str, harm: Callable[[Path], None]
) -> None:
    """It is said, the worker serves the call, and it is lifted anew."""
    (path,) = (filled / folder).iterdir()
    was = path.read_bytes()
    harm(path)
    site = lifted_site()
    assert next_path(site) in ("broker", "express")
    if harm is not Path.unlink:
        wait_until(lambda: [Path(event["file"]).name for event in site.events("lifted.ignored")][:1] == [path.name])
    x, values = randn(32, 32)
    close(lift(lambda: lz.silu(x)), silu(values))
    (again,) = (filled / folder).iterdir()
    assert again.name == path.name
    assert folder == "calls" or again.read_bytes() == was
    assert LiftStore(filled).verify() == []


@pytest.mark.parametrize("other", [{"LZ_SOFT_DRIVER": "580.1"}, {"LZ_SOFT_GPU": "another kind"}, "env"])
def test_what_is_of_another_machine_or_environment_is_left_alone(
    filled: Path, lifted_site: LiftedSites, other: Any
) -> None:
    """All that machine code depends on is in the key."""
    if other == "env":  # the descriptor stands for it: nothing is built for workers in the host's interpreter
        site = lifted_site()
        path = site.manifests / "one.json"
        path.write_text(path.read_text().replace('"backend_version": "1"', '"backend_version": "2"'))
    else:
        site = lifted_site(environ=other)
    assert next_path(site) in ("broker", "express")
    x, values = randn(32, 32)
    close(lift(lambda: lz.silu(x)), silu(values))
    assert len(list((filled / "calls").iterdir())) == 2
    assert len(list((filled / "code").iterdir())) == 1


def test_clearing_the_store_below_a_broker_costs_the_next_client_a_lifting(
    filled: Path, lifted_site: LiftedSites
) -> None:
    """Its memory of what was there is not believed either."""
    site = lifted_site().start()
    assert next_path(site) == "lifted"
    lz.disconnect()
    loaded.forget()
    assert LiftStore(filled).clear() == 1
    assert next_path(site) in ("broker", "express")
    x, values = randn(32, 32)
    close(lift(lambda: lz.silu(x)), silu(values))
    assert len(list((filled / "code").iterdir())) == 1


# --- lz cache


@pytest.fixture
def idle(filled: Path, lifted_site: LiftedSites) -> Site:
    """A broker's folder without one, and a store with a lifted call, a refused one, and a fault."""
    store = LiftStore(filled)
    store.add("f" * 64, Entry("one.gelu", "one", {}, reason="NOT_DETERMINISTIC", detail="two runs differ"), None)
    store.note_fault({"kernel": "one.matmul"}, "a process that had just launched it lost its GPU; lz cache forgive")
    return lifted_site()


def run(site: Site, *words: str) -> Any:
    return lz_command(site, "cache", *words, COLUMNS="80")


def test_the_list_shows_calls_and_faults_on_a_narrow_terminal(idle: Site, filled: Path) -> None:
    shown = run(idle, "list")
    assert shown.returncode == DONE, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("1 lifted, 1 refused, 0.0 MB in ")
    assert all(len(line) <= 80 for line in lines[1:-1])
    assert "one.silu" in shown.stdout
    assert "float32" in shown.stdout
    assert "one.gelu" in shown.stdout
    assert lines[-1].startswith("one.matmul: a process that had just launched it lost its GPU; lz cache forgive")
    told = data(run(idle, "list", "--json"))
    assert told["folder"] == str(filled)
    assert {(call["kernel_id"], call["reason"]) for call in told["calls"]} == {
        ("one.silu", ""),
        ("one.gelu", "NOT_DETERMINISTIC"),
    }
    assert [fault["kernel"] for fault in told["faults"]] == ["one.matmul"]
    assert idle.broker_pid is None


def test_verify_removes_what_does_not_hold_and_says_so(idle: Site, filled: Path) -> None:
    assert run(idle, "verify").stdout == "all of it holds\n"
    (code,) = (filled / "code").iterdir()
    flip(code)
    shown = run(idle, "verify")
    assert shown.returncode == FAILED
    (call,) = [line for line in shown.stdout.splitlines() if "call" in line]
    assert sorted(shown.stdout.splitlines()) == sorted([f"removed machine code {code.name[:12]}", call])
    assert data(run(idle, "verify", "--json")) == {"removed": [], "compile_caches": []}


def test_clear_keeps_faults_and_forgive_forgets_them(idle: Site, filled: Path) -> None:
    shown = run(idle, "clear")  # nobody answers its question
    assert shown.returncode != DONE
    assert len(list((filled / "calls").iterdir())) == 2
    assert run(idle, "clear", "--yes").stdout == "removed 2 calls\n"
    assert json.loads(run(idle, "list", "--json").stdout)["calls"] == []
    assert run(idle, "forgive").stdout == "forgiven: 1\n"
    assert data(run(idle, "forgive", "--json")) == {"forgiven": 0}
    assert "0 lifted, 0 refused" in run(idle, "list").stdout
    assert data(run(idle, "clear", "--yes", "--json")) == {"removed": 0, "plan_choices": 0, "tokenizers": 0}
