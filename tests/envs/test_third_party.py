"""examples/third-party-backend, as docs/adding-a-backend.md has it: wheel, allow, build, call; and what stops it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.envs.harness import STORE
from tests.envs.wheels import unpack
from tests.process import forks
from tests.process.harness import ROOT, Site, wait_ended, wait_until

import layerzero as lz

EXAMPLE = ROOT / "examples" / "third-party-backend"
RNG = np.random.default_rng(5)
A, B = (RNG.standard_normal(shape, np.float32) for shape in ((3, 33, 40), (40, 17)))
Lz = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, as its author would publish it."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(EXAMPLE, folder / "source")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", folder, folder / "source"],
        check=True,
        capture_output=True,
    )
    return next(folder.glob("lz_blis-*.whl"))


@pytest.fixture
def site(new_site: Callable[..., Site], wheel: Path) -> Site:
    """A broker's folder whose interpreter has the wheel installed."""
    made = new_site()
    made.environ["LAYERZERO_STORE"] = str(STORE)
    packages = made.folder / "site-packages"
    unpack(wheel, packages)
    made.environ["PYTHONPATH"] = os.pathsep.join([str(packages), str(ROOT / "src"), str(ROOT)])
    return made


@pytest.fixture
def lz_env(site: Site) -> Lz:
    """Run `lz env ...`."""

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "layerzero.client.cli.app", "env", *map(str, words)]
        with site.environment():
            return forks.run(command, env=os.environ)

    return run


def restart(site: Site) -> None:
    """A new broker reads the backends anew."""
    lz.disconnect()
    pid = site.broker_pid
    if pid is not None:
        os.kill(pid, 15)
        wait_ended(pid)
    site.start()
    site.connect()


def reasons(failure: lz.NoBackend) -> dict[str, list[tuple[str, str]]]:
    return {one.kernel_id: [(r.code, str(r)) for r in one.reasons] for one in failure.report.candidates}


def test_installed_backend_serves_when_it_is_allowed_and_built_and_not_after_it_has_changed(
    site: Site, lz_env: Lz
) -> None:
    """From pip install to a right answer, with the refusals on the way."""
    restart(site)
    with pytest.raises(lz.NoBackend) as refused:
        lz.matmul(A, B, backend="blis")
    ((code, detail),) = reasons(refused.value)["blis.matmul"]
    assert code == "SOURCE_NOT_ALLOWED"
    for fact in ("kernel_sources", "lz-blis 0.1.0", "sha256:", "repair: lz env add blis"):
        assert fact in detail
    assert lz_env("build", "blis").returncode == 1

    (added,) = json.loads(lz_env("add", "blis", "--json").stdout)["added"]
    assert added["sha256"] in detail
    assert added["files"] == ["blis.cpu.txt", "blis.json", "blis.toml", "provider.py"]
    built = lz_env("build", "blis")
    assert built.returncode == 0, built.stdout + built.stderr
    lz.connect(runtime_dir=site.folder).ask("reset", backend="blis")

    out = lz.matmul(A, B, backend="blis")
    assert lz.last_report().kernel_id == "blis.matmul"
    np.testing.assert_allclose(out, A.astype(np.float64) @ B.astype(np.float64), rtol=1e-4, atol=1e-4)
    lz.linear(A[0], B.T.copy(), backend="blis")
    assert lz.last_report().backend == "blis"

    provider = site.folder / "site-packages" / "lz_blis" / "provider.py"
    provider.write_text(provider.read_text() + "\n# an upgrade\n")
    os.kill(site.backend("blis")["pid"], 9)
    wait_until(lambda: site.backend("blis")["state"] == "disabled")
    assert "have changed" in site.backend("blis")["cause"]
    restart(site)
    with pytest.raises(lz.NoBackend) as changed:
        lz.matmul(A, B, backend="blis")
    ((code, detail),) = reasons(changed.value)["blis.matmul"]
    assert code == "SOURCE_CHANGED"
    assert added["sha256"] in detail

    (again,) = json.loads(lz_env("add", "blis", "--json").stdout)["added"]
    assert (again["before"], again["sha256"] in detail) == (added["sha256"], True)
    restart(site)
    assert lz.matmul(A, B, backend="blis").shape == out.shape
    checks = {check["name"]: check for check in site.connect().ask("readiness")["checks"]}
    assert f"blis of lz-blis 0.1.0, installed in {provider.parent}: allowed" in checks["kernel sources"]["detail"]


def test_kernels_from_outside_are_certified_as_ours_are(site: Site, lz_env: Lz) -> None:
    """BLIS adds to its output unless told otherwise, and multiplies float64 by a transposed matrix wrongly: what an
    author may overlook is found by the probe, class by class, and never serves."""
    folder = site.folder / "careless"
    shutil.copytree(EXAMPLE / "src" / "lz_blis", folder)
    provider, descriptor = folder / "provider.py", folder / "blis.json"
    provider.write_text(provider.read_text().replace("out=product, beta=0.0", "out=product"))
    claims: dict[str, Any] = json.loads(descriptor.read_text())
    claims["ops"]["linear"][0]["dtypes"] = ["float32", "float64"]
    descriptor.write_text(json.dumps(claims))
    assert lz_env("add", folder).returncode == 0
    (row,) = json.loads(lz_env("build", "blis", "--json").stdout)["environments"]
    certified = {kernel: sorted(dtypes) for kernel, dtypes in row["probe"]["certified"].items()}
    assert certified["blis.matmul"] == []
    assert "float32" in certified["blis.linear"]
    wrong = {(one["kernel_id"], one["dtype"]) for one in row["probe"]["failures"]}
    assert {("blis.matmul", "float32"), ("blis.linear", "float64")} <= wrong
    restart(site)
    with pytest.raises(lz.NoBackend, match="NOT_CERTIFIED"):
        lz.matmul(A, B, backend="blis")


def test_wheel_is_added_without_being_installed(site: Site, lz_env: Lz, wheel: Path) -> None:
    """For an application whose environment is not to be touched. Taken back, it is gone."""
    site.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    assert lz_env("add", wheel).returncode == 0
    assert lz_env("build", "blis").returncode == 0
    restart(site)
    lz.matmul(A, B, backend="blis")
    assert lz.last_report().backend == "blis"
    assert lz_env("remove", "blis").returncode == 0
    unknown = lz_env("build", "blis")
    assert unknown.returncode == 2
    assert "unknown: blis" in unknown.stderr
