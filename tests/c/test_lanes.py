"""Express lanes of the C library: a program under ASan and UBSan beside real brokers and workers that are killed,
stopped and wrong in the middle of its calls. What tests/process/test_express.py has of Python's client."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
from tests.backends.toy import HANG, KILL, PAUSE, RAISE, fault
from tests.c.conftest import Built, libzmq
from tests.process.harness import PATIENCE_S, Site, is_paused, is_running, wait_ended, wait_until
from tests.process.test_counters import coded, counts, grown
from tests.process.test_express import ON_LANE, SEEN_AS, SHORT_S, faulty_site

import layerzero as lz


class Said(NamedTuple):
    """What the program says of a call. `attempts`: backend, code, signal, exit code, phase and pid."""

    code: str
    text: str
    path: str = ""
    backend: str = ""
    kernel: str = ""
    attempt: int = 0
    attempts: tuple[tuple[str, str, int, int, str, int], ...] = ()


def read(line: str) -> Said:
    code, text, *rest = line.rstrip("\n").split("|")
    if len(rest) < 4:
        return Said(code, text)
    path, backend, kernel, attempt, *attempts = rest
    failed = tuple((a, b, int(c), int(d), e, int(f)) for a, b, c, d, e, f in (one.split(",") for one in attempts))
    return Said(code, text, path, backend, kernel, int(attempt), failed)


class Program:
    """tests/c/lanes.c, asked line by line."""

    def __init__(self, running: subprocess.Popen[str]) -> None:
        self.running = running

    def begin(self, what: str) -> None:
        assert self.running.stdin is not None
        self.running.stdin.write(f"{what}\n")
        self.running.stdin.flush()

    def end(self) -> str:
        assert self.running.stdout is not None
        return self.running.stdout.readline().rstrip("\n")

    def ask(self, what: str) -> str:
        self.begin(what)
        return self.end()

    def call(self, ndim: int = 1, first: float = 1.0, timeout_s: float = 0, backend: str = "-") -> Said:
        return read(self.ask(f"call {ndim} {first!r} {timeout_s} {backend}"))

    def settle(self, ndim: int = 1) -> Said:
        """Call until a call is on a lane."""
        said = read(self.ask(f"settle {ndim}"))
        assert (said.code, said.text, said.path, said.attempts) == ("OK", "right", "express", ())
        return said


@contextmanager
def program(built: Built, site: Site, **variables: str) -> Iterator[Program]:
    """It must end well, without a leak."""
    command = [built["lanes"], site.folder, libzmq()]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("LAYERZERO_")} | variables
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environ) as running:
        try:
            yield Program(running)
            _, errors = running.communicate(timeout=PATIENCE_S)
        finally:
            running.kill()
    assert (running.returncode, errors) == (0, "")


@pytest.fixture
def settled(new_site: Callable[..., Site], built: Built) -> Iterator[tuple[Site, Program]]:
    """A program whose calls of one dimension are on a lane, at a broker of its own."""
    site = new_site(backoff_s=0.01, backoff_max_s=0.01)
    site.connect()
    site.wait_ready("alpha", "beta")
    with program(built, site) as running:
        running.settle()
        yield site, running


def test_a_settled_route_leaves_the_broker_out(settled: tuple[Site, Program]) -> None:
    """The report says so, with the same facts, and the broker counts the calls all the same."""
    site, running = settled
    before = counts()
    said = [running.call() for _ in range(20)]
    assert {(one.code, one.text, one.path, one.backend, one.kernel, one.attempt) for one in said} == {
        ("OK", "right", "express", "alpha", "alpha.silu", 1)
    }
    assert grown(before, counts()) == {("silu", "alpha", "express"): 20}
    assert site.events("worker.exited") == []


def test_nothing_is_left_of_lanes(settled: tuple[Site, Program]) -> None:
    """Neither a mapping nor a descriptor, after each of several connections; counts of clients that went are kept."""
    _, running = settled
    before = counts()
    fds, _, lanes = map(int, running.ask("left").split())
    assert lanes == 1
    found = set()
    for _ in range(3):
        found.add(running.ask("again"))
        running.settle()
    assert len(found) == 1
    assert next(iter(found)).endswith(" 0")
    assert int(running.ask("left").split()[0]) == fds
    running.ask("again")
    wait_until(lambda: grown(before, counts()).get(("silu", "alpha", "express"), 0) >= 3)


def test_nothing_is_left_of_a_worker_that_ended_between_two_calls(settled: tuple[Site, Program]) -> None:
    """One lane is there at a time, however often its worker starts."""
    site, running = settled
    before, pids = running.ask("left").split(), site.wait_ready("alpha", "beta")
    for _ in range(3):
        exits = len(site.events("worker.exited"))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            wait_ended(pid)
        wait_until(lambda: len(site.events("worker.exited")) >= exits + len(pids))  # noqa: B023
        lz.session().ask("reset")
        pids = site.wait_ready("alpha", "beta")
        running.settle()
        assert running.ask("left").split() == before


def test_a_lane_that_there_was_no_room_for_is_opened_with_a_later_lease(
    new_site: Callable[..., Site], built: Built
) -> None:
    """Without descriptors calls go by the broker, which has not heard of the lane."""
    site = new_site()
    site.connect()
    site.wait_ready("alpha", "beta")
    with program(built, site) as running:
        assert running.call().path == "broker"
        assert running.ask("few") == "0"
        assert {running.call().path for _ in range(20)} == {"broker"}
        assert running.ask("many") == "0"
        lz.session().ask("reset")
        assert "express" in [running.call().path for _ in range(20)]


def test_calls_on_a_lane_go_on_while_the_broker_is_slow_to_open_another(settled: tuple[Site, Program]) -> None:
    """Only the one that wants the new lane waits."""
    site, running = settled
    assert site.broker_pid is not None
    for _ in range(3):
        assert running.call(2, backend="beta").path == "broker"
    paths, longest_s = set(), 0.0
    os.kill(site.broker_pid, signal.SIGSTOP)
    try:
        assert running.ask("begin 2 1.0 beta") == "0"
        until = time.monotonic() + 2
        while (start := time.monotonic()) < until:
            paths.add(running.call().path)
            longest_s = max(longest_s, time.monotonic() - start)
    finally:
        os.kill(site.broker_pid, signal.SIGCONT)
    said = read(running.ask("end"))
    assert (said.code, said.path, said.backend) == ("OK", "express", "beta")
    assert (paths, longest_s < 2) == ({"express"}, True)


def test_threads_share_a_lane(settled: tuple[Site, Program]) -> None:
    """Each call gets its own numbers, and its worker takes those of all threads one after the other."""
    _, running = settled
    verdict, on_lane = running.ask("threads 8 200").split()
    assert verdict == "right"
    assert int(on_lane) > 800
    assert running.settle().backend == "alpha"


@pytest.mark.parametrize("spin_us", ["0", "10000"])
def test_who_looks_and_who_sleeps_get_the_same(new_site: Callable[..., Site], built: Built, spin_us: str) -> None:
    """Without looking at all, and with long looks."""
    site = new_site(spin_us=spin_us)
    site.connect()
    site.wait_ready("alpha", "beta")
    with program(built, site, LAYERZERO_SPIN_US=spin_us) as running:
        running.settle()
        assert running.ask("threads 4 50").split()[0] == "right"
        assert int(running.ask("time 1 50")) > 0


@pytest.mark.parametrize("spin_us", [" 50\n", "  "])
def test_blanks_around_a_setting_are_passed_over(new_site: Callable[..., Site], built: Built, spin_us: str) -> None:
    """As Python's client and workers do it; of blanks alone it is not set."""
    with program(built, new_site().start(), LAYERZERO_SPIN_US=spin_us) as running:
        assert running.call().code == "OK"


