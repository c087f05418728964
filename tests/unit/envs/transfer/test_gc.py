"""gc removes what nobody asks for or uses, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from layerzero.capabilities.profiles import ALL, of_calls
from layerzero.envs.build.build import ensure, plan, resolve
from layerzero.envs.build.stage import staged_path
from layerzero.envs.build.store import open_lock
from layerzero.envs.matrix import kept
from layerzero.envs.probe.probe import record_path
from layerzero.envs.transfer.gc import collect


def folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "file").write_bytes(b"x" * 7)
    return path


def test_only_stale_and_unused_folders_go(tmp_path: Path) -> None:
    """A wrong removal costs a rebuild at best and a running worker at worst."""
    ensure("null", store=tmp_path)  # stages the current code
    current = folder(plan(resolve("mlx"), store=tmp_path).prefix)
    used = folder(tmp_path / "envs" / "mlx-0000000000000001")
    broken = tmp_path / "manifests" / "mine.toml"
    kept = folder(tmp_path / "envs" / "mine-0000000000000002")
    broken.parent.mkdir()
    broken.write_text("[")
    caches = folder(tmp_path / "caches" / current.name)
    stale = [
        folder(tmp_path / "caches" / "gone-0000000000000003"),
        folder(tmp_path / "envs" / ".building-mlx-0000000000000004-x_1"),
        folder(tmp_path / "envs" / "gone-0000000000000003"),
        folder(tmp_path / "stage" / "0000000000000005"),
    ]
    verdict = tmp_path / "probes" / "mlx-0000000000000006.json"  # on other code than today's
    folder(verdict.parent)
    verdict.write_bytes(b"x" * 7)
    lock = open_lock(used, shared=True)
    said = collect(tmp_path, [broken.parent], dry_run=True)
    assert all(path.exists() for path in (*stale, verdict))
    result = collect(tmp_path, [broken.parent])
    os.close(lock)
    assert result == said
    assert [item.path for item in result.removed] == [*stale, verdict]
    assert result.in_use == (used,)
    assert result.freed_bytes == 7 * (len(stale) + 1)
    assert all(path.is_dir() for path in (current, caches, used, kept, staged_path(tmp_path)))
    assert not any(path.exists() for path in stale)


def test_verdicts_on_profiles_stay_as_long_as_that_on_all_calls(tmp_path: Path) -> None:
    """They are of the same code; those of other code go."""
    manifest, profile = resolve("mlx"), of_calls("mine", [("silu", "float32")])
    whole, part = (record_path(plan(manifest, store=tmp_path), manifest, one) for one in (ALL, profile))
    stale = part.with_name(part.name.replace(part.name.partition("-")[2].partition("+")[0], "0000000000000006"))
    whole.parent.mkdir()
    for path in (whole, part, stale):
        path.touch()
    assert [item.path for item in collect(tmp_path).removed] == [stale]


def test_folder_of_a_live_build_stays(tmp_path: Path) -> None:
    """gc may run while another process builds."""
    live = folder(tmp_path / "envs" / ".building-mlx-0000000000000004-x")
    fd = open_lock(tmp_path / "envs" / "mlx-0000000000000004")
    result = collect(tmp_path)
    os.close(fd)
    assert (result.removed, result.in_use) == ((), (live,))


def test_what_the_matrix_left_goes(tmp_path: Path) -> None:
    """Environments that no test has used for a week, verdicts of last season, what killed runs and builders left."""
    for part in (kept.work, kept.tests, kept.cells):
        part(tmp_path).mkdir(parents=True)
    old, new = kept.cells(tmp_path) / "old.json", kept.cells(tmp_path) / "new.json"
    unused, used = folder(kept.tests(tmp_path) / "unused"), folder(kept.tests(tmp_path) / "used")
    files = [old, new, unused / kept.BUILT, used / kept.BUILT]
    for file in files:
        file.touch()
    for file in (old, unused / kept.BUILT):
        os.utime(file, (0, 0))
    left = [folder(kept.tests(tmp_path) / ".building-gone-x_1"), folder(kept.work(tmp_path) / "1-2")]
    live = folder(kept.work(tmp_path) / "3-4")
    lock = open_lock(live)
    said = {item.path for item in collect(tmp_path, dry_run=True).removed}
    assert all(path.exists() for path in said)
    removed = {item.path for item in collect(tmp_path).removed}
    os.close(lock)
    assert removed == said == {old, unused, *left}
    assert not any(path.exists() for path in removed)
    assert all(path.exists() for path in (new, used, live))
