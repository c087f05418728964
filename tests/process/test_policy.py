"""Policy from a client's side: calls, variables and files, checked by a real broker."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.process.harness import Site

import layerzero as lz
from layerzero.client.connection import overlay

X = np.ones((2, 3), np.float32)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """What holds for the process goes with the test."""
    before = overlay.process()
    yield
    overlay.change(lambda _: before)


def origins() -> dict[str, str]:
    """Of the values that somebody has set, but for those of every Site."""
    values = lz.policy()["values"]
    site = {"weights.perfdb", "weights.reliability"}
    return {key: row["origin"] for key, row in values.items() if row["origin"] != "default" and key not in site}


def test_lock_is_part_of_the_policy_until_unlock(connected: Site) -> None:
    """lz.policy() is what the broker goes by, not what the client believes."""
    lz.lock("silu", "beta.silu")
    lz.lock("matmul", "beta.*")
    assert origins() == {"locks.silu": "lz.lock", "locks.matmul": "lz.lock"}
    lz.unlock("silu")
    assert origins() == {"locks.matmul": "lz.lock"}
    with pytest.raises(lz.InvalidArgument, match=r"no lock on 'silu'; its locks: matmul"):
        lz.unlock("silu")
    lz.unlock()
    assert origins() == {}


def test_policy_decides_which_kernel_serves_and_the_report_says_so(connected: Site) -> None:
    """Whatever else a kernel has for it; and a rejection leads to who asked for it."""
    for name in ("alpha", "beta"):
        with lz.prefer(name):
            assert lz.explain("silu", X).backend == name
            lz.silu(X)
            report = lz.last_report()
            assert report is not None
            assert report.backend == name
    with lz.avoid("alpha"):
        reasons = {c.backend: [(r.code, r.detail) for r in c.reasons] for c in lz.explain("silu", X).candidates}
    assert reasons["alpha"] == [("POLICY_DENIED", "kernel 'alpha.silu' is in avoid: alpha (lz.avoid)")]
    lz.lock("silu", "beta.silu")
    report = lz.explain("silu", X)
    locked = [(r.code, r.detail) for c in report.candidates if c.backend == "alpha" for r in c.reasons]
    assert (report.kernel_id, locked) == (
        "beta.silu",
        [("POLICY_LOCKED", "silu is locked to 'beta.silu' (lz.lock)")],
    )
    with lz.avoid("beta"), pytest.raises(lz.NoBackend, match=r"is locked to 'beta\.silu' \(lz\.lock\)"):
        lz.silu(X)


def test_wrong_names_are_refused_with_the_nearest_one(connected: Site) -> None:
    """A typo must not be a lock that no kernel satisfies, nor a preference for nobody."""
    with pytest.raises(lz.InvalidArgument, match=r"lz\.lock: no kernel is called 'alpha\.sillu'; did you mean 'alpha"):
        lz.lock("silu", "alpha.sillu")
    with pytest.raises(lz.InvalidArgument, match=r"no op is called 'sliu'; did you mean 'silu'"):
        lz.lock("sliu", "alpha.silu")
    with pytest.raises(lz.InvalidArgument, match=r"lz\.prefer: no kernel or backend is called 'alhpa'; did you mean"):
        lz.prefer("alhpa")
    with pytest.raises(lz.InvalidArgument, match=r"lz\.avoid takes at least one"):
        lz.avoid()
    with pytest.raises(
        lz.InvalidArgument, match=r"no key of a policy is called 'stict_mode'; did you mean 'strict_mode'"
    ):
        lz.configure(stict_mode=True)
    with pytest.raises(lz.InvalidArgument, match=r"tune_budget holds for the whole broker"):
        lz.configure(tune_budget=0.5)
    assert origins() == {}


def test_configure_sets_and_takes_back(connected: Site) -> None:
    """None is the way back to what the broker says."""
    lz.configure(strict_mode=True, weights={"jit": 3}, memory_headroom_bytes="1 GiB")
    values = lz.policy()["values"]
    assert values["strict_mode"] == {"value": True, "origin": "lz.configure"}
    assert (values["weights.jit"]["value"], values["memory_headroom_bytes"]["value"]) == (3.0, 2**30)
    lz.configure(strict_mode=None, weights=None, memory_headroom_bytes=None)
    assert origins() == {}
    with pytest.raises(lz.InvalidArgument, match="no key of a policy is called 'weight'"):
        lz.configure(weight=None)


def test_preferences_hold_in_their_block_and_thread(connected: Site) -> None:
    """The rules that the broker sees are those of the caller's own context."""
    seen: list[dict[str, str]] = []
    with lz.prefer("beta"), lz.avoid("gamma"):
        rules = [row["value"] for key, row in lz.policy()["values"].items() if key.startswith("rules.")]
        assert [(rule.get("prefer"), rule.get("avoid")) for rule in rules] == [(["beta"], None), (None, ["gamma"])]
        thread = threading.Thread(target=lambda: seen.append(origins()))
        thread.start()
        thread.join()
        assert lz.silu(X).shape == X.shape
    assert seen == [{}]
    assert origins() == {}
    only = lz.prefer("beta.*", only=True)
    assert origins() == {"rules.0": "lz.prefer"}
    only.end()
    assert origins() == {}


def test_calls_with_and_without_a_wish_have_routes_of_their_own(connected: Site) -> None:
    """A remembered route would go on with the decision of another policy; equal wishes share one."""
    session = lz.connect(runtime_dir=connected.folder)
    counts = []
    for name in ("alpha", "beta", "alpha", ""):
        if name:
            with lz.prefer(name):
                lz.silu(X)
        else:
            lz.silu(X)
        counts.append(len(session.routes))
    assert [b - a for a, b in itertools.pairwise(counts)] == [1, 0, 1]


def test_variables_of_the_caller_are_part_of_its_policy(broker: Site) -> None:
    """A shell's variables hold for its own commands, also with a broker that was started elsewhere."""
    code = "import json\nlz.connect()\nprint(json.dumps(lz.policy()['values']))"
    broker.environ["LAYERZERO_LOCKS"] = "silu=beta.*; matmul=beta.matmul"
    try:
        with broker.python(code) as client:
            values = json.loads(client.communicate()[0])
        broker.environ["LAYERZERO_LOCKS"] = "silu=nobody"
        code = "lz.connect()\ntry:\n    lz.null()\nexcept lz.InvalidArgument as exc:\n    print(exc)"
        with broker.python(code) as client:
            problem = client.communicate()[0]
    finally:
        del broker.environ["LAYERZERO_LOCKS"]
    assert values["locks.silu"] == {"value": "beta.*", "origin": "LAYERZERO_LOCKS"}
    assert "LAYERZERO_LOCKS: no kernel is called 'nobody'" in problem


def test_broker_with_a_broken_policy_does_not_start_and_says_why(new_site: Callable[..., Site], tmp_path: Path) -> None:
    """A service whose locks are ignored is worse than one that does not come up."""
    file = tmp_path / "policy.yaml"
    file.write_text("locks:\n  silu: alpha.sliu\n")
    site = new_site(policy=file)
    with pytest.raises(lz.ConfigError, match=r"policy.yaml:2: no kernel is called 'alpha\.sliu'; did you mean"):
        site.connect()
    file.write_text("locks:\n  silu: alpha.silu\n")
    site.connect()
    assert origins() == {"locks.silu": f"{file}:2"}
    lz.disconnect()
