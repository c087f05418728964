"""Results one by one, through a real broker: generators, iteration, and who closes them when."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process import forks
from tests.process import isolated_objects as objects
from tests.process.harness import Site, in_threads, wait_ended, wait_until

import layerzero as lz
from layerzero.functions.calling import Exchange
from layerzero.functions.streams import Stream
from layerzero.ipc.functions import frames
from layerzero.ipc.functions.frames import Frame

ROOT = str(Path(__file__).parents[2])
counter: Any = objects.Counter
numbers: Any = objects.numbers


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A broker that knows the environment `plain`, and this process as its client."""
    forks.start_server()
    one = Site(tmp_path_factory.mktemp("store"), restart_budget=100, backoff_s=0.01)
    with one.environment():
        objects.PLAIN.build(quiet=True)
        one.start().connect()
        yield one
        lz.disconnect()
    one.stop()


pytestmark = pytest.mark.usefixtures("site")


def all_released() -> None:
    gc.collect()
    wait_until(lambda: objects.live() == 0)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_a_stream_takes_nothing() -> None:
    with numbers(2) as stream:
        with pytest.raises(lz.InvalidArgument, match="call its methods"):
            stream.send(1)
        with pytest.raises(lz.InvalidArgument, match="close"):
            stream.throw(ValueError)


def test_a_generators_items_come_one_by_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of any size; what it prints comes with them."""
    notes = tmp_path / "notes"
    assert list(numbers(5, str(notes))) == [0, 1, 2, 3, 4]
    assert lines(notes) == ["0", "1", "2", "3", "4", "closed"]
    assert list(numbers(0)) == []
    assert [len(text) for text in objects.long_texts(1, 300_000, 0, 5000, 300_000)] == [1, 300_000, 0, 5000, 300_000]
    assert capfd.readouterr().out.splitlines()[:2] == ["[plain] made 1", "[plain] made 300000"]
    assert numbers.last_report().served_by == objects.PLAIN.backend
    assert list(numbers.local(3)) == [0, 1, 2]
    assert [list(stream) for stream in numbers.map([1, 2])] == [[0], [0, 1]]
    assert list(numbers.submit(2).result()) == [0, 1]
    all_released()


def test_they_come_while_it_runs(tmp_path: Path) -> None:
    """The second is made when the first is here: it waits for who has it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    stream = iter(numbers(3, pipe=str(pipe)))
    assert next(stream) == 0
    with pipe.open("w"):
        assert list(stream) == [1, 2]
    assert list(stream) == []


def test_it_runs_one_item_ahead_and_no_further(tmp_path: Path) -> None:
    """And not before the first is wanted."""
    notes = tmp_path / "notes"
    stream = numbers(100, str(notes))
    objects.live()  # it would run before this
    assert lines(notes) == []
    assert next(stream) == 0
    wait_until(lambda: len(lines(notes)) == 2)
    objects.live()
    assert lines(notes) == ["0", "1"]
    stream.close()
    stream.close()
    assert lines(notes) == ["0", "1", "closed"]
    assert list(stream) == []
    all_released()


@pytest.mark.parametrize("how", ["breaks", "with", "collected"])
def test_it_is_closed_there_when_nobody_wants_more(tmp_path: Path, how: str) -> None:
    notes = tmp_path / "notes"
    if how == "breaks":
        for n in numbers(100, str(notes)):
            if n == 2:
                break
    elif how == "with":
        with numbers(100, str(notes)) as stream:
            assert next(stream) == 0
    else:
        stream = numbers(100, str(notes))
        next(stream)
        del stream
    wait_until(lambda: lines(notes)[-1:] == ["closed"])
    assert 2 <= len(lines(notes)) <= 5
    all_released()


def test_what_it_raises_ends_it() -> None:
    stream = numbers(5, fails="error")
    assert next(stream) == 0
    with pytest.raises(lz.RemoteError) as raised:
        next(stream)
    assert (raised.value.type, raised.value.facts["message"]) == ("LookupError", "no more bread")
    assert "serving.py" not in raised.value.traceback
    assert list(stream) == []
    stream = numbers(5, fails="item")
    assert next(stream) == 0
    with pytest.raises(lz.InvalidArgument, match=r"numbers has run, and item: object cannot go"):
        next(stream)
    assert list(stream) == []
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.copy(stream)
    with pytest.raises(lz.InvalidArgument, match="missing a required argument: 'end'"):
        numbers()
    all_released()


def test_one_that_does_not_close_says_so_and_no_more(capfd: pytest.CaptureFixture[str]) -> None:
    with numbers(5, fails="closing") as stream:
        assert next(stream) == 0
    objects.live()
    assert "[plain] LookupError: it does not close" in capfd.readouterr().err


def test_a_deadline_is_an_items(tmp_path: Path) -> None:
    patient = numbers.options(timeout_s=2.0)  # a busy machine needs more than half a second for an item
    stream = patient(5, str(tmp_path / "notes"), fails="hang")
    assert next(stream) == 0
    with pytest.raises(lz.DeadlineExceeded):
        next(stream)
    assert list(stream) == []
    all_released()


