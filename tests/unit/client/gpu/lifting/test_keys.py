"""By what a lifted call is known: client/gpu/_lifted.c beside the Python that it stands for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.client.connection import overlay
from layerzero.client.connection.call import Request
from layerzero.client.gpu import calls
from layerzero.client.gpu.fastpath import MISS
from layerzero.client.gpu.lifting import keys, lifted_library
from layerzero.ipc.cuda import streams
from layerzero.ipc.lifting.form import alignment_class

pytestmark = pytest.mark.skipif(lifted_library.lifted is None, reason=lifted_library.why_not)

NAMES = (
    *("known", "lifts", "failed", "last", "next", "miss"),
    *("policy", "baked", "dtypes", "tensor", "parameter", "size", "is_grad_enabled", "exchange", "array"),
)


class Array:
    """What of a CuPy array a key is made of."""

    def __init__(self, address: int, device: int, shape: Any, strides: Any, dtype: object) -> None:
        self.data = SimpleNamespace(ptr=address, device_id=device)
        self.shape, self.strides, self.dtype = shape, strides, dtype


@pytest.fixture(scope="module", autouse=True)
def cupy() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=Array))
        yield


def make(**told: Any) -> Any:
    plain = {"known": {}, "dtypes": {}, "miss": MISS, "policy": overlay.current, "baked": overlay.baked, "array": Array}
    return lifted_library.lifted.LiftedCalls(**{**dict.fromkeys(NAMES), **plain, **told})


def request(*args: Any, op: str = "silu", out: Any = None, backend: str | None = None, **more: Any) -> Request:
    params = more.pop("params", {})
    return Request(op, args, params, lambda *_: None, out, backend, **more)  # type: ignore[arg-type, return-value]


addresses = st.integers(0, 600) | st.integers(0, 2**64 - 1)
extents = st.lists(st.integers(0, 3), max_size=3).map(tuple)
arrays = st.builds(Array, addresses, st.integers(0, 1), extents, extents, st.sampled_from(["float32", "bfloat16"]))
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
        assert keys.key_of(one) == keys.key_of(other)


@given(requests, st.integers(1, 2**20))
def test_memory_elsewhere_has_the_same_key_where_it_is_aligned_alike(one: Request, step: int) -> None:
    def move(array: Any) -> Any:
        if array is None:
            return None
        address = array.data.ptr % 2**40 + 256 * step
        return Array(address, array.data.device_id, array.shape, array.strides, array.dtype)

    again = request(*map(move, one.args), op=one.op, out=move(one.out), backend=one.backend, params=dict(one.params))
    assert make().key(one) == make().key(again)
    assert keys.key_of(one) == keys.key_of(again)


@given(st.integers(0, 2**64 - 1))
def test_alignments_are_told_apart_as_the_form_does(address: int) -> None:
    key = make().key
    one, other = (request(Array(at, 0, (2,), (4,), "float32")) for at in (address, alignment_class(address)))
    assert key(one) == key(other)


@pytest.mark.parametrize(
    "other",
    [
        request(Array(1, 0, (2,), (4,), "float32"), timeout_s=1.0),
        request(Array(1, 0, (2,), (4,), "float32"), output_bytes=(4,)),
        request(Array(1, 0, (2,), (4,), "float32"), is_rigid=True),
        request(object()),
    ],
)
def test_what_has_no_key_has_none_in_both(other: Request) -> None:
    assert make().key(other) is None
    assert keys.key_of(other) is None


def test_what_is_not_known_is_for_who_comes_next() -> None:
    x = request(Array(256, 0, (2,), (4,), "float32"))
    asked: list[Any] = []

    def following(one: Request, start_ns: int) -> Any:
        asked.append((one, start_ns))
        return "result"

    for known in ({}, {b"another": object()}):
        assert make(known=known, next=following).run(x, 7) == "result"
    assert asked == [(x, 7)] * 2
    assert make(known={b"another": object()}, next=following).run(request(object()), 8) == "result"


def test_calls_are_counted_down() -> None:
    x = request(Array(256, 0, (2,), (4,), "float32"))
    known: dict[bytes, Any] = {}
    told: list[bytes] = []
    lifts = SimpleNamespace(count_down=lambda key: (told.append(key), known.pop(key)))
    mine = make(known=known, next=lambda *_: "next", lifts=lifts)
    key = mine.key(x)
    known[key] = 3
    assert [(mine.run(x, 0), known.get(key), len(told)) for _ in range(4)] == [
        *(("next", 2, 0), ("next", 1, 0), ("next", None, 1), ("next", None, 1))
    ]


def test_limits_are_those_of_the_python() -> None:
    """They stand in two languages."""
    assert lifted_library.lifted.LIMITS == (calls.READ_EVERY, streams.PER_THREAD)


def test_an_interrupt_is_not_swallowed() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(policy=interrupt).key(request(Array(1, 0, (2,), (4,), "float32")))


def test_what_it_is_not_told_is_named() -> None:
    with pytest.raises(TypeError, match="known is missing"):
        lifted_library.lifted.LiftedCalls(lifts=None)
    with pytest.raises(TypeError, match="site is missing"):
        lifted_library.lifted.LiftedSite(gpu=None)
    with pytest.raises(TypeError, match="colour"):
        make().learn(colour=1)


@given(requests, st.integers(-3, 3), st.integers(0, 300), st.data())
@pytest.mark.parametrize("by", ["C", "Python"])
def test_keys_of_calls_that_follow_are_those_that_they_have(
    by: str, one: Request, step: int, count: int, data: st.DataObject
) -> None:
    """Whatever grows of shapes and strides; and nothing follows where anything else is different."""
    steps = [data.draw(st.integers(0, 3)) for _ in range(16)]

    def further(n: int) -> Request:
        def move(array: Any) -> Any:
            if array is None:
                return None
            shape, strides = (
                tuple(a + n * step * by for a, by in zip(part, steps[at:], strict=False))
                for at, part in ((0, array.shape), (7, array.strides))
            )
            return Array(array.data.ptr, array.data.device_id, shape, strides, array.dtype)

        return request(*map(move, one.args), op=one.op, out=move(one.out), backend=one.backend, params=one.params)

    calls = make()
    key = keys.key_of if by == "Python" else calls.key
    arrays = len(one.args) + 1
    assert keys.further(key(further(1)), key(one), count, arrays) == key(further(1 + count))
    for other in (replace(one, op="other"), replace(one, params={**one.params, "d": 1})):
        assert keys.further(key(other), key(one), count, arrays) is None
