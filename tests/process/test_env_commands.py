"""`lz env`: what it refuses, and what it says of it. Backends of these tests run in our own interpreter: nothing is
downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.process.harness import Site
from tests.process.test_cli import DONE, FAILED, USAGE, data, lz

Sites = Callable[..., Site]


@pytest.fixture
def site(new_site: Sites) -> Site:
    return new_site()


def rows(finished: Any, code: int) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in data(finished, code)["environments"]}


# --- descriptors that no broker would take

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a misspelt field": (
        {"require_contiguous": True},
        "odd.json: ops.silu.0.require_contiguous: unknown field require_contiguous; did you mean requires_contiguous?",
    ),
    "an op that does not exist": ({}, "odd.json: ops.sliu: no op is called so; did you mean 'silu'?"),
}


@pytest.fixture(params=MISTAKES)
def mistaken(request: pytest.FixtureRequest, site: Site) -> tuple[Site, str]:
    """A site whose backend `odd` has a mistake in its descriptor, and what must be said of it."""
    claims, said = MISTAKES[request.param]
    site.add_backend("odd", **claims)
    if not claims:
        path = site.manifests / "odd.json"
        path.write_text(path.read_text().replace('"silu": [', '"sliu": ['))
    return site, said


@pytest.mark.parametrize("verb", ["build", "probe"])
def test_a_descriptor_that_no_broker_takes_is_refused_before_anything_is_probed(
    mistaken: tuple[Site, str], verb: str
) -> None:
    """Else it is "ok, 24 certified", and then every call says that there is no such backend."""
    site, said = mistaken
    row = rows(lz(site, "env", verb, "odd", "alpha", "--json"), FAILED)
    assert row["alpha"]["ok"]
    assert (row["odd"]["ok"], row["odd"]["stage"], "probe" in row["odd"]) == (False, "descriptor", False)
    assert row["odd"]["repair"] == f"mend {site.manifests / 'odd.json'}"
    assert said in row["odd"]["cause"]
    shown = lz(site, "env", verb, "odd")
    assert "descriptor failed" in shown.stdout
    assert said in shown.stdout


def test_list_and_lock_refuse_such_a_descriptor_too(mistaken: tuple[Site, str]) -> None:
    """Whoever looks for what is wrong asks these first."""
    site, said = mistaken
    row = rows(lz(site, "env", "list", "--json"), DONE)["odd"]
    assert (row["state"], said in row["cause"]) == ("refused", True)
    locked = lz(site, "env", "lock", "odd")
    assert (locked.returncode, said in locked.stderr) == (FAILED, True)


def test_the_broker_says_that_the_descriptor_was_refused(mistaken: tuple[Site, str]) -> None:
    """A backend that is built, and of which calls and `lz doctor` say that nothing is called so."""
    site, said = mistaken
    site.start()
    for words in (("run", "silu", "8:float32", "-b", "odd"), ("explain", "silu", "8:float32", "-b", "odd")):
        refused = lz(site, *words)
        assert refused.returncode == USAGE
        assert "no backend is called 'odd': its descriptor was refused: " in refused.stderr
        assert said in refused.stderr
    for words in (("doctor", "odd"), ("restart", "odd"), ("status", "-b", "odd")):
        assert said in lz(site, *words).stderr
