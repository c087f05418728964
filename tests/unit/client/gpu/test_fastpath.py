"""By what a call is known again: client/gpu/_fastpath.c beside the Python that it stands for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.client.connection import overlay
from layerzero.client.connection.call import Request
from layerzero.client.gpu import call_cache, calls, device, fastpath_library, outcomes
from layerzero.client.gpu.fastpath import MISS
from layerzero.ipc.cuda import streams

pytestmark = pytest.mark.skipif(fastpath_library.repeats is None, reason=fastpath_library.why_not)

NAMES = (
    *("known", "calls", "outcomes", "late", "failed", "numbers", "last", "record_type", "turn_type", "miss"),
    *("policy", "baked", "dtypes", "tensor", "parameter", "size", "is_grad_enabled", "exchange", "array"),
)


class Array:
    """What of a CuPy array a key is made of."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: object) -> None:
        self.data, self.shape, self.strides, self.dtype = SimpleNamespace(ptr=address), shape, strides, dtype


@pytest.fixture(scope="module", autouse=True)
def cupy() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=Array))
        yield


def make(**told: Any) -> Any:
    plain = {"known": {}, "dtypes": {}, "miss": MISS, "policy": overlay.current, "baked": overlay.baked, "array": Array}
    return fastpath_library.repeats.Repeats(**{**dict.fromkeys(NAMES), **plain, **told})


def request(*args: Any, op: str = "silu", out: Any = None, backend: str | None = None, **more: Any) -> Request:
    params = more.pop("params", {})
    return Request(op, args, params, lambda *_: None, out, backend, **more)  # type: ignore[arg-type, return-value]


DTYPES = ("float32", "bfloat16")
X = Array(4096, (2, 3), (12, 4), DTYPES[0])
extents = st.lists(st.integers(0, 3), max_size=3).map(tuple)
arrays = st.builds(Array, st.integers(0, 2**64 - 1), extents, extents, st.sampled_from(DTYPES))
texts = st.sampled_from(["", "a", "ab", "n", "s"])
values = st.none() | st.booleans() | st.integers(-2, 2) | st.floats(allow_nan=False) | texts | extents
requests = st.builds(
    lambda args, op, out, backend, params: request(*args, op=op, out=out, backend=backend, params=params),
    st.lists(st.none() | arrays, min_size=1, max_size=3),
    st.sampled_from(["silu", "gelu"]),
    st.none() | arrays,
    st.none() | texts,
    st.dictionaries(st.sampled_from("abc"), values, max_size=3),
)


@given(requests, requests)
def test_calls_have_one_key_only_where_the_python_gives_them_one(one: Request, other: Request) -> None:
    key = make().key
    assert isinstance(key(one), bytes)
    if key(one) == key(other):
        assert call_cache._key_of(one) == call_cache._key_of(other)


@given(requests)
def test_a_call_that_is_made_again_has_the_same_key(one: Request) -> None:
    again = request(*one.args, op=one.op, out=one.out, backend=one.backend, params=dict(one.params))
    assert make().key(one) == make().key(again)


@pytest.mark.parametrize(
    "other",
    [
        request(X, timeout_s=1.0),
        request(X, output_bytes=(4,)),
        request(X, is_rigid=True),
        request(object()),
        request(),
        request(X, params={"n": 1 << 64}),
        request(X, params={"n": ["a list"]}),
        request(X, params={"text": "x" * 2000}),
        request(Array(1 << 65, (1,), (4,), "float32")),
        request(Array(1, ("a",), (4,), "float32")),  # type: ignore[arg-type]
    ],
)
def test_what_it_cannot_know_is_left_to_the_python(other: Request) -> None:
    assert make().key(other) is None


def test_limits_are_those_of_the_python() -> None:
    """They stand in two languages."""
    mine = (calls.READ_EVERY, calls.LOOK_EVERY, device.MAX_AHEAD, 2 * outcomes.MAX_LATE, streams.PER_THREAD)
    assert mine == fastpath_library.repeats.LIMITS


def test_dtypes_are_compared_by_value() -> None:
    """Each may be an object of its own, whose address is another's later."""
    key = make().key
    first = key(request(Array(1, (2,), (4,), np.dtype(np.float32, copy=True))))
    assert first == key(request(Array(1, (2,), (4,), np.dtype(np.float32, copy=True))))
    assert first != key(request(Array(1, (2,), (4,), np.dtype(np.int32, copy=True))))


def test_the_policy_of_the_moment_is_in_the_key() -> None:
    plain, text = make().key(request(X)), overlay.Overlay.of({"origin": "test", "values": {"locks": {}}})
    assert make(policy=lambda: text).key(request(X)) not in (None, plain)


def test_an_interrupt_is_not_swallowed() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(policy=interrupt).key(request(X))


def test_calls_that_were_not_made_before_are_missed() -> None:
    mine = make()
    assert mine.run(request(X), 0) is MISS
    mine = make(known={b"another": object()})
    assert mine.run(request(X), 0) is MISS


def test_what_it_is_not_told_is_named() -> None:
    with pytest.raises(TypeError, match="known is missing"):
        fastpath_library.repeats.Repeats(calls=None)
    with pytest.raises(TypeError, match="gpu is missing"):
        fastpath_library.repeats.CallSite(lane=None)
    with pytest.raises(TypeError, match="colour"):
        make().learn(colour=1)
