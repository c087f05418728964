"""What is not lifted, and what is said of it: kernels that must not be, policy, and shapes that will come. Over the GPU
of threads."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import numpy as np
import pytest
from tests.process.gpu_site import close, gelu, randn, report, silu, slow, soft
from tests.process.harness import Site, wait_until
from tests.process.invariants import check_settled
from tests.process.lifted_site import LiftedSites, kernels, lift, lifted_site, lifted_store, refused, rows
from tests.process.test_cli import lz as lz_command
from tests.soft_gpu import soft_cupy

import layerzero as lz
from layerzero.ipc.lifting.form import alignment_class

__all__ = ["kernels", "lifted_site", "lifted_store", "soft"]


@pytest.mark.parametrize(
    ("wrong", "reason", "detail"),
    [
        ("stateful", "NOT_DETERMINISTIC", "two runs on the same inputs"),
        ("random", "NOT_DETERMINISTIC", "two runs on the same inputs"),
        ("table", "PROOF_DIFFERS", "out is not what the library gave"),
        ("strays", "PROOF_STRAYS", "bytes beside an output or scratch were written"),
        ("strays_before", "PROOF_STRAYS", "bytes of an input, or beside one, were written"),
        ("strikes", "PROOF_FAULTED", "returned 700"),
        ("exits", "PROOF_FAULTED", "ended with exit code 3"),
        ("aborts", "PROOF_FAULTED", "ended with SIGABRT"),
        ("meets", "PROOF_DIFFERS", "out is not what the library gave, on two streams at once"),
        ("hangs", "PROOF_LATE", "did not end within 10 s"),
    ],
)
def test_a_kernel_that_must_not_be_lifted_stays_in_its_worker(
    lifted_site: LiftedSites, wrong: str, reason: str, detail: str
) -> None:
    """Its calls go on, and those of others are lifted, whose proofs came to the same process."""
    site = lifted_site(wrong={"silu": wrong}, environ={"LZ_SOFT_PROOF_S": "10"} if wrong == "hangs" else {}).start()
    site.connect()
    (x, values), (y, more) = randn(32, 32), randn(16, 16)
    calls = {"silu": lambda: lz.silu(x), "matmul": lambda: lz.matmul(y, y), "gelu": lambda: slow(x)}
    told = ""

    def is_decided() -> bool:
        nonlocal told
        paths = {}
        for name, call in calls.items():
            call()
            paths[name] = report().path
            if name == "silu":
                told = next((note for note in report().notes if note.startswith("not lifted")), told)
        assert paths["silu"] != "lifted"
        return bool(told) and paths["matmul"] == paths["gelu"] == "lifted"

    wait_until(is_decided)
    assert told.startswith(f"not lifted: {reason}: ")
    assert detail in told
    assert sorted(rows()) == [("one.gelu", "lifted", ""), ("one.matmul", "lifted", ""), ("one.silu", "refused", reason)]
    close(lz.silu(x), silu(values))
    close(lz.matmul(y, y), more @ more)
    check_settled(site)
    assert (site.backend("one")["restarts"], site.backend("one")["failed"]) == (0, 0)


def test_a_kernel_that_adds_in_an_order_of_chance_is_lifted(lifted_site: LiftedSites) -> None:
    """Its descriptor says that two runs may differ; they do by less than what its dtype rounds."""
    lifted_site(wrong={"silu": "random"}, is_repeatable=False).start().connect()
    x, values = randn(32, 32)
    close(lift(lambda: lz.silu(x)), silu(values))


def test_an_op_in_place_is_tried_on_two_streams_too(lifted_site: LiftedSites) -> None:
    lifted_site(wrong={"append": "meets"}).start().connect()
    new = [randn(3, 2, 4)[0] for _ in range(2)]
    caches = [soft_cupy.asarray(np.zeros((2, 4, 2, 4), np.float32)) for _ in range(2)]
    slots = soft_cupy.asarray(np.array([2, 7, -1]))
    told = refused(lambda: lz.append_kv(*new, *caches, slots))
    assert told.startswith("PROOF_DIFFERS: k_cache is not what the library gave, on two streams at once")


def test_what_stays_in_its_worker_has_the_switch_measured(lifted_site: LiftedSites) -> None:
    """On this GPU nobody can, and `lz status` says so."""
    site = lifted_site(wrong={"silu": "stateful"}).start()
    site.connect()
    x, _ = randn(31)

    def told() -> str:
        lz.silu(x)
        return next(d["switch"] for d in lz.status()["devices"] if d["type"] == "cuda")

    assert told() == "default; not measured yet"
    wait_until(lambda: told() not in ("default; not measured yet", "measured"))
    assert site.events("gpu.switch_unknown")
    line = next(line for line in lz_command(site, "status").stdout.splitlines() if "GPU switch" in line)
    assert "150 us (default; " in line


def test_what_no_graph_may_hold_is_not_captured(lifted_site: LiftedSites) -> None:
    lifted_site().start().connect()
    x, _ = randn(8, 16)
    assert refused(lambda: lz.layer_norm(x, 16)).startswith("NOT_CAPTURABLE: ")
    assert stays(lz.explain("layer_norm", x, 16)) == ["NOT_CAPTURABLE"]


def test_nothing_is_lifted_where_nobody_sees_machine_code(lifted_site: LiftedSites) -> None:
    lifted_site(variables={"LZ_SOFT_NO_CUPTI": "1"}).start().connect()
    x, values = randn(32, 32)
    assert refused(lambda: lz.silu(x)).startswith("NO_CUPTI: /no/libcupti.so")
    close(lz.silu(x), silu(values))


def test_a_refusal_that_may_pass_is_forgotten_and_the_others_are_kept(lifted_site: LiftedSites) -> None:
    x, _ = randn(32, 32)
    for variables, reason in (({"LZ_SOFT_NO_CUPTI": "1"}, "NO_CUPTI"), ({}, "NOT_DETERMINISTIC")):
        lifted_site(wrong={"silu": "random"}, variables=variables).start().connect()
        assert refused(lambda: lz.silu(x)).startswith(reason)
        lz.disconnect()
    site = lifted_site(wrong={"silu": "random"})
    site.connect()
    assert refused(lambda: lz.silu(x)).startswith("NOT_DETERMINISTIC")
    assert site.events("lifted.refused") == []  # the store knew
    assert stays(lz.explain("silu", x)) == ["NOT_DETERMINISTIC"]


def stays(report: lz.SelectionReport) -> list[str]:
    """Why kernels of these candidates stay in their workers."""
    notes = [note for candidate in report.candidates for note in candidate.notes]
    return [note.partition("(")[2].partition(")")[0] for note in notes if note.startswith("is not lifted (")]


# --- policy


def path_of(x: Any, values: Any) -> Any:
    close(lz.silu(x), silu(values))
    return report().path


def test_in_workers_only(lifted_site: LiftedSites) -> None:
    lifted_site(isolation="subprocess").start().connect()
    x, _ = randn(32, 32)
    told = refused(lambda: lz.silu(x))
    assert told == "NOT_ALLOWED: policy: backend_isolation is subprocess for one"
    for _ in range(50):
        lz.silu(x)
        assert report().path in ("broker", "express")
    assert rows() == []


def policy_site(lifted_site: LiftedSites, text: str, *names: str) -> Site:
    site = lifted_site(*names)
    del site.environ["LAYERZERO_BACKEND_ISOLATION"]
    site.set_policy(text)
    site.start()
    return site


def test_policy_takes_leave_back_and_gives_it(lifted_site: LiftedSites) -> None:
    site = policy_site(lifted_site, "backend_isolation: lifted\n")
    site.connect()
    x, values = randn(32, 32)
    for _ in range(2):
        lift(lambda: lz.silu(x))
        site.set_policy("backend_isolation: subprocess\n")
        wait_until(lambda: path_of(x, values) != "lifted")
        wait_until(lambda: (lz.silu(x), any("NOT_ALLOWED" in note for note in report().notes))[1])
        site.set_policy("backend_isolation: lifted\n")
    wait_until(lambda: path_of(x, values) == "lifted")


def test_policy_may_be_for_one_backend(lifted_site: LiftedSites) -> None:
    site = policy_site(lifted_site, "backend_isolation: {one: subprocess, '*': lifted}\n", "one", "two")
    site.connect()
    x, values = randn(32, 32)
    assert refused(lambda: lz.silu(x, backend="one")).startswith("NOT_ALLOWED: ")
    close(lift(lambda: lz.silu(x, backend="two")), silu(values))
    assert {row[0] for row in rows()} == {"two.silu"}


def test_policy_may_be_for_one_kernel(lifted_site: LiftedSites) -> None:
    site = policy_site(lifted_site, "backend_isolation: {one.silu: subprocess}\n")
    site.connect()
    x, values = randn(32, 32)
    assert refused(lambda: lz.silu(x)).startswith("NOT_ALLOWED: policy: backend_isolation is subprocess for one.silu")
    close(lift(lambda: slow(x)), gelu(values))


def test_what_was_refused_is_asked_for_again_when_leave_ends_also_by_calls_on_rings(
    lifted_site: LiftedSites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that repeat do not look whether they may be lifted by now."""
    site = policy_site(lifted_site, "backend_isolation: {one.silu: subprocess, '*': lifted}\n")
    session = site.connect()
    x, values = randn(32, 32)
    assert refused(lambda: lz.silu(x)).startswith("NOT_ALLOWED: ")
    close(lift(lambda: slow(x)), gelu(values))
    asks, asked = session.ask, list[str]()

    def ask(method: str, **params: Any) -> Any:
        asked.append(method)
        return asks(method, **params)

    monkeypatch.setattr(session, "ask", ask)
    wait_until(lambda: path_of(x, values) == "express")
    assert "lift" not in asked
    assert asks("lift_fault", numbers=[*range(1, 64)])["kernels"] == ["one.gelu"]
    wait_until(lambda: (path_of(x, values), "lift" in asked)[1])