def test_a_setting_that_is_none_says_what_to_set(new_site: Callable[..., Site], built: Built) -> None:
    """As Python's client does."""
    with program(built, new_site().start(), LAYERZERO_SPIN_US="much") as running:
        said = running.ask("left")
    assert said.startswith("CONFIG|Set LAYERZERO_SPIN_US to whole microseconds")


def test_a_broker_without_lanes_serves_all(new_site: Callable[..., Site], built: Built) -> None:
    """`express` is a setting of the broker's."""
    site = new_site(express="false").start()
    with program(built, site) as running:
        assert {running.call().path for _ in range(20)} == {"broker"}


def test_what_takes_leases_back_sends_calls_to_the_broker(settled: tuple[Site, Program]) -> None:
    """Here: forgotten faults. The lane serves again once the route has settled again."""
    site, running = settled
    lz.session().ask("reset")
    assert running.call().path == "broker"
    assert running.settle().backend == "alpha"
    assert site.events("worker.exited") == []


# --- deaths


@pytest.mark.parametrize("action", ["kill", "exit0", "hang"])
def test_a_worker_lost_in_any_phase_costs_one_attempt(new_site: Callable[..., Site], built: Built, action: str) -> None:
    """As on the broker's lane: one attempt with its facts, then the next backend's right answer."""
    site = faulty_site(new_site, {f"at-{phase}": f"{phase}={action}" for phase in SEEN_AS})
    outcome = {"kill": ("BACKEND_ERROR", 9, -1), "exit0": ("BACKEND_ERROR", 0, 0), "hang": ("DEADLINE", 9, -1)}
    with program(built, site) as running:
        for ndim, phase in enumerate(SEEN_AS, start=1):
            paths = [running.call(ndim).path for _ in range(ON_LANE - 2)]
            assert (paths[0], paths[-1]) == ("broker", "express")
            said = running.call(ndim, timeout_s=SHORT_S if action == "hang" else 0)
            assert (said.code, said.text, said.path) == ("OK", "right", "broker")
            assert said.backend in ("alpha", "beta")
            [(backend, code, sig, status, phase_said, pid)] = said.attempts
            assert (backend, (code, sig, status), phase_said) == (f"at-{phase}", outcome[action], SEEN_AS[phase])
            assert not is_running(pid)
            assert running.settle(ndim).backend != backend


