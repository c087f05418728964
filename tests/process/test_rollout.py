"""Rollouts with a real broker and two versions of a toy backend, of which the new one is wrong, slow, raises or dies
where a test asks for it."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.backends.versions import DIES, FAULTY, RAISES, SLOW, WRONG
from tests.process.harness import Site, made_on, wait_ended, wait_until
from tests.process.test_cli import data
from tests.process.test_cli import lz as command

import layerzero as lz
from layerzero.ipc.errors import BrokerLost, InvalidArgument, LayerZeroError, NotConnected

NEW = "alpha@2.1"
MANY = 10**6  # calls: no step ends
ROWS = range(1, 41)  # silu of (2**n-ish, rows): buckets of calls


@pytest.fixture
def site(store: Path) -> Iterator[Site]:
    one = Site(store, restart_budget=1000, backoff_s=0.01, backoff_max_s=0.01)
    one.add_backend(NEW, provider=FAULTY)
    one.start()
    yield one
    lz.disconnect()
    one.stop()


@pytest.fixture
def client(site: Site) -> Site:
    site.connect()
    site.wait_ready("alpha", NEW)
    return site


def begin(*shares: float, to: str = NEW, shadow_rate: float = 0.0, **rules: Any) -> dict[str, Any]:
    asked = {"backend": "alpha", "to": to, "shares": list(shares or (1.0,)), "shadow_rate": shadow_rate}
    wanted = {"after_calls": MANY, "max_p99": 1e6, **rules}
    return the(lz.session().ask("rollout", rollout={**asked, "rules": wanted}))


def now() -> dict[str, Any]:
    """The one rollout that there is."""
    return the(lz.session().ask("rollouts"))


def the(answer: dict[str, Any]) -> dict[str, Any]:
    (row,) = answer["rollouts"]
    return dict(row)


def of(first: float, shape: tuple[int, ...] = (4, 8)) -> Any:
    return np.full(shape, first, np.float32)


def right(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def silu(x: Any, **more: Any) -> lz.SelectionReport:
    """Of a call that is right, whoever served it."""
    np.testing.assert_allclose(lz.silu(x, **more), right(x), rtol=1e-5)
    report = lz.last_report()
    assert report is not None
    return report


def served_by_new() -> set[int]:
    """Of forty kinds of calls, those that the new version serves."""
    kinds = [(1 << n % 8, 1 << n // 8) for n in range(40)]
    return {n for n, shape in enumerate(kinds) if silu(of(1.0, shape)).backend == NEW}


class Calls:
    """Threads that call without a pause; `wrong` has what was lost or wrong."""

    def __init__(self, threads: int = 3) -> None:
        self.wrong: list[str] = []
        self.count = 0
        self.served: set[str] = set()
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(threads)]

    def __enter__(self) -> Calls:
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for one in self._threads:
            one.join()
        assert self.wrong == []

    def _run(self, number: int) -> None:
        x = of(1.0 + number, (4, 8 << number))
        expected = right(x)
        while not self._end.is_set():
            try:
                y = lz.silu(x)
            except (BrokerLost, NotConnected):  # it was killed: its caller is told so, and calls again
                self._end.wait(0.01)
                continue
            except LayerZeroError as exc:
                self.wrong.append(f"{exc.code}: {exc.message}")
                return
            if not np.allclose(y, expected, rtol=1e-5):
                self.wrong.append(f"{y} for {x}")
                return
            report = lz.last_report()
            if report is not None and report.backend is not None:
                self.served.add(report.backend)
            self.count += 1

    def go_on(self) -> None:
        """Some more calls have ended."""
        since = self.count
        wait_until(lambda: self.count > since + 20)


# --- who is served by the new version


def test_shares_are_honoured_and_only_grow(client: Site) -> None:
    """By kind of call and process: what the new version serves once it serves again, and with a greater share more."""
    assert served_by_new() == set()
    begin(0.25, 0.75, after_calls=1)
    few = set()
    for n in range(40):  # with the first call that it serves the next step begins
        report = silu(of(1.0, (1 << n % 8, 1 << n // 8)))
        if report.backend == NEW:
            few = {n}
            assert report.notes == (f"rollout: alpha -> {NEW}, 25 %",)
            break
    assert few
    wait_until(lambda: now()["state"] == "promoted" or now()["step"] == 1)
    assert few <= served_by_new()
    assert len(served_by_new()) == 40  # it is promoted by now
    assert now()["state"] == "promoted"


def test_a_share_in_force_is_the_same_each_time(client: Site) -> None:
    begin(0.3)
    first = served_by_new()
    assert 2 <= len(first) <= 24
    assert served_by_new() == first
    evidence = now()["evidence"]
    assert evidence["pairs"][0]["calls"] == {"new": 2 * len(first), "old": 80 - 2 * len(first)}
    assert evidence["waits_for"] == f"{2 * len(first)} of 1,000,000 calls"


def test_reports_and_explanations_say_so(client: Site) -> None:
    begin(1.0)
    assert silu(of(1.0)).notes == (f"rollout: alpha -> {NEW}, 100 %",)
    report = lz.explain("silu", of(1.0))
    assert (report.backend, report.notes) == (NEW, (f"rollout: alpha -> {NEW}, 100 %",))
    assert [one.backend for one in report.candidates if one.accepted][:2] == [NEW, "alpha"]
    lz.session().ask("rollback", backend="alpha")
    assert silu(of(1.0)).notes == ()
    assert lz.explain("silu", of(1.0)).backend == "alpha"
    begin(1e-9)
    (reason,) = [one.reasons[0] for one in lz.explain("silu", of(1.0)).candidates if one.backend == NEW]
    assert str(reason).startswith(f"VERSION_NOT_NAMED: rollout: alpha -> {NEW}, 1e-07 %; the call is not of its share")


def test_who_names_a_backend_or_locks_an_op_is_not_rolled(client: Site) -> None:
    begin(1.0)
    assert silu(of(1.0), backend="alpha").backend == "alpha"
    assert silu(of(1.0), backend="beta").backend == "beta"
    lz.lock("silu", "alpha.silu")
    try:
        assert silu(of(1.0)).backend == "alpha"
    finally:
        lz.unlock("silu")
    with lz.avoid("alpha"):
        assert silu(of(1.0)).backend == "beta"
    with lz.prefer("beta"):
        assert silu(of(1.0)).backend == "beta"
    with lz.prefer("alpha"):  # the backend, of whatever version
        assert silu(of(1.0)).backend == NEW
    assert silu(of(1.0)).backend == NEW


def test_express_lanes_follow(client: Site) -> None:
    """A lease that was given before ends; the new version's calls get lanes of their own, and count."""
    x = of(1.0)
    made_on("express", lambda: silu(x))
    begin(1.0)
    assert silu(x).backend == NEW
    made_on("express", lambda: silu(x))
    report = silu(x)
    assert (report.backend, report.path, report.notes) == (NEW, "express", (f"rollout: alpha -> {NEW}, 100 %",))
    wait_until(lambda: silu(x) and now()["evidence"]["express_calls"]["new"] > 0)
    lz.session().ask("rollback", backend="alpha")
    assert silu(x).backend == "alpha"


