"""Several workers of one environment, through a real broker: calls side by side, deaths, objects, streams."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process import forks
from tests.process import isolated_pools as pool
from tests.process.harness import Site, in_threads, is_running, wait_ended

import layerzero as lz


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    forks.start_server()
    one = Site(tmp_path_factory.mktemp("store"), restart_budget=100, backoff_s=0.01)
    with one.environment():
        pool.PAIR.build(quiet=True)
        one.start().connect()
        yield one
        lz.disconnect()
    one.stop()


pytestmark = pytest.mark.usefixtures("site")


def test_calls_run_side_by_side_in_workers_of_one_environment(tmp_path: Path) -> None:
    """Two calls wait for each other, which one worker would never end; with `map`, in threads, and by `submit`."""
    for name, count in (("a", 2), ("b", 4)):
        folder = tmp_path / name
        folder.mkdir()
        function = pool.gather if count == 2 else pool.gather.options(workers=count)
        found = list(function.map([str(folder)] * count, [count] * count))
        assert len(found[0]) == count
        assert found == [found[0]] * count
    seen = tmp_path / "c"
    seen.mkdir()
    in_threads(2, lambda: pool.gather(str(seen), 2))
    rows = [row for row in lz.status()["backends"] if row["name"].startswith(pool.PAIR.backend)]
    assert {row["name"] for row in rows} == {pool.PAIR.backend, *(f"{pool.PAIR.backend}.{n}" for n in (2, 3, 4))}


def test_the_report_says_which_worker_served() -> None:
    first = pool.pid()
    report = pool.pid.last_report()
    assert report.served_by in (pool.PAIR.backend, f"{pool.PAIR.backend}.2")
    assert report.selection is not None
    assert report.selection.worker_pid == first
    assert report.env == "pair"


def test_a_death_is_one_calls_and_nobody_repeats_it_unasked(tmp_path: Path) -> None:
    with pytest.raises(lz.BackendError) as died:
        pool.dies(str(tmp_path))
    assert "may have run in part" in died.value.message
    assert len(list(tmp_path.iterdir())) == 1
    again = tmp_path / "again"
    again.mkdir()
    served = pool.dies_once.options(idempotent=True)(str(again))
    assert len(list(again.iterdir())) == 2
    assert str(served) in os.listdir(again)


def test_calls_behind_a_death_are_served_by_the_others(tmp_path: Path) -> None:
    """One of many dies with its worker; each other one has its result."""
    futures = [pool.pid.submit() for _ in range(40)]
    doomed = pool.dies.submit(str(tmp_path))
    futures += [pool.pid.submit() for _ in range(40)]
    assert all(future.result() for future in futures)
    with pytest.raises(lz.BackendError):
        doomed.result()
    assert len(list(tmp_path.iterdir())) == 1


def test_what_stays_is_used_where_it_is(tmp_path: Path) -> None:
    """Results that were kept in either worker are arguments of calls, which go there."""
    handles = [future.result() for future in [pool.kept.submit(n) for n in range(8)]]
    for handle in handles:
        made, used = pool.pid_of(handle)
        assert made == used
        assert handle.fetch()[1] == made
    folder = tmp_path / "objects"
    folder.mkdir()
    futures: list[pool.Member] = []
    in_threads(2, lambda: futures.append(pool.Member(str(folder), 2)))  # each waits for the other's process
    one, other = futures
    pids = {one.pid(), other.pid()}
    assert len(pids) == 2
    assert one.large().split()[0] == str(one.pid())  # an answer in two trips
    with pytest.raises(lz.InvalidArgument, match="in their own worker"):
        pool.kept([one, other])


def test_an_object_is_lost_and_rebuilt_alone(tmp_path: Path) -> None:
    """The other worker's object keeps its process and its state."""
    made: list[pool.Member] = []
    in_threads(2, lambda: made.append(pool.Member(str(tmp_path), 2)))
    one, other = made
    before, others = one.pid(), other.pid()
    with pytest.raises(lz.BackendError):
        one.die()
    assert other.pid() == others
    assert one.pid() not in (before, others)
    assert one.pid.options(idempotent=True)() == one.pid()


def test_objects_may_have_processes_of_their_own() -> None:
    """Each ends with its object; a death is that object's alone; one that is not constructed leaves none behind."""
    one, two, three = pool.Alone(), pool.Alone(), pool.Alone()
    pids = [one.pid(), two.pid(), three.pid()]
    assert len({*pids, pool.pid()}) == 4
    with pytest.raises(lz.BackendError):
        two.die()
    assert (one.pid(), three.pid()) == (pids[0], pids[2])
    again = two.pid()
    assert again not in pids
    one.close()
    wait_ended(pids[0])
    del three
    gc.collect()
    wait_ended(pids[2])
    assert two.pid() == again
    with pytest.raises(lz.RemoteError, match="not today"):
        pool.Alone(fails=True)
    with pool.Alone() as four:
        own = four.pid()
        assert own != again
    wait_ended(own)
    two.close()
    names = [row["name"] for row in lz.status()["backends"] if row["name"].startswith(f"{pool.PAIR.backend}.10")]
    assert len(names) <= 4  # their names are used again
    with pytest.raises(lz.InvalidArgument, match="allowed: pool, own"):
        pool.Alone.options(process="mine")


def test_one_that_lost_its_own_process_is_constructed_again_once(tmp_path: Path) -> None:
    """The call goes to the new one, which has another name, and starts the old one for nothing."""
    notes = tmp_path / "notes"
    one, other = pool.Alone(notes=str(notes)), pool.Alone()
    pid = one.pid()
    os.kill(pid, signal.SIGKILL)
    wait_ended(pid)
    assert one.pid() not in (pid, other.pid())
    assert len(notes.read_text().split()) == 2
    pid = one.pid()
    os.kill(pid, signal.SIGKILL)
    wait_ended(pid)
    assert one.is_itself(one)  # both in the new one
    one.close()
    other.close()


def test_an_objects_own_process_ends_with_its_program(site: Site) -> None:
    """However that ends."""
    code = (
        "import sys\nlz.connect(runtime_dir=sys.argv[1])\nfrom tests.process import isolated_pools as pool\n"
        "one = pool.Alone()\nprint(one.pid(), flush=True)\nimport time; time.sleep(600)"
    )
    other = site.python(code, stderr=subprocess.PIPE)
    assert other.stdout is not None
    pid = int(other.stdout.readline())
    assert is_running(pid)
    other.kill()
    other.communicate()
    wait_ended(pid)


def test_a_stream_is_made_in_one_worker() -> None:
    assert len({pid for _, pid in pool.count_up(5)}) == 1
    streams = [pool.count_up(3) for _ in range(4)]
    assert [[number for number, _ in stream] for stream in streams] == [[0, 1, 2]] * 4


def test_warmup_starts_all() -> None:
    pool.pid.options(workers=3).warmup()
    states = {row["name"]: row["state"] for row in lz.status()["backends"]}
    assert [states[f"{pool.PAIR.backend}{end}"] for end in ("", ".2", ".3")] == ["ready"] * 3


@pytest.mark.parametrize("workers", [0, -1, 65, 2.0, True, "2"])
def test_a_number_of_workers_that_cannot_be_is_refused(workers: object) -> None:
    with pytest.raises(lz.InvalidArgument, match="allowed: an integer from 1 to 64"):
        lz.env("pair", workers=workers)  # type: ignore[arg-type]
    with pytest.raises(lz.InvalidArgument, match="allowed: an integer from 1 to 64"):
        pool.pid.options(workers=workers)
