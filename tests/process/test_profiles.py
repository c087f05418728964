"""A broker with a profile: calls outside of it are neither probed nor served, and everybody says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.process import test_cli
from tests.process.harness import Site, wait_until
from tests.process.join_site import Agent

import layerzero as lz
from layerzero.client.session.settings_check import SettingWarning

Sites = Callable[..., Site]
WIDER = "lz down, then LAYERZERO_PROFILE=all lz up"
MINE = {"schema": 1, "calls": {"silu": ["float32"]}}


def a_site(new_site: Sites, tmp_path: Path, profile: str = "mine", **settings: object) -> Site:
    """Not started, with a backend that has silu in float32 and float64; the profile `mine` has float32 alone."""
    site = new_site(profile=profile, **settings)
    site.environ["LAYERZERO_STORE"] = str(tmp_path)
    site.add_backend("wide", dtypes=["float32", "float64"])
    (tmp_path / "profiles").mkdir(exist_ok=True)
    (tmp_path / "profiles" / "mine.json").write_text(json.dumps(MINE))
    return site


@pytest.fixture
def site(new_site: Sites, tmp_path: Path) -> Site:
    return a_site(new_site, tmp_path).start()


def test_a_call_outside_of_the_profile_is_refused_with_the_reason(site: Site) -> None:
    """Of its op or of its dtype; what belongs to it is served. Who sets another one for a program is told."""
    narrow = np.ones(4, "float32")
    site.environ["LAYERZERO_PROFILE"] = "nlp"
    with pytest.warns(SettingWarning, match="serves the profile mine; LAYERZERO_PROFILE here names nlp; run: lz down"):
        session = site.connect()
    with session:
        lz.silu(narrow, backend="wide")
        found = {
            one.backend: [str(reason) for reason in one.reasons]
            for one in lz.explain("silu", narrow.astype(float)).candidates
        }
        assert found["wide"] == [
            f"NOT_IN_PROFILE: profile mine has silu in float32, and not in float64; repair: {WIDER}"
        ]
        with pytest.raises(lz.NoBackend, match="NOT_IN_PROFILE: profile mine has no gelu"):
            lz.gelu(narrow)
        warmed = lz.warmup()
        assert "gelu" in " ".join(warmed.left_out)


def test_the_probe_of_a_profile_is_of_its_calls_alone(site: Site) -> None:
    """One record for each profile; that of all calls holds for every one."""
    probed = json.loads(test_cli.lz(site, "env", "probe", "wide", "--json", LAYERZERO_PROFILE="mine").stdout)
    (row,) = probed["environments"]
    assert row["probe"]["profile"] == "mine"
    assert {kernel: list(dtypes) for kernel, dtypes in row["probe"]["certified"].items()} == {
        "wide.silu": ["float32"],
        "wide.null": ["any"],
    }
    shown = json.loads(test_cli.lz(site, "ops", "silu", "matmul", "--json", LAYERZERO_PROFILE="mine").stdout)["ops"]
    rows = {row["kernel_id"]: row for rows in shown.values() for row in rows}
    wide, alpha = rows["wide.silu"], rows["alpha.matmul"]
    assert (wide["state"], wide["outside"], list(wide["certified"])) == ("certified", ["float64"], ["float32"])
    assert (alpha["state"], alpha["cause"]) == ("not probed", "profile mine")


def certified_where_joined(site: Site) -> int:
    """How many classes the agent of `wide` certified for the site's broker, but that of null."""
    site.start()
    agent = Agent(site, "wide")
    try:
        with site.connect():
            wait_until(lambda: site.backend("wide")["state"] == "ready")
            assert lz.silu(np.ones(4, "float32"), backend="wide").shape == (4,)
        lines = map(json.loads, (site.folder / "broker.log").read_text().splitlines())
        (found,) = [line["certified"] for line in lines if line["event"] == "agent.certified"]
        return int(found) - 1
    finally:
        agent.end()


def test_a_joined_worker_is_probed_on_the_calls_of_the_profile(new_site: Sites, tmp_path: Path) -> None:
    """Its agent is told which: of silu the classes of one dtype, or those of both."""
    mine, both = (
        certified_where_joined(a_site(new_site, tmp_path, joined="wide", profile=name)) for name in ("mine", "all")
    )
    assert both == 2 * mine > 0
