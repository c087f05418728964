"""Workers that the broker does not start: they register, serve, and are lost in every way that a container can be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.backends.toy import HANG, PAUSE, fault
from tests.process.harness import Site, is_paused, wait_ended, wait_until
from tests.process.join_site import Agent, can_unshare

import layerzero as lz
from layerzero.client.connection import arena, start
from layerzero.client.tools import ready as lz_ready
from layerzero.ipc.transport import control, messages, secret, wire

SILENCE_S = 1.0
SERVED = np.linspace(-3, 3, 8, dtype=np.float32)
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root: processes of another user")


def silu(x: np.ndarray) -> np.ndarray:
    wide = np.asarray(x, np.float64)
    return wide / (1 + np.exp(-wide))


def call(x: np.ndarray = SERVED, **kwargs: object) -> lz.SelectionReport:
    np.testing.assert_allclose(lz.silu(x, **kwargs), silu(x), rtol=1e-6)  # type: ignore[arg-type]
    report = lz.last_report()
    assert report is not None
    return report


def struck(action: int) -> np.ndarray:
    """An input that makes alpha, and nobody else, do `action`."""
    return np.array([fault(action, "alpha"), 1.0, 2.0], dtype=np.float32)


class Stack:
    """A broker that alpha and gamma join, with a secret; beta is its own. Ends its agents."""

    def __init__(self, new_site: Callable[..., Site], folder: Path) -> None:
        self.secret = folder / "secret"
        secret.create(self.secret)
        self.site = new_site(
            joined="alpha,gamma",
            secret_file=self.secret,
            joined_silence_s=SILENCE_S,
            backoff_s=0.01,
            backoff_max_s=0.05,
        )
        self._agents: list[Agent] = []

    def join(self, backend: str = "alpha", **how: object) -> Agent:
        how = {"secret_file": self.secret, **how}
        self._agents.append(Agent(self.site, backend, **how))  # type: ignore[arg-type]
        return self._agents[-1]

    def connect(self) -> lz.Session:
        return lz.connect(runtime_dir=self.site.folder, secret_file=self.secret)

    def wait_ready(self, backend: str = "alpha") -> None:
        wait_until(lambda: self.site.backend(backend)["state"] == "ready")

    def wait_agents(self, *states: str, backend: str = "alpha") -> None:
        wait_until(lambda: sorted(k["state"] for k in self.site.backend(backend)["agents"]) == sorted(states))

    def health(self, backend: str = "alpha") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "layerzero.workers.health", "--backend", backend]
        command += ["--directory", str(self.site.folder), "--secret-file", str(self.secret)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def end(self) -> None:
        for agent in self._agents:
            agent.end()


@pytest.fixture
def stack(new_site: Callable[..., Site], tmp_path: Path) -> Iterator[Stack]:
    made = Stack(new_site, tmp_path)
    made.site.start()
    made.connect()
    yield made
    made.end()


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_joined_worker_serves_and_comes_back_after_each_end(stack: Stack) -> None:
    """As `docker compose up, kill, up, stop`: the backend serves, the next one does, it serves again. All joined
    workers may be pid 1: nothing rests on pids."""
    assert call().backend == "beta"
    assert stack.health().returncode == 1
    assert "no worker has joined" in stack.health().stdout
    first = stack.join(is_pid_1=can_unshare())
    other = stack.join("gamma", is_pid_1=can_unshare())
    stack.wait_ready()
    stack.wait_ready("gamma")
    assert stack.health().returncode == 0
    report = call()
    assert (report.backend, report.path, report.attempts[-1].worker_pid) == ("alpha", "broker", report.worker_pid)
    worker_pids = first.children()
    first.kill()
    assert call().backend == "beta"
    for pid in worker_pids:
        wait_ended(pid)
    stack.join()
    stack.wait_ready()
    assert call().backend == "alpha"
    assert other.end() == 0
    assert call(backend="alpha").backend == "alpha"
    assert "no worker has joined" in stack.site.backend("gamma")["unavailable"]["detail"]


def test_doctor_finds_a_backend_in_order_whose_worker_has_joined(stack: Stack) -> None:
    """What is installed beside the broker does not matter; who has not joined is told with the command that helps."""

    def checks() -> dict[str, lz_ready.Check]:
        report = lz.readiness_check(backends=["alpha", "gamma"], starts_workers=False)
        return {check.name: check for check in report.checks if check.name.startswith("environment ")}

    stack.join()
    stack.wait_ready()
    alpha, gamma = checks()["environment alpha"], checks()["environment gamma"]
    assert (alpha.ok, alpha.repair, "1 worker joined" in alpha.detail) == (True, "", True)
    assert (gamma.ok, gamma.detail) == (False, "NOT_JOINED: no worker has joined")
    assert gamma.repair == "run where it is installed: python -m layerzero.workers.join --backend gamma"


def test_a_container_that_dies_in_a_call_costs_one_attempt(stack: Stack) -> None:
    """The kernel closes its connections, which confirms that it writes no more: the same memory goes to the next."""
    agent = stack.join()
    stack.wait_ready()
    reports: list[lz.SelectionReport] = []
    thread = in_thread(lambda: reports.append(call(struck(HANG))))
    wait_until(lambda: stack.site.backend("alpha")["running"] == 1)
    agent.kill()
    thread.join()
    failed, served = reports[0].attempts
    assert (failed.backend, failed.exit_signal) == ("alpha", signal.SIGKILL)
    assert served.backend == "beta"


def test_a_hanging_kernel_of_a_joined_worker_is_killed_by_its_agent(stack: Stack) -> None:
    """A container stays when the library in it does not answer; the worker in it is a new one."""
    agent = stack.join(is_pid_1=can_unshare())
    stack.wait_ready()
    report = call(struck(HANG), timeout_s=1)
    failed, served = report.attempts
    assert (failed.outcome, failed.exit_signal, served.backend) == ("DEADLINE", signal.SIGKILL, "beta")
    stack.wait_ready()
    assert call().backend == "alpha"
    assert agent.process.poll() is None
    assert stack.site.backend("alpha")["restarts"] == 1


def test_a_paused_container_costs_its_calls_their_memory_and_no_wrong_result(stack: Stack) -> None:
    """What it was given may still be written to: the call runs elsewhere in other memory, and the first is used again
    only when the worker's end is confirmed, after `docker unpause`."""
    agent = stack.join()
    stack.wait_ready()
    call(backend="beta")  # it is warm
    slots = arena.pool.stats()["slots"]
    x = struck(PAUSE)
    results: list[np.ndarray] = []
    reports: list[lz.SelectionReport | None] = []

    def work() -> None:
        results.append(lz.silu(x))
        reports.append(lz.last_report())

    thread = in_thread(work)
    wait_until(lambda: any(map(is_paused, agent.children())))  # it is in the call
    agent.pause()
    thread.join()
    (report,) = reports
    assert report is not None
    assert [a.backend for a in report.attempts] == ["alpha", "beta"]
    assert (report.attempts[0].phase, "paused" in report.attempts[0].detail) == ("unreachable", True)
    assert "does not answer" in stack.site.backend("alpha")["unavailable"]["detail"]
    assert call().backend == "beta"
    assert arena.pool.stats()["slots"] > slots + 1  # the result's, and what is kept for the paused worker
    agent.go_on()
    stack.wait_ready()
    assert call().backend == "alpha"
    np.testing.assert_allclose(results.pop(), silu(x), rtol=1e-6)
    wait_until(lambda: lz.status() and arena.pool.stats()["slots"] <= slots)