def test_a_worker_that_dies_in_the_middle_is_an_error(tmp_path: Path) -> None:
    """Nothing is made twice."""
    notes = tmp_path / "notes"
    stream = numbers.options(idempotent=True, fallback=numbers.local)(5, str(notes), fails="death")
    assert next(stream) == 0
    with pytest.raises(lz.BackendError, match="may have run in part"):
        next(stream)
    assert list(stream) == []
    assert lines(notes) == ["0", "1"]
    one = counter(0)
    idle, pid = numbers(5), one.pid()
    os.kill(pid, signal.SIGKILL)
    wait_ended(pid)
    with pytest.raises(lz.BackendError, match="numbers in plain: begin it anew: the worker that it ran in has ended"):
        next(idle)
    all_released()


def test_methods_and_objects_give_their_items(tmp_path: Path) -> None:
    with counter(3) as one, objects.Table() as table, objects.Row(3) as row, objects.Steps(3) as steps:
        assert list(one.up_to(6)) == [4, 5, 6]
        assert list(one.up_to.options(timeout_s=30)(10, step=2)) == [8, 10]
        assert list(one.up_to.submit(12).result()) == [11, 12]
        assert list(counter.halves(4)) == list(one.halves(4)) == [2, 1, 0.5]
        assert list(counter.up_to(one, 13)) == [13]
        assert list(row) == [0, 1, 2]
        assert list(steps) == [2, 1, 0]
        table["a"] = 1
        table["b"] = 2
        assert list(table.keys()) == ["a", "b"]
        with one.up_to.options(keep=True)(15) as held:
            assert held.type == "generator"
            assert list(held) == [14, 15]
            assert list(held) == []  # a generator is run through once
    with objects.bag(2, 1) as held:
        assert list(held) == [1, 2]
    with (
        objects.same.options(keep=True)(3) as held,
        pytest.raises(lz.RemoteError, match="'int' object is not iterable"),
    ):
        iter(held)
    all_released()


def test_threads_and_tasks_share_one() -> None:
    stream, found = numbers(40), []
    in_threads(4, lambda: found.extend(stream))
    assert sorted(found) == list(range(40))

    async def both() -> list[list[int]]:
        async def taken(stream: Any) -> list[int]:
            return [n async for n in stream]

        return list(await asyncio.gather(taken(numbers(5)), taken(numbers(7))))

    assert asyncio.run(both()) == [list(range(5)), list(range(7))]


def test_one_that_another_thread_closes_before_an_item_is_asked_for_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The item's call comes to the worker after the release: that is the end, and nothing is lost."""
    ask_for = Stream._next

    def closed_meanwhile(self: Stream) -> Any:
        call = ask_for(self)
        self.close()
        return call

    stream = numbers(4)
    monkeypatch.setattr(Stream, "_next", closed_meanwhile)
    assert list(stream) == []
    all_released()


def test_an_item_that_is_there_is_not_lost_to_the_next_ones_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with numbers(3) as stream, monkeypatch.context() as patched:
        patched.setattr(type(lz.session()), "submit", refused)
        assert next(stream) == 0
        patched.undo()
        assert list(stream) == [1, 2]


def refused(*_: Any) -> Any:
    raise lz.Busy("too many calls are open")


def test_a_killed_clients_generator_is_closed(site: Site, tmp_path: Path) -> None:
    """And nobody else takes from one."""
    notes = tmp_path / "notes"
    with numbers(5) as stream:
        reference = stream._stay.lend().reference.place
        code = (
            f"import sys\nsys.path.insert(0, {ROOT!r})\nfrom tests.process import isolated_objects as objects\n"
            "from tests.process.test_streams import ask\nlz.connect(runtime_dir=sys.argv[1])\n"
            f"one = objects.numbers(100, {str(notes)!r})\nnext(one)\n"
            f"print(type(ask({reference!r}).error).__name__, flush=True)\n"
            "import time; time.sleep(600)"
        )
        other = site.python(code, stderr=subprocess.PIPE)
        assert other.stdout is not None
        assert other.stdout.readline() == "ObjectLost\n"
        other.kill()
        other.communicate()
        wait_until(lambda: lines(notes)[-1:] == ["closed"])
        assert ask(reference).value == [0]
    with counter(1) as one:
        assert "Counter is no iterator" in str(ask(one._lz.lend().reference.place).error)
    all_released()


def test_a_generator_that_does_not_close_ends_its_worker(site: Site) -> None:
    """Its client has left and nobody waits for it: others would, for ever."""
    code = (
        f"import sys\nsys.path.insert(0, {ROOT!r})\nfrom tests.process import isolated_objects as objects\n"
        "lz.connect(runtime_dir=sys.argv[1])\none = objects.numbers(100, fails='closing hangs')\n"
        "print(next(one), flush=True)\nimport time; time.sleep(600)"
    )
    other, before = site.python(code, stderr=subprocess.PIPE), objects.pid()
    assert other.stdout is not None
    assert other.stdout.readline() == "0\n"
    other.kill()
    other.communicate()
    wait_ended(before)
    assert list(numbers(2)) == [0, 1]
    told = site.endpoints.worker_log(objects.PLAIN.backend).read_text()
    assert "Timeout (0:00:05)!" in told
    assert "isolated_objects.py" in told


def ask(reference: Any) -> Any:
    """The answer to a frame that wants the next item."""
    session = lz.session()
    frame = Frame([frames.NEXT, reference, 30])
    return session.run(Exchange(session, (objects.PLAIN.backend,), "test", "plain").request(frame))