# --- shapes that will come


def ahead(session: lz.Session, route: int, grows: list[Any], alignments: list[int], count: int = 16) -> list[str]:
    asked = session.ask("lift_ahead", route=route, alignments=alignments, grows=grows, count=count)
    return [call["state"] for call in asked["calls"]]


def test_shapes_that_a_route_grows_into_are_ready_before_they_come(lifted_site: LiftedSites, kernels: Any) -> None:
    """A cache of a decoder grows by one with each token: no call of these shapes was ever made."""
    site = lifted_site()
    session = site.connect()
    x, _ = randn(32, 16)
    lift(lambda: lz.silu(x))
    (route,) = session.routes._by_number
    alignments = [alignment_class(x.data.ptr), 256]
    grows = [[[1, 0], [0, 0]]] * 2
    wait_until(lambda: ahead(session, route, grows, alignments) == ["ready"] * 16)
    assert len([row for row in rows() if row == ("one.silu", "lifted", "")]) == 17
    answered = site.backend("one")["answered"]
    for n in range(33, 49):
        y, more = randn(n, 16)
        close(lz.silu(y), silu(more))
        assert report().path == "lifted", n
    assert site.backend("one")["answered"] == answered
    assert kernels.loads == 1


def test_a_length_that_was_to_be_expected_needs_neither_broker_nor_worker(lifted_site: LiftedSites) -> None:
    """A decoder of eight layers: after some tokens the first call of a new length is launched at once, though the
    broker does not run."""
    site = policy_site(lifted_site, "backend_isolation: lifted\n")
    session = site.connect()
    lengths = itertools.count(33)

    def is_lifted_at_once() -> bool:
        x, values = randn(next(lengths), 16)
        paths = []
        for _ in range(8):
            close(lz.silu(x), silu(values))
            paths.append(report().path)
        return paths[0] == "lifted"

    wait_until(is_lifted_at_once)
    wait_until(lambda: sum(getattr(held, "is_ahead", False) for held in list(session.lifts.known.values())) >= 32)
    assert site.broker_pid is not None
    os.kill(site.broker_pid, signal.SIGSTOP)
    try:
        assert all(is_lifted_at_once() for _ in range(8))
    finally:
        os.kill(site.broker_pid, signal.SIGCONT)
    site.set_policy("backend_isolation: subprocess\n")  # leave that was given ahead ends, too
    wait_until(lambda: not is_lifted_at_once())