def test_memory_of_the_callers_own_is_not_given_to_two(stack: Stack) -> None:
    """`out=` lies where the caller wants it: nobody else may write there while a worker that nobody can reach may."""
    agent = stack.join()
    stack.wait_ready()
    out = lz.empty((3,), "float32")
    errors: list[lz.LayerZeroError] = []

    def work() -> None:
        with pytest.raises(lz.WorkerUnreachable) as caught:
            lz.silu(struck(HANG), out=out)
        errors.append(caught.value)

    thread = in_thread(work)
    wait_until(lambda: stack.site.backend("alpha")["running"] == 1)
    agent.pause()
    thread.join()
    assert errors[0].facts["backend"] == "alpha"
    agent.go_on()
    stack.wait_ready()


def test_the_second_of_two_containers_stands_by_and_takes_over(stack: Stack) -> None:
    """As `docker compose up --scale alpha=2`."""
    agents = [stack.join(), stack.join()]
    stack.wait_agents("ok", "ok")
    stack.wait_ready()
    call()
    serving = next(agent for agent in agents if agent.children())
    assert [len(agent.children()) for agent in agents if agent is not serving] == [0]
    serving.kill()
    assert call(backend="alpha").backend == "alpha"
    stack.wait_agents("ok")
    stack.join()
    stack.wait_agents("ok", "ok")
    agents[1 - agents.index(serving)].pause()
    assert call(backend="beta").backend == "beta"
    wait_until(lambda: "silent" in [k["state"] for k in stack.site.backend("alpha")["agents"]])
    stack.wait_ready()
    assert call(backend="alpha").backend == "alpha"


