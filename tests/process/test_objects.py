"""Objects of isolated classes, through a real broker: state, attributes, deaths, and who lets go of them when."""

from __future__ import annotations

import contextlib
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
from layerzero.functions.calling import MIN_ROOM, Exchange
from layerzero.ipc.functions import frames, values
from layerzero.ipc.functions.frames import Frame

USED = """
import sys
sys.path.insert(0, {root!r})
from tests.process import isolated_objects as objects
lz.connect(runtime_dir=sys.argv[1])
"""
ROOT = str(Path(__file__).parents[2])


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


@contextlib.contextmanager
def made(cls: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    one = cls(*args, **kwargs)
    try:
        yield one
    finally:
        one.close()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_ended(pid)


def test_an_object_keeps_its_state_between_calls_in_its_environment() -> None:
    with made(objects.Counter, 5) as one, made(objects.Counter, start=50) as other:
        assert one.pid() not in (os.getpid(), os.getppid())
        assert [one.add(), one.add(n=2), other.add()] == [6, 8, 51]
        futures = [one.add.submit(1) for _ in range(10)]
        assert [future.result(30) for future in futures] == list(range(9, 19))
        report = objects.Counter.last_report()  # type: ignore[attr-defined]
        assert report.function == "tests.process.isolated_objects.Counter.add"
        assert (report.served_by, report.attempts, report.is_rebuilt) == (objects.PLAIN.backend, 1, False)
        assert isinstance(one, objects.Counter)  # type: ignore[arg-type]
        assert (one.joined("a", "b"), one.name()) == ("a-b", "Counter")
    assert objects.Counter.local(3).add() == 4  # type: ignore[attr-defined]


def test_public_attributes_and_properties_are_read_and_set() -> None:
    with made(objects.Counter) as one:
        one.count = 4
        assert (one.count, one.double, one.SIZE) == (4, 8, 7)
        one.double = 20
        assert one.add(0) == 10
        one.label = {"new": (1, 2)}
        assert one.label == {"new": (1, 2)}
        assert not hasattr(one, "nothing")
        for name in ("_path", "__wrapped__", "mro"):
            with pytest.raises(AttributeError):
                getattr(one, name)
        for name in ("_path", "add", "close"):
            with pytest.raises(AttributeError, match="cannot be set"):
                setattr(one, name, 1)
        with pytest.raises(lz.InvalidArgument, match=r"args\[0\]: object cannot go"):
            one.count = object()
        assert {"add", "close", "double"} < set(dir(one))


def test_methods_and_attributes_of_the_class(tmp_path: Path) -> None:
    """A method that returns an object of the class is another constructor."""
    cls: Any = objects.Counter
    assert (cls.SIZE, cls.name(), cls.joined("a", "b"), cls.joined.submit("c").result()) == (7, "Counter", "a-b", "c")
    with cls.twice(4) as one, cls.twice.options(timeout_s=30).submit(start=5).result() as two:
        assert isinstance(one, cls)
        assert (one.add(), two.add(), cls.add(one, n=3), cls.adds(two, one)) == (9, 11, 12, 23)
        assert cls.last_report().function == "tests.process.isolated_objects.Counter.adds"
        with cls.twice.options(keep=True)(1) as held:
            assert one.adds(held) == 14
    for number in range(8):  # later ones of a function would pass the broker
        with cls.once(number) as again:
            assert again.add() == number + 1
    for name, why in (("double", "is an object's"), ("nothing", "has no nothing"), ("_path", "stay there")):
        with pytest.raises(AttributeError, match=why):
            getattr(cls, name)
    with pytest.raises(lz.InvalidArgument, match="too many positional arguments"):
        cls.twice(1, 2, 3)
    with pytest.raises(lz.InvalidArgument, match="fallback is for functions"):
        cls.twice.options(fallback=print)
    built = tmp_path / "built"
    repeated: Any = objects.Rebuilt
    with repeated.twice(3, str(built)) as rebuilt:
        kill(rebuilt.pid())
        assert rebuilt.add() == 7
        assert built.read_text() == "6\n6\n"


def test_operators_are_those_of_the_class() -> None:
    with made(objects.Table) as table, made(objects.Counter) as counter:
        table["a"] = 3
        assert (len(table), table["a"], table(2), bool(table)) == (1, 3, 3, True)
        with pytest.raises(lz.RemoteError) as missing:
            table["b"]
        assert missing.value.type == "KeyError"
        with pytest.raises(lz.RemoteError, match="KeyError: 0"):  # as here: it has no __iter__, and its keys are texts
            list(table)
        assert counter
        assert not callable(counter)
        for missing_there in (len, iter):
            with pytest.raises(TypeError):
                missing_there(counter)


def test_errors_are_those_of_functions() -> None:
    with made(objects.Counter) as one:
        with pytest.raises(lz.RemoteError) as raised:
            one.fail("bread")
        assert (raised.value.type, raised.value.facts["message"]) == ("LookupError", "no bread")
        assert "serving.py" not in raised.value.traceback
        assert 'objects.py", line' in raised.value.traceback
        with pytest.raises(lz.InvalidArgument, match=r"Counter\.add: too many positional"):
            one.add(1, 2)
        with pytest.raises(lz.InvalidArgument, match=r"Counter\.itself has run, and result: .*Counter cannot go"):
            one.itself()
        with pytest.raises(TypeError, match="cannot be copied"):
            copy.copy(one)
    with made(objects.Counter) as one:
        quick = one.hang.options(timeout_s=0.5)
        with pytest.raises(lz.DeadlineExceeded):
            quick()
        with pytest.raises(lz.InvalidArgument, match="fallback is for functions"):
            one.add.options(fallback=print)
    with pytest.raises(lz.InvalidArgument, match="unexpected keyword argument 'size'"):
        objects.Counter(size=3)  # type: ignore[call-arg]
    with pytest.raises(lz.RemoteError, match="no such model"):
        objects.Broken()
    with pytest.raises(lz.InvalidArgument, match="has no subclasses"):

        class Sub(objects.Counter): ...


def test_a_context_manager_is_the_classs_own(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with objects.Session(str(notes)) as one:
        assert one.count == 100
    assert notes.read_text() == "exit None None"
    with objects.Session(str(notes), hides=True):
        raise KeyError("bread")
    assert notes.read_text() == "exit RuntimeError KeyError: 'bread'"
    with pytest.raises(KeyError), objects.Session(str(notes)):
        raise KeyError("bread")
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(objects.Counter(3))  # type: ignore[type-var]  # it has none: the proxy is one
        assert one.add() == 4
    with pytest.raises(lz.InvalidArgument, match="is closed"):
        one.add()
    objects.File(path=str(notes)).close()  # type: ignore[attr-defined]
    assert notes.read_text() == "closed"


def test_closing_and_collection_release_it() -> None:
    gc.collect()
    wait_until(lambda: objects.live() == 0)
    one: Any = objects.Counter()
    two: Any = objects.Counter()
    assert (two.add(), objects.live()) == (1, 2)
    one.close()
    one.close()
    assert objects.live() == 1
    future = two.add.submit()
    del two
    assert future.result() == 2  # a call keeps its object
    del future
    wait_until(lambda: objects.live() == 0)


def test_a_program_has_so_many_and_no_more() -> None:
    many: list[Any] = []
    with pytest.raises(lz.InvalidArgument, match="1,024 objects of this program"):
        many.extend(objects.Counter() for _ in range(1100))
    del many
    gc.collect()
    wait_until(lambda: objects.live() == 0)


@pytest.mark.parametrize("how", ["killed", "deadline", "connected anew"])
def test_one_that_is_lost_between_calls_is_an_error(site: Site, how: str) -> None:
    cls: Any = objects.Counter
    one = cls.options(timeout_s=0.5 if how == "deadline" else 60)(5)
    if how == "deadline":
        with pytest.raises(lz.DeadlineExceeded):
            one.hang()
    elif how == "killed":
        kill(one.pid())
    else:
        lz.disconnect()
        site.connect()
    for _ in range(2):
        with pytest.raises(lz.BackendError, match=r'the object is lost: .* on_death="rebuild"') as lost:
            one.add()
        assert "may have run in part" not in str(lost.value)
    one.close()
    with made(objects.Counter) as other:
        assert other.add() == 1


def test_one_that_is_rebuilt_is_constructed_from_the_same_arguments(tmp_path: Path) -> None:
    """The call that found it lost says so; nothing is told twice."""
    path = tmp_path / "built"
    with made(objects.Rebuilt, 5, path=str(path)) as one:
        one.add()
        kill(one.pid())
        future = one.add.submit(2)
        assert future.result() == 7
        assert future.report.is_rebuilt
        assert "constructed again" in str(future.report)
        assert one.add() == 8
        assert not objects.Rebuilt.last_report().is_rebuilt  # type: ignore[attr-defined]
        assert path.read_text() == "5\n5\n"
        kill(one.pid())
        futures = [one.add.submit(1) for _ in range(4)]
        in_threads(4, lambda: one.add(1))
        assert [future.result() >= 6 for future in futures] == [True] * 4
        assert one.count == 5 + 8
        assert path.read_text() == "5\n5\n5\n"


def test_a_call_that_a_death_interrupts_follows_idempotent(tmp_path: Path) -> None:
    """Unlike one that was not begun."""
    with made(objects.Rebuilt, 5) as one:
        with pytest.raises(lz.BackendError, match=r"may have run in part: idempotent=True"):
            one.dies_once(str(tmp_path / "once"))
        assert one.count == 5
    with made(objects.Repeated, 7) as one:
        assert one.dies_once(str(tmp_path / "twice")) == 17
        report = objects.Repeated.last_report()  # type: ignore[attr-defined]
        assert report.is_rebuilt
        assert len(report.failures) == 2
    with made(objects.Counter, 7) as one:
        with pytest.raises(lz.BackendError, match="may have run in part"):
            one.dies_once(str(tmp_path / "error"))
        with pytest.raises(lz.BackendError, match="is lost"):
            one.add()


def test_a_killed_clients_objects_go_with_it(site: Site) -> None:
    wait_until(lambda: objects.live() == 0)
    code = (
        USED.format(root=ROOT)
        + "kept = [objects.Counter() for _ in range(3)]\nprint('up', flush=True)\nimport time; time.sleep(600)"
    )
    other = site.python(code)
    assert other.stdout is not None
    assert other.stdout.readline() == "up\n"
    assert objects.live() == 3
    other.kill()
    other.wait()
    other.stdout.close()
    wait_until(lambda: objects.live() == 0)


def test_another_clients_reference_leads_nowhere(site: Site) -> None:
    """Nor can it release the object."""
    with made(objects.Counter, 5) as one:
        reference = one._lz.lend().reference.place
        code = USED.format(root=ROOT) + (
            "from tests.process.test_objects import ask\n"
            f"print(type(ask({reference!r}, 'add').error).__name__, ask({reference!r}, None).error)"
        )
        other = site.python(code, stderr=subprocess.PIPE)
        out, err = other.communicate(timeout=60)
        assert out == "ObjectLost None\n", err
        assert ask(reference, "add").value == 6
        for strange in (reference[:1], [*reference, 1], None, ["a", "b"]):
            assert "no reference" in str(ask(strange, "add").error)
        assert "is private" in str(ask(reference, "_path").error)
        assert "is private" in str(ask(reference, "__class__").error)


def ask(reference: Any, name: str | None) -> Any:
    """The answer to a frame that names the object; without a name one that releases it."""
    session = lz.session()
    use = [frames.USE, reference, frames.METHOD, name, [values.LIST], [values.DICT], 30]
    frame = Frame([frames.RELEASE, [reference]] if name is None else use)
    return session.run(Exchange(session, (objects.PLAIN.backend,), "test", "plain").request(frame, room=MIN_ROOM))


def test_a_forked_child_has_no_objects_and_takes_none_away() -> None:
    with made(objects.Rebuilt, 5) as one, made(objects.Counter, 5) as lost:
        one.add()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                lost.close()
                status = 0 if one.add() == 6 else 2
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert (one.add(), lost.add()) == (7, 6)
