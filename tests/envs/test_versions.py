"""Two versions of ONNX Runtime side by side, in real environments: built, certified, called, compared, removed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.envs.harness import STORE
from tests.process.harness import Site
from tests.process.test_cli import data
from tests.process.test_cli import lz as command

import layerzero as lz
from layerzero.envs.build import build

OLD = "onnxruntime@1.16.3"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A broker that runs before the version is declared. Its store has ONNX Runtime and the verdict on it of the tests'
    own store, and versions that nobody else sees."""
    store = tmp_path_factory.mktemp("store")
    env = build.ensure(build.resolve("onnxruntime"), store=STORE)
    (store / "envs").mkdir()
    (store / "envs" / env.prefix.name).symlink_to(env.prefix)
    if (STORE / "probes").is_dir():
        shutil.copytree(STORE / "probes", store / "probes")
    one = Site(store)
    del one.environ["LAYERZERO_MANIFEST_DIRS"]
    one.start().connect()
    yield one
    lz.disconnect()
    one.stop()


@pytest.fixture(scope="module")
def built(site: Site) -> dict[str, Any]:
    """The row of `lz env build onnxruntime@1.16`."""
    (row,) = data(command(site, "env", "build", "onnxruntime@1.16", "--json"))["environments"]
    return row


@pytest.fixture(scope="module")
def x() -> Any:
    return lz.share(np.random.default_rng(3).standard_normal((64, 256)).astype("float32"))


@pytest.mark.timeout(300)  # it may have to download it
def test_a_series_becomes_its_newest_release_which_is_locked_and_certified(built: dict[str, Any], site: Site) -> None:
    assert (built["name"], built["ok"]) == (OLD, True)
    assert built["classes"][0] > 100
    lock = (Path(site.environ["LAYERZERO_STORE"]) / "versions" / f"{OLD}.cpu.txt").read_text()
    assert "onnxruntime==1.16.3" in lock
    assert "--hash=sha256:" in lock
    assert built["probe"]["versions"]["onnxruntime"] == "1.16.3"
    assert set(built["probe"]["certified"]) >= {f"{OLD}.softmax", f"{OLD}.matmul"}


def test_calls_name_them_and_a_running_broker_knows_them(built: dict[str, Any], x: Any) -> None:
    old = lz.softmax(x, dim=-1, backend=OLD)
    assert (report := lz.last_report()) is not None
    assert (report.kernel_id, report.backend) == (f"{OLD}.softmax", OLD)
    new = lz.softmax(x, dim=-1, backend="onnxruntime")
    np.testing.assert_allclose(old, new, rtol=1e-5, atol=1e-7)


def test_policies_name_them_at_once_in_a_broker_that_ran_before(built: dict[str, Any], x: Any) -> None:
    """It reads its policy when the file changes, and callers' wishes with the names that it knew then."""
    with lz.prefer(OLD):
        lz.softmax(x, dim=-1)
        assert (report := lz.last_report()) is not None
        assert report.backend == OLD
    report_of_both = lz.compare("softmax", x, dim=-1, backends=["onnxruntime", "onnxruntime@1.16"], budget_s=0.2)
    assert report_of_both.is_equal, report_of_both


def test_calls_that_name_none_are_served_by_the_default(built: dict[str, Any], x: Any) -> None:
    lz.softmax(x, dim=-1)
    assert (report := lz.last_report()) is not None
    assert report.backend == "onnxruntime"
    refused = next(one for one in lz.explain("softmax", x, dim=-1).candidates if one.backend == OLD)
    assert [reason.code for reason in refused.reasons] == ["VERSION_NOT_NAMED"]


def test_status_and_list_name_it_with_its_own_state(built: dict[str, Any], site: Site, x: Any) -> None:
    rows = {row["name"]: row for row in data(command(site, "env", "list", "--json"))["environments"]}
    assert (rows[OLD]["state"], rows[OLD]["python"], rows["onnxruntime"]["state"]) == ("built", "3.11", "built")
    assert rows[OLD]["id"] != rows["onnxruntime"]["id"]
    for name in (OLD, "onnxruntime"):
        lz.softmax(x, dim=-1, backend=name)  # what a worker has loaded it has said
    row = site.backend(OLD)
    assert row["versions"]["onnxruntime"] == "1.16.3"
    assert site.backend("onnxruntime")["versions"]["onnxruntime"] == "1.18.1"


def test_building_it_again_asks_no_index(built: dict[str, Any], site: Site) -> None:
    """The newest that is declared is meant, not the newest that there is."""
    nowhere = {"UV_INDEX_URL": "http://127.0.0.1:9/simple", "UV_OFFLINE": "1"}
    (row,) = data(command(site, "env", "build", "onnxruntime@1.16", "--json", **nowhere))["environments"]
    assert (row["name"], row["id"], row["probe_is_kept"]) == (OLD, built["id"], True)


def test_a_version_that_there_is_not_says_which_there_are(site: Site) -> None:
    said = command(site, "env", "add", "onnxruntime@9")
    assert said.returncode == 1
    assert said.stderr.startswith("onnxruntime@9: looking for a release for Python")
    assert "no release of onnxruntime 9 has a wheel for Python" in said.stderr
    assert command(site, "env", "remove", "onnxruntime@9").returncode == 1
