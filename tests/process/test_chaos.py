"""`lz bench chaos` for half a minute: all kinds of faults, real processes, and a history that keeps every promise."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.process import forks
from tests.process.harness import BACKENDS, ROOT

from layerzero.client.chaos.schedule import DECK

SEED, SECONDS, GAP_S = 7, 20.0, 0.55  # more faults than the deck has cards: each kind strikes
LIMIT_S = 280.0
LOST_S = 20.0  # a call that was open when the broker was killed knows, long before its deadline; else in milliseconds


def lz(environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return forks.run([sys.executable, "-m", "layerzero.client.cli.app", *words], env=environ, timeout_s=LIMIT_S)


@pytest.fixture
def environ(store: Path, tmp_path: Path) -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "PYTHONPATH": f"{ROOT / 'src'}",
        "LAYERZERO_STORE": str(store),
        "LAYERZERO_MANIFEST_DIRS": str(BACKENDS),
    }


@pytest.mark.long
@pytest.mark.timeout(3 * LIMIT_S)
def test_every_call_ends_once_and_right_whatever_is_broken(environ: dict[str, str], tmp_path: Path) -> None:
    """The promise of the whole thing, under kills, stops, slowness and hang-ups of each kind of process."""
    kept = tmp_path / "history"
    words = ["--seed", str(SEED), "--minutes", str(SECONDS / 60), "--gap", str(GAP_S), "--clients", "4"]
    for name in ("alpha", "beta", "gamma", "null"):
        words += ["--backend", name]
    done = lz(environ, "bench", "chaos", *words, "--history", str(kept), "--json")
    found = json.loads(done.stdout)
    assert (found["violations"], done.returncode) == ([], 0), done.stderr
    assert set(found["by_backend"]) == {"alpha", "beta", "gamma", "null"}
    assert found["outcomes"]["OK"] > 200
    struck = {name.partition(":")[0] for name in found["faults"]}
    assert struck == {f"{role} {kind}" for role, kinds in DECK.items() for kind in kinds}
    assert sum(count for name, count in found["faults"].items() if name.endswith(": done")) > len(struck)
    assert found["broker_lost_s"].get("max", 0.0) < LOST_S

    # The checker is a program of its own: what it says of the kept history it says again, and of a spoilt one not.
    assert lz(environ, "bench", "check", str(kept)).returncode == 0
    victim = max(kept.glob("client-*.jsonl"), key=lambda path: path.stat().st_size)
    spoilt = tmp_path / "spoilt"
    shutil.copytree(kept, spoilt)
    lines = victim.read_text().splitlines(keepends=True)
    ok = next(n for n, line in enumerate(lines) if '"outcome":"OK"' in line)
    (spoilt / victim.name).write_text("".join([*lines[: ok + 1], lines[ok], *lines[ok + 1 :]]))
    again = lz(environ, "bench", "check", str(spoilt), "--json")
    assert again.returncode == 1
    assert json.loads(again.stdout)["violation_counts"] == {"duplicate": 1}


def test_a_run_needs_a_new_folder_and_backends_that_are_there(environ: dict[str, str], tmp_path: Path) -> None:
    """Two histories in one folder would be checked as one; a run without load would keep every promise."""
    (tmp_path / "something").touch()
    done = lz(environ, "bench", "chaos", "--history", str(tmp_path))
    assert done.returncode == 1
    assert "is not empty" in done.stderr
    done = lz(environ, "bench", "chaos", "--backend", "alhpa")
    assert done.returncode == 1
    assert "alhpa" in done.stderr
    assert "alpha" in done.stderr