def test_joined_workers_survive_their_broker(stack: Stack) -> None:
    """They end what they run, wait, and register with the next one."""
    agent = stack.join()
    stack.wait_ready()
    (worker,) = agent.children()
    pid = stack.site.broker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_ended(pid)
    wait_ended(worker)
    assert agent.process.poll() is None
    stack.site.start()
    stack.connect()
    stack.wait_ready()
    assert call().backend == "alpha"


def test_a_agent_that_is_gone_before_its_welcome_costs_nothing(new_site: Callable[..., Site]) -> None:
    """A container may be killed while it connects; the broker finds its hello, and nobody to welcome."""
    site = new_site(joined="alpha").start()
    pid = site.broker_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        with control.connect(site.endpoints.control, timeout_s=10) as sock:
            control.send(
                sock, messages.Hello(protocols=[wire.PROTOCOL], role="agent", package="", pid=1, backend="alpha")
            )
    finally:
        os.kill(pid, signal.SIGCONT)
    lz.connect(runtime_dir=site.folder, start=False)
    assert call().backend == "beta"
    assert site.broker_pid == pid


def test_a_worker_that_dies_while_its_agent_stands_still_ends_once(stack: Stack) -> None:
    """That its connection has closed is not its end: nobody gets its memory, and none is started beside it, until the
    agent has waited for it. The agent stays as it is."""
    agent = stack.join()
    stack.wait_ready()
    (worker,) = agent.children()
    agent.signal(signal.SIGSTOP)
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: stack.site.events("worker.unreachable"))
    assert call().backend == "beta"
    agent.signal(signal.SIGCONT)
    stack.wait_ready()
    assert call(backend="alpha").backend == "alpha"
    assert len(stack.site.events("agent.joined")) == 1
    assert stack.site.events("agent.parted") == []


def test_a_broker_that_was_stopped_itself_does_not_take_agents_for_dead(stack: Stack) -> None:
    """Their answers were there all the time."""
    stack.join()
    stack.wait_ready()
    pid = stack.site.broker_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        threading.Event().wait(2 * SILENCE_S)  # as long as it takes to be taken for dead, and more
    finally:
        os.kill(pid, signal.SIGCONT)
    assert call().backend == "alpha"
    assert stack.site.events("agent.silent") == []


@pytest.mark.parametrize("is_wrong", [True, False], ids=["wrong-secret", "no-secret"])
def test_who_does_not_know_the_secret_is_refused_for_good(stack: Stack, tmp_path: Path, is_wrong: bool) -> None:
    """Agents get memory of clients, clients get results: neither may be anyone."""
    other = None
    if is_wrong:
        other = tmp_path / "other"
        secret.create(other)
    agent = stack.join(secret_file=other)
    assert agent.process.wait(30) == 2
    assert "NOT_ALLOWED" in agent.log.read_text()
    lz.disconnect()
    with pytest.raises(lz.NotAllowed, match="secret"):
        lz.connect(runtime_dir=stack.site.folder, secret_file=other, start=False)
    assert stack.secret.read_text().strip() not in stack.site.endpoints.log.read_text()
    stack.connect()