def test_ends_that_make_no_sense_cost_the_worker_its_life(new_site: Callable[..., Site], built: Built) -> None:
    """A worker that breaks the protocol cannot be trusted with memory; silence ends at the deadline."""
    outcomes = {"garbage": "BAD_MESSAGE", "truncated": "BAD_MESSAGE", "stale": "BAD_MESSAGE", "silent": "DEADLINE"}
    site = faulty_site(new_site, {reply: f"written={reply}" for reply in outcomes})
    with program(built, site) as running:
        for ndim, (reply, outcome) in enumerate(outcomes.items(), start=1):
            for _ in range(ON_LANE - 2):
                running.call(ndim)
            said = running.call(ndim, timeout_s=SHORT_S if reply == "silent" else 0)
            assert (said.code, said.text) == ("OK", "right")
            [(backend, code, sig, _, _, pid)] = said.attempts
            assert (backend, code, sig) == (reply, outcome, signal.SIGKILL)
            assert not is_running(pid)


def test_a_worker_killed_in_mid_call_by_another_costs_no_result(settled: tuple[Site, Program]) -> None:
    """A real SIGKILL while its kernel runs; and one between two calls, which no call has to know of."""
    site, running = settled
    alpha = site.backend("alpha")["pid"]
    running.begin(f"call 1 {fault(PAUSE, 'alpha')!r} 0 -")
    wait_until(lambda: is_paused(alpha))
    os.kill(alpha, signal.SIGKILL)
    said = read(running.end())
    assert (said.code, said.text, said.path, said.attempt) == ("OK", "right", "broker", 2)
    assert [one[:5] for one in said.attempts] == [("alpha", "BACKEND_ERROR", 9, -1, "executing")]
    lz.session().ask("reset")
    running.settle()
    serving = site.wait_ready("alpha", "beta")
    for pid in serving:
        os.kill(pid, signal.SIGKILL)
        wait_ended(pid)
    wait_until(lambda: len(site.events("worker.exited")) >= 3)
    said = running.call()
    assert (said.code, said.text) == ("OK", "right")
    assert {one[4] for one in said.attempts} <= {"express", "idle", "queued"}
    running.settle()


def test_a_kernel_that_raises_goes_on_to_the_broker(settled: tuple[Site, Program]) -> None:
    """Only the broker may try another kernel; the attempt on the lane is reported and counted, and the worker lives."""
    site, running = settled
    before = coded("fallbacks")
    said = running.call(first=fault(RAISE, "alpha"))
    assert (said.code, said.text, said.backend) == ("OK", "right", "beta")
    assert [(one[0], one[1], one[4]) for one in said.attempts] == [
        ("alpha", "BACKEND_ERROR", "express"),
        ("alpha", "BACKEND_ERROR", ""),
    ]
    assert grown(before, coded("fallbacks"))["silu", "alpha", "BACKEND_ERROR"] == 2
    assert running.settle().backend == "alpha"
    assert site.events("worker.exited") == []