# --- what rolls back


def test_a_death_in_mid_call_is_served_by_the_old_one_and_rolls_back(client: Site) -> None:
    with Calls() as calls:
        begin(1.0)
        calls.go_on()
        report = silu(of(DIES))
        assert report.attempts[0].backend == NEW
        assert report.backend == "alpha"
        row = now()
        assert (row["state"], row["share"]) == ("rolled back", 0.0)
        assert row["why"] == f"1 error, allowed 0: the {NEW} worker died (signal 9)"
        calls.go_on()
        assert silu(of(2.0)).backend == "alpha"
    assert {"alpha", NEW} <= calls.served


def test_calls_that_it_raises_on_roll_back_at_the_count_that_is_allowed(client: Site) -> None:
    begin(1.0, max_errors=1)
    assert silu(of(RAISES)).backend == "alpha"
    assert now()["state"] == "running"
    assert silu(of(RAISES, (3, 8))).backend == "alpha"
    assert "2 errors, allowed 1" in now()["why"]


def test_what_no_version_takes_is_not_its_fault(client: Site) -> None:
    """A call whose fallbacks fail as well."""
    from tests.backends.toy import RAISE

    begin(1.0)
    with pytest.raises(LayerZeroError):
        lz.silu(of(float(RAISE)))
    assert now()["state"] == "running"


def test_a_wrong_result_is_found_by_shadow_checks_on_the_new_versions_calls(client: Site) -> None:
    with Calls(1):
        begin(1.0, shadow_rate=1.0)
        wait_until(lambda: lz.silu(of(WRONG)) is not None and now()["state"] == "rolled back")
    assert "wrong result, allowed 0: silu: the results of the two versions differ" in now()["why"]
    assert silu(of(WRONG)).backend == "alpha"
    wait_until(lambda: silu(of(1.0)) and not lz.session().shadow.is_on)  # nobody pays for it any more
    # Neither kernel has lost its certificate by it.
    accepted = {c.backend for c in lz.explain("silu", of(1.0), backend=NEW).candidates if c.accepted}
    assert accepted == {NEW}


@pytest.mark.parametrize("first", [WRONG, RAISES])
def test_and_on_the_old_versions_calls_before_anybody_is_served_so(client: Site, first: float) -> None:
    begin(1e-9, shadow_rate=1.0)
    wait_until(lambda: silu(of(first)).backend == "alpha" and now()["state"] == "rolled back")
    assert "wrong result" in now()["why"]