def test_a_client_with_a_secret_refuses_a_broker_that_cannot_prove_it(
    new_site: Callable[..., Site], tmp_path: Path
) -> None:
    """Whoever puts a socket into the shared folder would get the client's memory."""
    site = new_site().start()
    file = tmp_path / "secret"
    secret.create(file)
    with pytest.raises(lz.NotAllowed, match="not proved"):
        lz.connect(runtime_dir=site.folder, secret_file=file)


def test_a_backend_that_is_not_to_join_is_refused(stack: Stack) -> None:
    """The broker starts beta itself; two masters of one worker would be one too many."""
    agent = stack.join("beta")
    assert agent.process.wait(30) == 2
    assert "does not join this broker" in agent.log.read_text()


def test_a_joined_environment_that_does_not_work_says_so(new_site: Callable[..., Site], tmp_path: Path) -> None:
    """A container whose library does not import is healthy for its engine; its health check must tell."""
    stack = Stack(new_site, tmp_path)
    stack.site.add_backend("broken", provider="def load():\n    import no_such_library\n")
    stack.site.environ["LAYERZERO_JOINED"] = "broken"
    stack.site.start()
    stack.connect()
    try:
        stack.join("broken")
        stack.wait_agents("failed", backend="broken")
        health = stack.health("broken")
        assert health.returncode == 1
        assert "no_such_library" in health.stdout
        assert call().backend == "alpha"  # the broker's own here
    finally:
        stack.end()


@needs_root
@pytest.mark.parametrize(
    ("uid", "knows", "said"),
    [
        (65534, True, ""),
        (65534, False, "the secret is not the broker's"),
        (65533, True, "user 65533 may not use the broker"),
    ],
)
def test_other_users_connect_where_the_broker_allows_it(
    new_site: Callable[..., Site], tmp_path: Path, uid: int, knows: bool, said: str
) -> None:
    """Containers run as users of their own; the kernel says who connects, and neither that nor the secret alone is
    enough."""
    site = new_site(joined="alpha", secret_file=tmp_path / "secret", allow_uids="65534")
    secret.create(tmp_path / "secret")
    site.folder.chmod(0o711)
    site.start()
    code = f"""
        import os, sys
        from pathlib import Path
        from layerzero.ipc.transport import control, messages, secret
        from layerzero.ipc.errors import NotAllowed
        from layerzero.ipc.transport.hello import greet
        key = secret.read(Path({str(tmp_path / "secret")!r}))
        key = key if {knows} else bytes(len(key))
        os.setuid({uid})
        sock = control.connect(Path({str(site.endpoints.control)!r}), timeout_s=10)
        hello = messages.Hello(protocols=[{wire.PROTOCOL}], role="agent", package="", pid=1, backend="alpha")
        try:
            print(greet(sock, hello, key)[0].number)
        except NotAllowed as exc:
            print(exc)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, cwd="/"
    )
    answer = done.stdout.strip()
    assert said in answer if said else answer.isdigit()


def test_lz_down_leaves_a_broker_of_another_namespace_alone(new_site: Callable[..., Site]) -> None:
    """Its pid is another process's here: of pid 1 it would be our own container."""
    site = new_site().start()
    assert not start.is_foreign(site.endpoints)
    if not can_unshare():
        pytest.skip("this user may not make pid namespaces")
    code = (
        "from pathlib import Path; import sys; from layerzero.client.connection import start;"
        "from layerzero.ipc.transport.endpoints import Endpoints;"
        "print(start.is_foreign(Endpoints(Path(sys.argv[1]))))"
    )
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code, str(site.folder)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "True"
