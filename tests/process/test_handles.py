"""Results that stay in an environment, and objects as arguments, through a real broker."""

from __future__ import annotations

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
from tests.process.harness import Site, wait_ended, wait_until

import layerzero as lz
from layerzero.functions.calling import Exchange
from layerzero.ipc.functions import frames, values
from layerzero.ipc.functions.frames import Frame

ROOT = str(Path(__file__).parents[2])
cls: Any = objects.Counter
rebuilt: Any = objects.Rebuilt


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


def test_a_result_that_cannot_cross_stays_and_is_an_argument() -> None:
    with objects.bag(3, 1, 2) as held:
        assert isinstance(held, lz.Handle)
        assert held.type == "tests.process.isolated_objects.Bag"
        assert "lz.Handle of a tests.process.isolated_objects.Bag in plain." in repr(held)
        assert objects.items(held) == [1, 2, 3]
        assert objects.items.submit(held).result() == [1, 2, 3]
        with pytest.raises(lz.InvalidArgument, match=r"bag has run, and result: .*Bag cannot go"):
            held.fetch()
        with pytest.raises(lz.InvalidArgument, match=r"same has run, and result: .*Bag cannot go"):
            objects.same(held)
        with pytest.raises(TypeError, match="cannot be copied"):
            copy.copy(held)
        with objects.same.options(keep=True)(held) as again:  # the very object, under another reference
            assert objects.live() == 1
            held.close()
            assert objects.live() == 1
            assert objects.items(again) == [1, 2, 3]
    with pytest.raises(lz.InvalidArgument, match=r"args\[0\]: .*Bag: this object is closed"):
        objects.items(held)
    all_released()


def test_a_result_that_can_cross_is_fetched() -> None:
    handle = objects.same.options(keep=True)([1, {"x": (2, "y" * 9000)}])
    assert handle.type == "list"
    assert handle.fetch() == handle.fetch() == [1, {"x": (2, "y" * 9000)}]
    handle.close()
    with pytest.raises(lz.InvalidArgument, match="is closed"):
        handle.fetch()
    future = objects.same.options(keep=True).submit(5)
    assert future.result().fetch() == 5
    assert [one.fetch() for one in objects.same.options(keep=True).map(range(40))] == list(range(40))


def test_methods_keep_their_results_too() -> None:
    with cls(4) as one, one.itself.options(keep=True)() as held:
        assert held.type.endswith("Counter")
        one.add()
        assert objects.counts(one, held, held) == [5, 5, 5]
        assert one.adds(held) == 10


def test_objects_are_arguments_wherever_they_lie() -> None:
    with cls(1) as one, cls(2) as two:
        assert objects.counts([one, {"x": two}], more=one) == [1, 2, 1]
        assert one.adds(other=two) == 3
        two.label = [one]  # attributes keep them
        one.close()
        assert objects.live() == 2
        assert two.adds.options(timeout_s=30)(two) == 4
    all_released()


def test_what_fails_leaves_nothing_there() -> None:
    with pytest.raises(lz.RemoteError):
        objects.items.options(keep=True)(3)
    with pytest.raises(lz.InvalidArgument, match="keep is 1; allowed: True, False"):
        objects.items.options(keep=1)
    with pytest.raises(lz.InvalidArgument, match="keep is for functions and methods"):
        cls.options(keep=True)
    all_released()


def test_objects_of_another_environment_are_refused_with_their_place() -> None:
    with cls(1) as one, objects.bag() as held:
        for value in (one, held):
            with pytest.raises(
                lz.InvalidArgument, match=r"args\[0\]\['x'\]\[0\]: .* in plain\..* the call is of other"
            ):
                objects.elsewhere({"x": [value]})
        assert "args" not in str(objects.counts.explain(one))


def test_lost_ones_are_refused_before_the_call_has_begun(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    one, held = cls(1), objects.bag(1)
    pid = one.pid()
    os.kill(pid, signal.SIGKILL)
    wait_ended(pid)
    for value in (one, held):
        with pytest.raises(lz.BackendError, match=r"kwargs\['more'\]\[1\]: the object is lost") as lost:
            objects.counts(more=[1, value])
        assert "may have run" not in str(lost.value)
    with pytest.raises(lz.BackendError, match=r"args\[0\]: the object is lost"):
        cls(one, path=str(notes))
    assert not notes.exists()
    with pytest.raises(lz.BackendError, match="Bag in plain: the object is lost"):
        held.fetch()


def test_rebuilt_ones_are_constructed_again_as_arguments(tmp_path: Path) -> None:
    path = tmp_path / "built"
    with rebuilt(5, path=str(path)) as one, rebuilt(6, path=str(path)) as two:
        pid = one.pid()
        os.kill(pid, signal.SIGKILL)
        wait_ended(pid)
        assert objects.counts(one, [two, one]) == [5, 6, 5]
        report = objects.counts.last_report()
        assert report.is_rebuilt
        assert len(report.failures) == 2
        assert path.read_text() == "5\n6\n5\n6\n"


def test_one_is_not_released_before_the_calls_that_it_was_given_to_have_ended(tmp_path: Path) -> None:
    """Whoever lets go of it meanwhile, and however."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for close in (True, False):
        one, two = cls(7), cls(8)
        first = objects.opened.submit(str(pipe), one)
        second, third = objects.counts.submit([one]), two.add.submit()
        if close:
            one.close()
            two.close()
        else:
            del one, two
        with pipe.open("w"):
            assert [first.result(), second.result(), third.result()] == [7, [7], 9]
        del first, second, third
        all_released()


def test_a_killed_clients_handles_go_with_it(site: Site) -> None:
    """A reference of its own leads nowhere for others, as an argument, too."""
    with objects.bag(1) as held:
        place = held._lz_lend(objects.PLAIN.backend).reference.place
        code = (
            f"import sys\nsys.path.insert(0, {ROOT!r})\nfrom tests.process import isolated_objects as objects\n"
            "from tests.process.test_handles import ask\nlz.connect(runtime_dir=sys.argv[1])\n"
            f"kept = [objects.bag(n) for n in range(3)]\nprint(type(ask({place!r}).error).__name__, flush=True)\n"
            "import time; time.sleep(600)"
        )
        other = site.python(code, stderr=subprocess.PIPE)
        assert other.stdout is not None
        assert other.stderr is not None
        assert other.stdout.readline() == "ObjectLost\n"
        assert ask(place).value == [1]
        assert objects.live() == 4
        other.kill()
        other.communicate()
        wait_until(lambda: objects.live() == 1)
        for strange in (place[:1], [*place, 1], ["a", "b"]):
            assert "no reference" in str(ask(strange).error)


def ask(place: list[Any]) -> Any:
    """The answer to a call of `items` with what a reference leads to."""
    session = lz.session()
    code = objects.items._places.tree([objects.PLAIN.backend])
    call = [frames.CALL, code, [values.LIST, [values.HELD, *place]], [values.DICT], 30]
    return session.run(Exchange(session, (objects.PLAIN.backend,), "test", "plain").request(Frame(call)))