def test_a_slow_version_is_rolled_back_by_its_p99(client: Site) -> None:
    """The old version's times are those of the comparisons."""
    x = of(SLOW)
    begin(1.0, shadow_rate=1.0, max_p99=1.5)
    wait_until(lambda: silu(x) and now()["state"] == "rolled back")
    assert "p99 of" in now()["why"]
    assert silu(x).backend == "alpha"


# --- what promotes, and what outlives the broker


def test_it_goes_on_step_by_step_until_it_is_promoted(client: Site) -> None:
    with Calls() as calls:
        begin(0.5, 1.0, after_calls=50, shadow_rate=0.5)
        served_by_new()  # else it could be that no kind of call is of the share
        wait_until(lambda: served_by_new() is not None and now()["state"] == "promoted")
        calls.go_on()
    why = now()["why"]
    assert why.startswith("after ")
    assert "0 errors" in why
    assert "comparisons" in why
    assert silu(of(5.0)).notes == (f"rollout: alpha -> {NEW}, promoted",)


def kill_broker(site: Site) -> None:
    pid = site.broker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_ended(pid)


def test_a_promoted_version_serves_after_a_restart_until_lz_rollback(client: Site) -> None:
    begin(1.0, after_calls=1)
    silu(of(1.0))
    assert now()["state"] == "promoted"
    lz.disconnect()
    kill_broker(client)
    client.start().connect()
    assert silu(of(1.0)).backend == NEW
    assert "0 errors" in now()["why"]
    lz.session().ask("rollback", backend="alpha")
    assert silu(of(1.0)).backend == "alpha"
    lz.disconnect()
    kill_broker(client)
    client.start().connect()
    assert silu(of(1.0)).backend == "alpha"
    assert (now()["state"], now()["why"]) == ("rolled back", "lz rollback")


def test_a_killed_broker_loses_no_rollout_and_no_call(client: Site) -> None:
    """In mid-rollout, under load: the next broker goes on where this one was, with new evidence."""
    begin(0.5, max_errors=3)
    with Calls() as calls:
        calls.go_on()
        before = served_by_new()
        kill_broker(client)
        client.start().connect()
        calls.go_on()
        row = now()
        assert (row["state"], row["share"], row["rules"]["max_errors"]) == ("running", 0.5, 3)
        assert served_by_new() == before  # the same process, the same share


def kept(**changes: Any) -> str:
    """A file of one rollout, with these changes."""
    one = {"backend": "alpha", "to": NEW, "shares": [1.0], "state": "promoted", "why": "", **changes}
    return json.dumps({"format": 1, "rollouts": [one]})


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"format": 1, "rollouts": [{"backend": "alpha"}]}',
        "\x00" * 99,
        kept(started_s=10**400),
        kept(why="\ud800"),
        kept(to=f"{NEW}\ud800"),
        kept(to=f"{NEW}\x1b[2J"),
        kept(rules={"after_calls": 10**400}),
        kept(shares=[float("nan")]),
    ],
)
def test_a_file_that_does_not_hold_is_ignored_and_said_so(store: Path, text: str) -> None:
    site = Site(store)
    try:
        site.add_backend(NEW, provider=FAULTY)
        file = site.folder / "layerzero" / "rollouts.json"
        file.write_text(text)
        file.chmod(0o600)
        site.start().connect()
        assert silu(of(1.0)).backend == "alpha"
        assert any(f"{file} is ignored" in problem for problem in lz.status()["problems"])
        assert lz.session().ask("rollouts")["rollouts"] == []
        begin(1.0)
        assert json.loads(file.read_text())["rollouts"][0]["to"] == NEW
        assert lz.status()["problems"] == []
    finally:
        lz.disconnect()
        site.stop()


# --- beside what else shortens the way of calls


def test_a_plan_follows(client: Site) -> None:
    """A function that is planned is served by the new version while it stands, and by the old one again after."""
    planned = lz.plan(lambda x: lz.silu(lz.silu(x)))
    x = of(1.0)
    expected = right(right(x))

    def served(by: str) -> bool:
        np.testing.assert_allclose(planned(x), expected, rtol=1e-5)
        before = client_calls(by)
        np.testing.assert_allclose(planned(x), expected, rtol=1e-5)
        return client_calls(by) > before

    for _ in range(4):
        planned(x)
    assert served("alpha")
    assert not served(NEW)
    begin(1.0)
    wait_until(lambda: served(NEW))
    assert not served("alpha")
    lz.session().ask("rollback", backend="alpha")
    wait_until(lambda: served("alpha"))
    assert not served(NEW)


