"""Shadow checks with a real broker and real workers: what a client finds out about a kernel that starts to differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process.harness import BACKENDS, Site, wait_until
from tests.process.test_cli import FAILED, data
from tests.process.test_cli import lz as command

import layerzero as lz
from layerzero.client.capsules import form
from layerzero.client.capsules import store as capsules
from layerzero.ipc.errors import InvalidArgument

# Right for the probe's cases, wrong by 1 percent from the 6th run on X on: a library that wears out.
WEARS_OUT = (BACKENDS / "toy.py").read_text().replace(
    "            write(x / (1 + np.exp(-x)))",
    "            _silu.count = getattr(_silu, 'count', 0) + (x.flat[0] == 0.5)\n"
    "            write(x / (1 + np.exp(-x)) * (1.01 if x.flat[0] == 0.5 and _silu.count > 5 else 1))",
)  # fmt: skip
X = np.full((3, 7), 0.5, np.float32)
Told = list[dict[str, Any]]


@pytest.fixture
def site(store: Path) -> Iterator[Site]:
    site = Site(store)
    site.add_backend("worn", priority=90, provider=WEARS_OUT)
    yield site.start()
    lz.disconnect()
    site.stop()


def listen(session: lz.Session, monkeypatch: pytest.MonkeyPatch) -> Told:
    """What the session's shadow checks tell the broker, instead of telling it."""
    told: Told = []
    ask = session.ask

    def heard(method: str, **params: Any) -> Any:
        if method != "shadow":
            return ask(method, **params)
        told.append(params)
        return {"is_beyond": params["error"] > 2e-5}

    monkeypatch.setattr(session, "ask", heard)
    return told


