"""What one does with a capsule: look at it, make its call again, smaller or under gdb, share it, read
somebody else's."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import tarfile
from pathlib import Path

import numpy as np
import pytest
from tests.backends.toy import SEGV, fault
from tests.process.capsule_site import Sites, capsules, crash, deadly, kept, new, only
from tests.process.harness import Site, is_running, processes
from tests.process.test_cli import DONE, FAILED, USAGE, data, lz

import layerzero as lz_
from layerzero.client.capsules import form, store
from layerzero.client.tools.replay import own_broker
from layerzero.ipc.errors import InvalidArgument

__all__ = ["capsules", "kept", "new"]


def test_a_call_is_made_smaller_as_long_as_it_fails(new: Sites, capsules: Path) -> None:
    """The number that kills is what is left; gaps between rows, which the whole has, stay."""
    site = new()
    site.connect()
    x = deadly(SEGV, 3, 6)[:, :4]
    crash(x)
    name = only(capsules).name
    found = data(lz(site, "replay", name, "--shrink", "--json"))
    assert (found["from"], found["why"], found["shapes"]) == (name, "signal 11", {"x": [1, 1]})
    assert found["tries"] < 20
    small = form.read(capsules / found["capsule"])
    assert (small.arguments[0].spec.shape, small.facts["shrunk_from"]) == ((1, 1), name)
    assert np.frombuffer(form.memory(capsules / small.name, small)[0], np.float32)[0] == fault(SEGV, "alpha")


def test_replay_makes_the_call_again_on_every_backend(kept: tuple[Site, form.Capsule]) -> None:
    """The one that died dies each time, the others give the same numbers; exit code 1 says so. Nothing is left."""
    site, capsule = kept
    done = lz(site, "replay", capsule.name, "--env", "all", "--times", "3", "--json")
    rows = {row["backend"]: row for row in data(done, FAILED)["backends"]}
    assert rows["alpha"]["runs"] == {f"signal {int(signal.SIGSEGV)}": 3}
    assert set(rows) == {"alpha", "beta", "gamma"}, "what cannot serve on this machine is no failure"
    for name in ("beta", "gamma"):
        assert rows[name]["runs"] == {"ok": 3}
        assert rows[name]["is_same"]
        assert not rows[name]["is_far"]
    healthy = lz(site, "replay", capsule.name, "-b", "beta", "-n", "2")
    assert healthy.returncode == DONE, healthy.stderr
    assert "ok 2" in healthy.stdout
    assert max(map(len, healthy.stdout.splitlines())) <= 100


def test_the_broker_of_a_replay_ends_with_it(new_site: Sites) -> None:
    """It went on for a second, and now and then wrote to its folder as that was removed, which cost the result."""
    with new_site().environment(), own_broker() as session:
        folder, pid = Path(os.environ["LAYERZERO_RUNTIME_DIR"]), session.broker_pid
        lz_.silu(np.zeros(4, np.float32), backend="alpha")
    assert not is_running(pid)
    assert not folder.exists()
    assert not processes(folder)


def test_list_show_and_remove(kept: tuple[Site, form.Capsule]) -> None:
    site, capsule = kept
    kept_in, rows = (data(lz(site, "capsule", "list", "--json"))[key] for key in ("folder", "capsules"))
    assert [row["name"] for row in rows] == [capsule.name]
    damaged = Path(kept_in) / f"{capsule.name}-damaged"
    shutil.copytree(Path(kept_in) / capsule.name, damaged)
    (damaged / form.CALL).write_text("{")
    listed = lz(site, "capsule", "list")
    assert re.search(rf"{damaged.name} +- +cannot be read *\n", listed.stdout), "in one line, too"
    assert f"{damaged.name}: " in listed.stderr
    shutil.rmtree(damaged)
    assert capsule.name in lz(site, "capsule", "list").stdout, "in one line, to be copied"
    shown = lz(site, "capsule", "show", capsule.name[:20])
    assert shown.returncode == DONE, shown.stderr
    for text in ("silu(3x5:float32)", "alpha.silu", "60 bytes", "Fatal Python error: Segmentation fault"):
        assert text in shown.stdout
    missing = lz(site, "capsule", "show", "nonsense")
    assert missing.returncode == USAGE
    assert "lz capsule list has all" in missing.stderr
    assert lz(site, "capsule", "remove", capsule.name).returncode == DONE
    assert data(lz(site, "capsule", "list", "--json"))["capsules"] == []


def test_a_shared_capsule_runs_elsewhere_and_without_data_has_none(
    kept: tuple[Site, form.Capsule], tmp_path: Path
) -> None:
    site, capsule = kept
    whole, bare = tmp_path / "whole.tar.gz", tmp_path / "bare.tar.gz"
    assert lz(site, "capsule", "share", capsule.name, str(whole)).returncode == DONE
    assert lz(site, "capsule", "share", capsule.name, str(bare), "--no-data").returncode == DONE
    with tarfile.open(bare) as packed:
        assert not [name for name in packed.getnames() if name.endswith((".bin", ".log"))]
        told = packed.extractfile(f"{capsule.name}/{form.CALL}")
        assert told is not None
        assert "silu(3x5:float32) -> 3x5:float32, alpha.silu: had not ended" in told.read().decode()
    again = lz(site, "capsule", "share", capsule.name, str(bare))
    assert again.returncode == USAGE
    assert "is there already" in again.stderr
    assert lz(site, "capsule", "remove", "--all").returncode == DONE
    rows = data(lz(site, "replay", str(whole), "--json"), FAILED)["backends"]
    assert rows[0]["runs"] == {f"signal {int(signal.SIGSEGV)}": 1}
    rows = data(lz(site, "replay", str(bare), "--json"))["backends"]
    assert rows[0]["runs"] == {"ok": 1}, "random numbers do not ask for a fault"


# --- capsules of others


def test_damaged_capsules_are_refused_by_name(kept: tuple[Site, form.Capsule], capsules: Path) -> None:
    site, capsule = kept
    folder = capsules / capsule.name
    memory = folder / form.memory_name(0)
    memory.write_bytes(b"x" * memory.stat().st_size)
    done = lz(site, "replay", capsule.name)
    assert done.returncode == USAGE
    assert "the capsule is damaged" in done.stderr
    call = json.loads((folder / form.CALL).read_text())
    for change in (
        {"schema": 3},
        {"schema": 2, "device": "tpu"},
        {"op": "function"},
        {"op": "rm"},
        {"segments": [{"nbytes": -1, "offset": 0, "sha256": ""}]},
        {"segments": []},
        {"arguments": [{**call["arguments"][0], "start": 8}]},
        {"arguments": [{**call["arguments"][0], "name": "../x"}]},
        {"failures": []},
        {"params": 3},
    ):
        (folder / form.CALL).write_text(json.dumps({**call, **change}))
        with pytest.raises(InvalidArgument, match="damaged"):
            form.read(folder)
    (folder / form.CALL).unlink()
    os.mkfifo(folder / form.CALL)
    with pytest.raises(InvalidArgument, match="no capsule"):
        form.read(folder)


@pytest.mark.parametrize(
    "name", ["../out/call.json", "/abs/call.json", "a/b/call.json", "a/other.json", "a/call.json "]
)
def test_archives_write_nothing_beside_a_capsules_files(tmp_path: Path, name: str) -> None:
    archive, target = tmp_path / "bad.tar.gz", tmp_path / "in"
    target.mkdir()
    source = tmp_path / "source"
    source.write_text("{}")
    with tarfile.open(archive, "w:gz") as packed:
        info = packed.gettarinfo(str(source))
        info.name = name
        with source.open("rb") as file:
            packed.addfile(info, file)
    with pytest.raises(InvalidArgument, match="no capsule"):
        store.unpack(archive, target)
    assert list(tmp_path.glob("out*")) == []
    assert [path for path in target.rglob("*") if path.is_file()] == []


@pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb is not installed")
def test_gdb_shows_where_a_worker_dies_or_hangs(new: Sites, capsules: Path, tmp_path: Path) -> None:
    """The stacks are of the worker, at its signal; a core dump is its user's alone."""
    site = new()
    site.connect()
    crash(deadly(SEGV, 3, 5))
    name = only(capsules).name
    core = tmp_path / "core"
    done = lz(site, "replay", name, "--under", "coredump", "--core", str(core))
    if "gdb cannot look" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == FAILED, done.stderr
    assert "SIGSEGV" in done.stdout
    assert "string_at" in done.stdout or "memcpy" in done.stdout or "PyBytes" in done.stdout
    assert core.read_bytes()[:4] == b"\x7fELF"
    assert stat.S_IMODE(core.stat().st_mode) == 0o600
