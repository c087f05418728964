"""Modules of an environment by name, through a real broker: what can be named, and what not."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from tests.process import forks
from tests.process.harness import Site, wait_ended

import layerzero as lz
from layerzero.functions.calling import Exchange
from layerzero.ipc.functions import frames, values
from layerzero.ipc.functions.frames import Code, Frame

PLAIN = lz.env("plain")  # workers need msgpack and zmq: they are in every environment
msgpack: Any = lz.module("msgpack", PLAIN, timeout_s=60)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A broker that knows the environment `plain`, and this process as its client."""
    forks.start_server()
    one = Site(tmp_path_factory.mktemp("store"), restart_budget=100, backoff_s=0.01)
    with one.environment():
        PLAIN.build(quiet=True)
        one.start().connect()
        yield one
        lz.disconnect()
    one.stop()


pytestmark = pytest.mark.usefixtures("site")


def test_functions_are_called_by_name_without_a_file_of_the_programs() -> None:
    packed = msgpack.packb({"a": [1, 2]}, use_bin_type=True)
    assert packed == b"\x81\xa1a\x92\x01\x02"
    assert msgpack.unpackb.submit(packed).result() == {"a": [1, 2]}
    assert list(msgpack.packb.map([1, 2])) == [b"\x01", b"\x02"]
    assert msgpack.packb is msgpack.packb
    assert msgpack.packb.last_report().function == "msgpack.packb"
    assert "msgpack.packb in plain." in str(msgpack.packb.explain(1))
    assert repr(msgpack.packb) == f"<lz.isolated msgpack.packb in {PLAIN.backend}>"
    assert msgpack.packb.warmup() > 0
    assert msgpack.packb.options(fallback=lambda *_: "here", timeout_s=5)(1) == b"\x01"
    with pytest.raises(lz.InvalidArgument, match="a function of its environment alone"):
        msgpack.packb.local(1)


def test_a_module_can_be_copied_and_pickled() -> None:
    for same in (copy.copy(msgpack), copy.deepcopy(msgpack), pickle.loads(pickle.dumps(msgpack))):  # noqa: S301
        assert repr(same) == repr(msgpack)
        assert same.packb(1) == b"\x01"


def test_values_submodules_and_classes(site: Site) -> None:
    assert msgpack.version[0] >= 1
    assert repr(msgpack.fallback).startswith("<lz.module msgpack.fallback in plain.")
    with msgpack.fallback.Packer(autoreset=False) as packer:
        packer.pack([1, "b"])
        assert packer.bytes() == b"\x92\x01\xa1b"
        packer.reset()
        assert packer.bytes() == b""
        assert not hasattr(packer, "nothing")
        assert {"pack", "close"} < set(dir(packer))
        assert isinstance(packer, msgpack.fallback.Packer)
        with pytest.raises(lz.RemoteError) as raised:
            packer.pack_array_header("x")
        assert raised.value.type == "TypeError"
        assert "fallback.py" in raised.value.traceback
        assert "serving.py" not in raised.value.traceback
    with msgpack.fallback.Unpacker() as unpacker:
        unpacker.feed(b"\x01\x02")
        assert list(unpacker) == [1, 2]
    with msgpack.Timestamp.from_unix(2.5) as stamp:
        assert (stamp.seconds, stamp.to_unix()) == (2, 2.5)
    deep = lz.module("msgpack.exceptions", PLAIN)
    with deep.StackError.options(on_death="rebuild")("x") as rebuilt:
        assert rebuilt.args == ("x",)
        pid = site.backend(PLAIN.backend)["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_ended(pid)
        assert rebuilt.args == ("x",)


def test_what_is_not_there_is_said() -> None:
    for owner, name in ((msgpack, "packd"), (msgpack.fallback, "nothing"), (msgpack, "nowhere")):
        with pytest.raises(AttributeError, match=rf"module 'msgpack.*has no attribute '{name}'"):
            getattr(owner, name)
    assert not hasattr(msgpack, "nowhere")
    with pytest.raises(lz.InvalidArgument, match=r"has no module nowhere\.deep; add the package that has it"):
        lz.module("nowhere.deep", PLAIN).anything  # noqa: B018
    with pytest.raises(lz.RemoteError):
        msgpack.unpackb(3)
    with pytest.raises(lz.InvalidArgument, match=r"args\[0\]: set cannot go"):
        msgpack.packb({1})
    with pytest.raises(lz.EnvError, match="run: lz env build"):
        lz.module("msgpack", ["packaging==24.0"]).packb  # noqa: B018


@pytest.mark.parametrize("name", ["", "a b", "os.", "_private", "a._b", 3, "../x"])
def test_a_name_that_is_none_is_refused_at_once(name: Any) -> None:
    with pytest.raises(lz.InvalidArgument, match="is no public name of a module"):
        lz.module(name, PLAIN)


def test_what_is_private_is_an_attribute_error() -> None:
    for name in ("_cmsgpack", "__file__", "__builtins__"):
        with pytest.raises(AttributeError, match="names with an underscore"):
            getattr(msgpack, name)


@pytest.mark.parametrize(
    ("module", "qualname", "text"),
    [
        ("os", "system", "os is of the standard library; allowed: modules of the environment's packages"),
        ("builtins", "exec", "builtins is of the standard library"),
        ("runpy", "run_path", "runpy is of the standard library"),
        ("layerzero.workers.boot", "import_provider", "LayerZero's own"),
        ("msgpack", "os.system", "os is of the standard library"),
        ("msgpack.fallback", "sys.exit", "sys is of the standard library"),
        ("msgpack.ext", "namedtuple", "is collections.namedtuple, not the module's own"),
        ("msgpack", "packb.__globals__", "'__globals__' is no public name"),
        ("msgpack", "packb.__class__", "'__class__' is no public name"),
        ("msgpack", "packb.func_globals", "is no module or class"),
        ("msgpack", "version.count", "is no module or class"),
        ("msgpack._cmsgpack", "Packer", "'_cmsgpack' is no public name"),
        ("msgpack", "a/b", "'a/b' is no public name"),
        ("msgpack", "a" * 600, "a name of 608 characters; allowed: 500"),
        ("", "x", "'' is no public name"),
    ],
)
def test_what_may_not_be_named_is_refused_by_the_worker(module: str, qualname: str, text: str) -> None:
    """Whatever the client says."""
    code = Code.installed(module, qualname).to_tree()
    for frame in ([frames.CALL, code, [values.LIST], [values.DICT], 30], [frames.NAME, code, 30], [frames.LOAD, code]):
        assert text in str(ask(frame).error)


def test_no_file_and_no_folder_of_others_comes_with_a_name(tmp_path: Any) -> None:
    (tmp_path / "planted.py").write_text("raise SystemError('it was run')\n")
    for code in (
        ["planted", "x", "", "", str(tmp_path), False],
        ["planted", "x", "", "0" * 64, "", False],
        ["msgpack", "packb", "", "", "", True],
    ):
        assert "a name of the environment's has a file" in str(ask([frames.NAME, code, 30]).error)
    assert "has no module planted" in str(ask([frames.NAME, ["planted", "x", "", "", "", False], 30]).error)


def ask(head: list[Any]) -> Any:
    session = lz.session()
    return session.run(Exchange(session, (PLAIN.backend,), "test", "plain").request(Frame(head)))
