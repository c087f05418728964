"""Compile caches across brokers and machines, with a worker whose kernel really compiles, and `lz cache`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.process.compiling import QUICK, provider
from tests.process.harness import Site, wait_until
from tests.process.test_cli import FAILED, data
from tests.process.test_cli import lz as lz_command
from tests.unit.ipc.test_compile_caches import flip

import layerzero as lz
from layerzero.envs import signing

ROW = QUICK


class Machines:
    """Sites with a store each, and the same backend, which compiles."""

    def __init__(self, new_site: Callable[..., Site], folder: Path) -> None:
        self._new, self._folder, self._count = new_site, folder, 0
        self.notes = folder / "notes"
        self.notes.mkdir()

    def make(self, store: str, **environ: str) -> Site:
        site = self._new()
        site.use_store(self._folder / store)
        env = {"LZ_JIT_CACHE": "{cache}/silu", "LZ_JIT_NOTES": str(self.notes)}
        site.add_backend("jit", provider=provider(), env=env, needs_jit=True, compiled_for=["row"])
        site.environ.update(environ)
        return site

    def call(self, site: Site) -> int:
        """Compile for a call and make it, in a broker of its own; how often its kernel was compiled for that."""
        before = self.compiled
        with site.start().connect() as session:
            x = np.linspace(-4, 4, 2 * ROW, dtype=np.float32).reshape(2, ROW)
            assert np.allclose(lz.silu(x, backend="jit"), x / (1 + np.exp(-x)))
            self.backend = site.backend("jit")
            session.ask("shutdown")
        lz.disconnect()
        wait_until(lambda: site.broker_pid is None)
        return self.compiled - before

    @property
    def compiled(self) -> int:
        compiled = self.notes / "compiled"
        rows = compiled.read_text().splitlines() if compiled.exists() else []
        return sum(line.split()[0] == str(ROW) for line in rows)

    def cache(self, store: str) -> Path:
        (folder,) = (self._folder / store / "caches").glob("jit-*/*")
        return folder


@pytest.fixture
def machines(new_site: Callable[..., Site], tmp_path: Path) -> Machines:
    return Machines(new_site, tmp_path)


def test_a_cache_is_carried_and_used_and_damage_is_set_aside(machines: Machines, tmp_path: Path) -> None:
    """To machines with equal locks, by import and by a folder that a fleet reads."""
    first, folder, keys = machines.make("first"), tmp_path / "for-others", tmp_path / "keys"
    assert machines.call(first) == 1
    signing.make(tmp_path / "ci.key")
    made = data(lz_command(first, "cache", "export", str(folder), "--key", str(tmp_path / "ci.key"), "--json"))
    (row,) = made["caches"]
    assert row["units"] == 1

    second = machines.make("second", LAYERZERO_KEYS=str(keys))
    refused = lz_command(second, "cache", "import", str(folder))
    assert refused.returncode == FAILED
    assert "trust its key" in refused.stderr
    signing.trust(keys, "ci", tmp_path / "ci.key.pub")
    took = data(lz_command(second, "cache", "import", str(folder), "--json"))
    assert took["left"] == []
    assert [(one["name"], one["signer"], one["new"]) for one in took["taken"]] == [("jit", "ci", row["files"])]
    assert machines.call(second) == 0

    cache = machines.cache("second")
    flip(cache / "silu" / f"silu_{ROW}.pyc")
    (cache / "silu" / "planted.pyc").write_bytes(b"evil")
    assert machines.call(second) == 1  # anew, though it was noted to be compiled
    assert machines.backend["cache"] == {"folder": str(cache), "set_aside": 2}
    said = [event["stderr_tail"] for event in second.events("worker.exited") if event["backend"] == "jit"]
    assert f"changed: silu/silu_{ROW}.pyc; not sealed: silu/planted.pyc" in said[-1]
    lines = lz_command(second, "cache", "list", COLUMNS="80").stdout.splitlines()[:3]
    assert "2 set aside" in lines[1]
    assert lines[2] == f"  {cache.name}"
    assert max(map(len, lines)) <= 80

    second.environ["LAYERZERO_KEEP_COMPILED"] = "false"
    assert machines.call(second) >= 1
    assert not (cache / ".lz/manifest.json").exists()

    third = machines.make("third", LAYERZERO_KEYS=str(keys), LAYERZERO_SHARED_CACHE=str(folder))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert machines.call(third) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_gc_says_what_it_would_remove(machines: Machines, tmp_path: Path) -> None:
    """A bound that is exceeded; without a broker."""
    site = machines.make("store")
    for number in range(2):
        folder = tmp_path / "store" / "caches" / f"env{number}-0123456789abcdef" / "x86_64-cpu"
        (folder / ".lz").mkdir(parents=True)
        (folder / "code").write_bytes(bytes(3 << 20))
        (folder / ".lz/lock").touch()
        os.utime(folder / ".lz/lock", (number + 1, number + 1))
    told = lz_command(site, "cache", "gc", "--max-mib", "4", "--dry-run", COLUMNS="80")
    assert told.stdout.splitlines() == ["would remove env0, 3.1 MB", "  x86_64-cpu"]
    removed = json.loads(lz_command(site, "cache", "gc", "--max-entries", "1", "--json").stdout)["removed"]
    assert [one["name"] for one in removed] == ["env0"]
