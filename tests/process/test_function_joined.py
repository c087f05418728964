"""Functions whose environment's worker joins by itself, as from a container: they run there, and its agent outlives the
broker."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process import boxed_functions as boxed
from tests.process import forks
from tests.process import isolated_functions as fn
from tests.process import isolated_pools as pools
from tests.process.function_site import serving
from tests.process.harness import Site, wait_ended, wait_until
from tests.process.join_site import Agent

import layerzero as lz
from layerzero.envs import functions


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    forks.start_server()
    one = Site(tmp_path / "store", joined=fn.PLAIN.backend, backoff_s=0.01)
    with serving(one, fn.PLAIN):
        yield one


def is_ready(site: Site) -> bool:
    return site.backend(fn.PLAIN.backend)["state"] == "ready"


def test_a_joined_worker_of_functions_survives_its_broker(site: Site) -> None:
    """The next broker knows the environment before anybody calls, and its agent registers there."""
    with pytest.raises(lz.EnvError, match="no worker has joined"):
        fn.echo(1)
    agent = Agent(site, fn.PLAIN.backend)
    try:
        wait_until(lambda: is_ready(site))
        assert fn.echo([1, "a"]) == [1, "a"]
        pid = site.broker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_ended(pid)
        site.start()
        lz.disconnect()
        site.connect()
        wait_until(lambda: is_ready(site))
        assert fn.place()[0] in agent.children()
        assert agent.process.poll() is None
    finally:
        agent.end()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Site]:
    forks.start_server()
    one = Site(tmp_path / "store", joined=pools.PAIR.backend, backoff_s=0.01)
    with one.environment():
        pools.PAIR.build(quiet=True)
        one.start().connect()
        yield one
        lz.disconnect()
    one.stop()


def test_each_worker_of_a_pool_joins_by_itself(pool: Site, tmp_path: Path) -> None:
    """One serves alone; calls run side by side in both. The second may come before the broker was asked for it, and
    one that is not of the pool is refused."""
    first, second = pools.PAIR.backend, f"{pools.PAIR.backend}.2"
    agents = [Agent(pool, second)]
    stranger = Agent(pool, f"{pools.PAIR.backend}.1001")
    try:
        wait_until(lambda: any(one["name"] == second and one["state"] == "ready" for one in lz.status()["backends"]))
        assert [pools.pid() for _ in range(3)] == 3 * agents[0].children()
        agents.append(Agent(pool, first))
        wait_until(lambda: pool.backend(first)["state"] == "ready")
        assert stranger.process.wait(30) == 2
        folder = tmp_path / "met"
        folder.mkdir()
        met = [pools.gather.submit(str(folder), 2) for _ in range(2)]
        found = [one.result() for one in met]
        assert found[0] == found[1] == sorted(pid for agent in agents for pid in agent.children())
        assert {one.report.served_by for one in met} == {first, second}
    finally:
        for agent in agents:
            agent.end()


def test_one_that_joins_is_neither_built_nor_declared_before(tmp_path: Path) -> None:
    """Where the program runs: the broker waits for its name, the first call tells of it, and says what to start."""
    forks.start_server()
    one = Site(tmp_path / "store", joined=f"{fn.PLAIN.backend},{fn.LATE.backend}", backoff_s=0.01)
    with one.environment():
        one.start().connect()
        early = Agent(one, fn.LATE.backend)
        assert early.process.wait(30) == 2  # nobody has declared that
        with pytest.raises(lz.EnvError) as failure:
            fn.echo(1)
        first = f"run where it is installed: python -m layerzero.workers.join --backend {fn.PLAIN.backend}"
        assert failure.value.message.partition("\n")[0] == first
        assert fn.echo.explain(1).command == ""
        agent = Agent(one, fn.PLAIN.backend)
        try:
            wait_until(lambda: is_ready(one))
            assert fn.echo([1, "a"]) == [1, "a"]
            assert fn.place()[0] in agent.children()
        finally:
            agent.end()
            lz.disconnect()
    one.stop()


@pytest.mark.parametrize("is_early", [False, True])
def test_an_environment_of_an_image_joins_without_being_told_of(tmp_path: Path, is_early: bool) -> None:
    """Its broker has no setting for it; the agent may come before the first call. What is not there is said by name."""
    forks.start_server()
    one = Site(tmp_path / "store", backoff_s=0.01)
    name = boxed.BOXED.backend
    with one.environment():
        one.start().connect()
        if is_early:  # another program has declared it
            functions.declare(boxed.BOXED._declared, functions.default_store(os.environ))
        else:
            with pytest.raises(lz.EnvError) as failure:
                boxed.pid()
            first = f"run where it is installed: python -m layerzero.workers.join --backend {name}"
            assert failure.value.message.partition("\n")[0] == first
        agent = Agent(one, name)
        try:
            wait_until(lambda: any(b["name"] == name and b["state"] == "ready" for b in lz.status()["backends"]))
            assert [boxed.pid()] == agent.children()
            assert boxed.anywhere() != os.getpid()
            with pytest.raises(lz.InvalidArgument, match="nothing is built for it: it is what image registry"):
                boxed.BOXED.build()
        finally:
            agent.end()
            lz.disconnect()
    one.stop()
