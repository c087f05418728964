"""lz.isolated: which functions it takes, and why not the others. Nothing runs here."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import pytest

import layerzero as lz
from layerzero.functions.code import reference

PLAIN = lz.env("plain")


def plain(x: int, *, y: int = 0) -> int:
    """It adds."""
    return x + y


class Class:
    class Inner: ...

    def method(self) -> None: ...


def test_a_function_goes_by_name_file_and_hash() -> None:
    code = reference(plain)
    file = Path(__file__)
    assert (code.module, code.qualname, code.file) == (__name__, "plain", str(file))
    assert code.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert not code.is_main
    assert file.relative_to(code.root).with_suffix("").as_posix().replace("/", ".") == __name__


def test_it_stays_a_function_with_its_name() -> None:
    found = lz.isolated(PLAIN)(plain)
    assert (found.__name__, found.__doc__, found.local(1, y=2)) == ("plain", "It adds.", 3)
    assert found.env is PLAIN
    assert lz.isolated(["numpy<2"])(plain).env.name == "plain"


def made() -> Any:
    inner = 1
    return lambda: inner


def nested() -> Any:
    def inside() -> None: ...

    return inside


def nested_class() -> type:
    class Local: ...

    return Local


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda: 1, "a lambda has no name"),
        (made(), "a lambda has no name"),
        (nested(), "defined inside of a function"),
        (Class.Inner, "is a class inside of a class"),
        (nested_class(), "is a class of a function"),
        (Class.method, "is a method"),
        (functools.partial(plain, 1), "is no function"),
        (len, "is no function"),
    ],
)
def test_what_no_other_process_can_import_is_refused(function: Any, text: str) -> None:
    with pytest.raises(lz.InvalidArgument, match=text):
        lz.isolated(PLAIN)(function)


def test_a_function_of_no_file_is_refused() -> None:
    """Of a notebook, say."""
    namespace: dict[str, Any] = {"__name__": "nowhere"}
    exec("def f(): pass", namespace)
    with pytest.raises(lz.InvalidArgument, match=r"is of no \.py file .* put it into a module"):
        lz.isolated(PLAIN)(namespace["f"])


def test_the_environment_must_be_named() -> None:
    with pytest.raises(lz.InvalidArgument, match="name the environment"):
        lz.isolated(plain)  # type: ignore[arg-type]
    with pytest.raises(lz.InvalidArgument, match=r"allowed: what lz\.env gives"):
        lz.isolated(3)(plain)  # type: ignore[arg-type]
    with pytest.raises(lz.InvalidArgument, match="on_death is for classes"):
        lz.isolated(PLAIN, on_death="rebuild")(plain)
    with pytest.raises(lz.InvalidArgument, match="fallback is 3"):
        lz.isolated(PLAIN, fallback=3)  # type: ignore[arg-type]


def test_a_call_without_a_session_says_so() -> None:
    with pytest.raises(lz.NotConnected, match=r"lz\.connect\(\)"):
        lz.isolated(PLAIN)(plain)(1)


def shape_of(x: Any) -> Any:
    return x.shape, x.dtype


def of_arrays(x: Any, y: Any = None) -> Any:
    return x


def into(x: Any, *, out: Any) -> Any:
    return out


def by_name(x: Any, *, y: Any = 1) -> Any:
    return x


def items(x: Any) -> Any:
    yield x


async def later(x: Any) -> Any:
    return x


def test_a_function_may_be_lifted() -> None:
    for function in (of_arrays, into):
        found = lz.isolated(PLAIN, shapes=shape_of, lift=True, trial=lambda *_: {})(function)
        assert found.options(lift=False, trial=None)._options.lift is False
    assert lz.isolated(PLAIN)(of_arrays)._options.lift is False


@pytest.mark.parametrize(
    ("function", "options", "what"),
    [
        (of_arrays, {"shapes": None}, "lift=True: say shapes="),
        (items, {"shapes": None}, "lift=True: say shapes="),
        (later, {}, "no generator and no coroutine function"),
        (by_name, {}, "takes its arguments by place"),
        (of_arrays, {"keep": True, "shapes": None}, "leave keep out"),
        (of_arrays, {"workers": 2}, "one environment with one worker"),
        (of_arrays, {"placement": "auto"}, "leave placement out"),
        (of_arrays, {"shadow": 0.5}, "leave shadow out"),
        (of_arrays, {"lift": "yes"}, "lift is 'yes'; allowed: True, False"),
        (of_arrays, {"trial": 5}, "trial is 5; allowed: a function of the same arguments"),
        (of_arrays, {"lift": False, "trial": shape_of}, "trial is of functions with lift=True"),
        (Class, {"shapes": None}, "lift is for functions"),
    ],
)
def test_what_cannot_be_lifted_is_refused_where_it_is_decorated(
    function: Any, options: dict[str, Any], what: str
) -> None:
    with pytest.raises(lz.InvalidArgument) as raised:
        lz.isolated(PLAIN, **{"shapes": shape_of, "lift": True, **options})(function)  # type: ignore[arg-type]
    assert what in raised.value.message.splitlines()[0]


def test_a_function_of_several_environments_is_not_lifted() -> None:
    with pytest.raises(lz.InvalidArgument, match="one environment with one worker"):
        lz.isolated([PLAIN, lz.env("other")], shapes=shape_of, lift=True)(of_arrays)
    found = lz.isolated(PLAIN, shapes=shape_of, lift=True)(of_arrays)
    with pytest.raises(lz.InvalidArgument, match="lift is for functions of one environment"):
        found.implementation(lz.env("other"))(into)


class device:  # as torch's
    def __str__(self) -> str:
        return "cuda:1"


device.__module__ = "torch"


def test_a_device_is_one_of_torchs_gpus() -> None:
    for one in ("cuda", "cuda:0", "cuda:12", device()):
        assert lz.isolated(PLAIN, device=one)(plain)._options.device == str(one)
    assert lz.isolated(PLAIN)(plain).options(device="cuda").options(device=None)._options.device is None
    assert lz.isolated(PLAIN, device="cuda")(Class).options(device=device())._options.device == "cuda:1"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"device": "cpu"}, "device is 'cpu'; allowed: the GPU that results lie on, such as cuda or cuda:1; leave it"),
        ({"device": "cuda:"}, "device is 'cuda:'"),
        ({"device": "cuda:x"}, "device is 'cuda:x'"),
        ({"device": "mps"}, "device is 'mps'"),
        ({"device": 0}, "device is 0"),
        ({"device": True}, "device is True"),
        ({"device": "cuda", "placement": "auto"}, "placement is 'auto'; allowed: worker, with device="),
        ({"device": "cuda", "lift": True, "shapes": shape_of}, "leave device out: lift is for calls with arrays"),
    ],
)
def test_what_is_no_device_is_refused_where_it_is_decorated(options: dict[str, Any], what: str) -> None:
    for target in (of_arrays, Class):
        with pytest.raises(lz.InvalidArgument) as raised:
            lz.isolated(PLAIN, **options)(target)  # type: ignore[arg-type]
        assert what in raised.value.message.splitlines()[0]