def test_kernel_that_starts_to_differ_is_told_of(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has the bytes, so it compares; inputs and output are copied, and the report says so."""
    session = site.connect()
    told = listen(session, monkeypatch)
    site.wait_ready("worn", "beta")
    session.shadow.references = ("beta",)
    session.shadow.rate = 1.0
    for done in range(1, 11):
        lz.silu(X)
        wait_until(lambda done=done: len(told) >= done - 1)  # the first call after the rate was set is not sampled
    assert [params["error"] > 2e-5 for params in told] == [False] * 4 + [True] * 5
    assert {(params["kernel_id"], params["reference"]) for params in told} == {("worn.silu", "beta.silu")}
    report = lz.last_report()
    assert report is not None
    assert [(copy.arg, copy.nbytes) for copy in report.copies if copy.reason == "sampled shadow check"] == [
        ("x", X.nbytes),
        ("out", X.nbytes),
    ]
    wait_until(lambda: session.shadow.counts["compared"] == 9)
    assert session.shadow.counts == {"compared": 9, "beyond": 5}


def test_a_wrong_result_is_kept_and_made_again(site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the arguments as they were, although the caller has changed them since."""
    site.environ |= {"LAYERZERO_CAPSULE_DIR": str(tmp_path), "LAYERZERO_CAPSULES": "small"}
    session = site.connect()
    listen(session, monkeypatch)
    site.wait_ready("worn", "beta")
    session.shadow.references = ("beta",)
    session.shadow.rate = 1.0
    x = X.copy()
    for done in range(1, 8):
        x[...] = X
        lz.silu(x)
        x[...] = 0
        wait_until(lambda done=done: session.shadow.counts["compared"] >= done - 1)
    wait_until(lambda: capsules.names(tmp_path))
    (name,) = capsules.names(tmp_path)
    capsule = form.read(tmp_path / name)
    assert (capsule.failed.kernel_id, capsule.failed.what, capsule.served_by) == ("worn.silu", "wrong", "beta.silu")
    assert np.frombuffer(form.memory(tmp_path / name, capsule)[0], np.float32).tolist() == [0.5] * X.size
    done = command(site, "replay", name, "--times", "7", "--json")
    rows = {row["backend"]: row for row in data(done, FAILED)["backends"]}
    assert {name: row["is_far"] for name, row in rows.items()} == {"worn": True, "beta": False}


def test_inputs_are_those_of_the_call(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may overwrite its arrays as soon as it has the result; the check must not see that."""
    session = site.connect()
    told = listen(session, monkeypatch)
    site.wait_ready("worn", "beta")
    session.shadow.references = ("beta",)
    session.shadow.rate = 1.0
    x, out = lz.empty((5, 9)), lz.empty((5, 9))
    for done in range(4):
        x[...] = done + 1
        lz.silu(x, out=out)
        x[...], out[...] = -1.0, 7.0
        wait_until(lambda done=done: len(told) >= done)
    assert [params["error"] <= 2e-5 for params in told] == [True] * 3


def test_calls_without_a_trusted_reference_are_counted(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is not checked against one that is trusted less, and the counts say that nothing was."""
    session = site.connect()
    told = listen(session, monkeypatch)
    session.shadow.rate = 1.0
    for _ in range(3):
        lz.silu(X, backend="worn")
    session.shadow.references = ("worn", "beta")
    lz.silu(X, backend="worn")
    assert (told, session.shadow.counts) == ([], {"no_reference": 3})


def test_nothing_is_sampled_by_default(site: Site) -> None:
    """A check costs as much as the call."""
    session = site.connect()
    for _ in range(3):
        lz.silu(X)
    assert session.shadow.counts == {}
    assert all(copy.reason != "sampled shadow check" for copy in lz.last_report().copies)  # type: ignore[union-attr]


def worn(site: Site) -> list[lz.ReasonDetail]:
    """What the next call's report has against the worn kernel."""
    lz.silu(X)
    report = lz.last_report()
    assert report is not None
    return [reason for c in report.candidates if c.kernel_id == "worn.silu" for reason in c.reasons]


def test_worn_kernel_is_quarantined_and_reports_say_why(store: Path) -> None:
    """The policy's rate reaches the clients, before and after it changes; nobody sets anything in the program."""
    site = Site(store)
    site.add_backend("worn", priority=90, provider=WEARS_OUT)
    site.set_policy("shadow_rate: 1.0\n")
    session = site.start().connect()
    try:
        site.wait_ready("worn", "beta")
        session.shadow.references = ("beta",)
        reasons = wait_until(lambda: worn(site))
        assert [reason.code for reason in reasons] == ["NOT_CERTIFIED"]
        assert "beta.silu" in reasons[0].detail
        report = lz.last_report()
        assert report is not None
        assert report.backend == "alpha"
        assert {line["kernel_id"] for line in site.events("kernel.quarantined")} == {"worn.silu"}  # checks overlap
        assert session.shadow.rate == 1.0
        site.set_policy()
        wait_until(lambda: lz.silu(X) is not None and session.shadow.rate == 0.0)
        session.ask("reset", backend="worn")
        assert worn(site) == []
    finally:
        lz.disconnect()
        site.stop()


def test_rate_of_the_caller_holds_for_its_own_calls(site: Site) -> None:
    """Calls with another policy are not compared; what the program sets goes before policy."""
    session = site.connect()
    session.shadow.references = ("beta",)
    lz.configure(shadow_rate=1.0)
    try:
        wait_until(lambda: lz.silu(X) is not None and session.shadow.counts["compared"])
    finally:
        lz.configure(shadow_rate=None)
    for _ in range(5):
        lz.silu(X)
        report = lz.last_report()
        assert report is not None
        assert all(copy.reason != "sampled shadow check" for copy in report.copies)
    session.shadow.rate = 1.0
    done = session.shadow.counts["compared"]
    wait_until(lambda: lz.silu(X) is not None and session.shadow.counts["compared"] > done)
    session.shadow.rate = 0.0
    lz.configure(shadow_rate=0.5)
    try:
        lz.silu(X)
        assert session.shadow.rate == 0.0
        session.shadow.rate = None
        assert session.shadow.rate == 1.0  # the highest that was asked for
    finally:
        lz.configure(shadow_rate=None)


def test_kernel_that_is_wrong_for_one_class_serves_the_others(store: Path) -> None:
    """A certificate is per shape class: one bad case does not cost the backend."""
    site = Site(store)
    wrong = "            write(x / (1 + np.exp(-x)) + np.float32(x.size > 256))"
    toy = (BACKENDS / "toy.py").read_text()
    site.add_backend("partly", priority=95, provider=toy.replace("            write(x / (1 + np.exp(-x)))", wrong))
    site.start().connect()
    try:
        assert not lz.silu(np.zeros(600, np.float32)).any()
        large = lz.last_report()
        lz.silu(X)
        small = lz.last_report()
        assert large is not None
        assert small is not None
        assert (large.backend, small.backend) == ("alpha", "partly")
        assert [r.code for c in large.candidates if c.backend == "partly" for r in c.reasons] == ["NOT_CERTIFIED"]
    finally:
        lz.disconnect()
        site.stop()


@pytest.mark.parametrize("rate", [-0.1, 1.5, "often"])
def test_rate_is_a_share(site: Site, rate: Any) -> None:
    with pytest.raises(InvalidArgument, match="from 0"):
        site.connect().shadow.rate = rate


def test_background_tuning_measures_what_calls_do_not_go_to(store: Path) -> None:
    """Off the caller's path and within its share of time, kernels that nobody calls get their figures."""
    site = Site(store)
    (site.folder / "layerzero" / "policy.yaml").write_text("tune_budget: 1.0\nweights: {perfdb: 0}\n")
    session = site.start().connect()
    try:

        def measured() -> set[str]:
            lz.silu(X)
            return {c.backend for c in lz.explain("silu", X).candidates if c.measured_us is not None}

        wait_until(lambda: {"alpha", "beta", "gamma"} <= measured())
        report = lz.last_report()
        assert report is not None
        assert report.backend == "alpha"
        assert session.shadow.counts["tuned"] >= 2
    finally:
        lz.disconnect()
        site.stop()