def test_a_call_whose_worker_dies_on_a_lane_waits_for_room_at_the_broker(
    new_site: Callable[..., Site], built: Built
) -> None:
    """It has been begun: that others have all the places is no reason to say that nothing ran."""
    site = new_site(max_in_flight=1)
    site.connect()
    for name in ("alpha", "beta"):
        lz.null(backend=name)
    alpha, beta = site.backend("alpha")["pid"], site.backend("beta")["pid"]
    with program(built, site) as running:
        assert running.settle().backend == "alpha"
        running.call(2, backend="beta")
        assert running.ask(f"begin 2 {fault(PAUSE, 'beta')!r} beta") == "0"
        wait_until(lambda: is_paused(beta))
        running.begin(f"call 1 {fault(PAUSE, 'alpha')!r} 0 -")
        wait_until(lambda: is_paused(alpha))
        os.kill(alpha, signal.SIGKILL)
        wait_until(lambda: site.events("worker.exited"))
        os.kill(beta, signal.SIGCONT)
        said = read(running.end())
        assert read(running.ask("end")).code == "OK"
    assert (said.code, said.text, said.path) == ("OK", "right", "broker")
    assert [one[:4] for one in said.attempts] == [("alpha", "BACKEND_ERROR", 9, -1)]


def test_inputs_that_kill_every_worker_are_poison_also_from_a_lane(settled: tuple[Site, Program]) -> None:
    """The death on the lane counts: two workers, not three, and the same inputs are refused from then on."""
    site, running = settled
    for _ in range(2):
        said = running.call(first=fault(KILL))
        assert said.code == "POISON"
        assert len(site.events("worker.exited")) == 2
    site.wait_ready("alpha")
    assert running.call().path == "broker"  # a poisoned signature's inputs are looked at one by one


def test_a_call_that_takes_too_long_is_a_deadline(settled: tuple[Site, Program]) -> None:
    """Of one that may run on no other backend; its memory is given to nobody before its worker is dead."""
    site, running = settled
    for _ in range(20):
        said = running.call(backend="alpha")
    assert said.path == "express"
    alpha = site.backend("alpha")["pid"]
    said = running.call(first=fault(HANG, "alpha"), timeout_s=0.2, backend="alpha")
    assert said.code == "DEADLINE"
    assert not is_running(alpha)
    assert running.ask("free 1") == "OK"
    running.settle()


def test_a_call_behind_another_goes_to_the_broker_when_its_time_is_up(
    settled: tuple[Site, Program], built: Built
) -> None:
    """Its worker is in another client's call on a lane: that is no fault of this one, nor of the worker."""
    site, behind = settled
    alpha = site.backend("alpha")["pid"]
    with program(built, site) as slow:
        slow.settle()
        slow.begin(f"call 1 {fault(PAUSE, 'alpha')!r} 0 -")
        wait_until(lambda: is_paused(alpha))
        behind.begin(f"call 1 1.0 {SHORT_S} -")
        wait_until(lambda: site.backend("alpha")["running"] > 1)  # the paused one's, and what the broker has of this
        os.kill(alpha, signal.SIGCONT)
        assert read(slow.end()).path == "express"
        said = read(behind.end())
    assert (said.code, said.text, said.path, said.attempts) == ("OK", "right", "broker", ())
    assert site.events("worker.exited") == []


# --- the other ends


def test_the_brokers_death_ends_a_call_on_a_lane(settled: tuple[Site, Program]) -> None:
    """Said at once, with what to do. What the worker may still write to is given to nobody."""
    site, running = settled
    pid, alpha = site.broker_pid, site.backend("alpha")["pid"]
    assert pid is not None
    running.begin(f"call 1 {fault(PAUSE, 'alpha')!r} 0 -")
    wait_until(lambda: is_paused(alpha))
    os.kill(pid, signal.SIGKILL)
    said = read(running.end())
    assert (said.code, said.text) == (
        "BROKER_LOST",
        "Start a broker with `lz up`, close this client and connect again.",
    )
    assert running.call().code == "BROKER_LOST"
    assert running.ask("free 1") == "OK"
    wait_ended(pid)


def test_a_program_killed_on_a_lane_harms_nobody(new_site: Callable[..., Site], built: Built) -> None:
    """Its call ends, its lane and memory are given back, and the worker serves others."""
    site = new_site()
    site.connect()
    site.wait_ready("alpha", "beta")
    alpha = site.backend("alpha")["pid"]
    command = [built["lanes"], site.folder, libzmq()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        victim = Program(running)
        victim.settle()
        victim.begin(f"call 1 {fault(PAUSE, 'alpha')!r} 0 -")
        wait_until(lambda: is_paused(alpha))
        running.kill()
        running.wait()
    os.kill(alpha, signal.SIGCONT)
    with program(built, site) as other:
        assert other.settle().backend == "alpha"
    assert site.backend("alpha")["pid"] == alpha