def client_calls(backend: str) -> int:
    """That its worker has answered so far, by whatever way."""
    (row,) = [row for row in lz.status()["backends"] if row["name"] == backend]
    return int(row["answered"])


def test_two_backends_at_once(store: Path) -> None:
    """Each by its own rules: the one is rolled back, and the other goes on."""
    site = Site(store, restart_budget=1000, backoff_s=0.01, backoff_max_s=0.01)
    try:
        site.add_backend(NEW, provider=FAULTY)
        site.add_backend("beta@3.0", provider=FAULTY)
        site.start().connect()
        site.wait_ready("alpha", "beta", NEW, "beta@3.0")
        begin(1.0)
        rules = {"after_calls": MANY, "max_p99": 1e6, "max_errors": 9}
        asked = {"backend": "beta", "to": "beta@3.0", "shares": [1.0], "rules": rules}
        lz.session().ask("rollout", rollout=asked)
        with lz.prefer("beta"):
            report = silu(of(RAISES))
        assert report.attempts[0].backend == "beta@3.0"
        assert report.backend == "beta"
        assert silu(of(RAISES)).backend == "alpha"
        rows = {row["backend"]: row for row in lz.session().ask("rollouts")["rollouts"]}
        assert (rows["alpha"]["state"], rows["beta"]["state"]) == ("rolled back", "running")
        assert rows["beta"]["evidence"]["pairs"][0]["errors"] == 1
        with lz.prefer("beta"):
            assert silu(of(1.0)).backend == "beta@3.0"
    finally:
        lz.disconnect()
        site.stop()


# --- the command line, and bad input


def test_what_is_typed_and_what_is_shown(client: Site) -> None:
    assert "no rollouts" in command(client, "rollout").stderr
    begun = command(client, "rollout", "alpha", "2", "--share", "5%,100%", "--shadow", "--after", "30min")
    assert begun.returncode == 0, begun.stderr
    assert f"alpha -> {NEW}: running, 5 %, step 1 of 2" in begun.stdout
    for _ in range(3):
        silu(of(1.0))
    row = the(data(command(client, "rollout", "--json")))
    assert (row["shadow_rate"], row["rules"]["after_s"], row["rules"]["after_calls"]) == (0.1, 1800.0, 0)
    shown = command(client, "rollout").stdout
    assert all(len(line) <= 80 for line in shown.splitlines()), shown
    assert "silu" in shown
    ended = command(client, "rollback", "alpha")
    assert f"alpha -> {NEW}: rolled back\n  lz rollback" in ended.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("alpha",), "name the version, too"),
        (("alpha", "9"), "build it first: lz env build alpha@9, or take alpha@2.1; no backend is called 'alpha@9'"),
        (("alpah", "2.1"), "did you mean 'alpha'"),
        (("alpha", "beta@2"), "name a backend and a version of it"),
        (("alpha", "2.1", "--share", "lots"), "no list of shares"),
        (("alpha", "2.1", "--share", "50%,5%"), "ascending"),
        (("alpha", "2.1", "--after", "soon"), "neither a count of calls nor a time"),
        (("alpha", "2.1", "--max-p99", "0.5"), "max_p99 is 0.5"),
    ],
)
def test_wrong_words_say_what_to_do(typed: Site, words: tuple[str, ...], said: str) -> None:
    done = command(typed, "rollout", *words)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.replace("│", " ").split())


@pytest.fixture(scope="module")
def typed(store: Path) -> Iterator[Site]:
    one = Site(store)
    one.add_backend(NEW)
    one.start()
    yield one
    one.stop()


def test_a_kernel_that_its_probe_has_not_certified_serves_nobody(store: Path) -> None:
    """Also where the probe has run after the rollout began; and it is said."""
    site = Site(store)
    try:
        site.add_backend(NEW, provider=FAULTY.replace(f"if first == {WRONG}:", "if True:"))
        site.start().connect()
        begin(1.0)
        wait_until(lambda: silu(of(1.0)).backend == "alpha" and now()["uncertified"] == ["silu"])
        shown = " ".join(command(site, "rollout").stdout.split())
        assert f"alpha serves silu: the probe of {NEW} has certified none of it" in shown
    finally:
        lz.disconnect()
        site.stop()


def test_one_rollout_for_each_backend(client: Site) -> None:
    begin(0.5)
    with pytest.raises(InvalidArgument, match=f"end the other one first: lz rollback alpha; {NEW} is running"):
        begin(0.5)
    lz.session().ask("rollback", backend="alpha")
    with pytest.raises(InvalidArgument, match="nothing to do"):
        lz.session().ask("rollback", backend="alpha")
    with pytest.raises(InvalidArgument, match="name a backend that has a rollout: alpha"):
        lz.session().ask("rollback", backend="beta")
    assert begin(0.5)["state"] == "running"
