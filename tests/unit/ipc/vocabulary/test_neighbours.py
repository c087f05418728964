"""ipc/vocabulary/neighbours.py: calls with other extents, and what other processes may say of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.ipc.errors import InvalidArgument, ProtocolError
from layerzero.ipc.vocabulary.neighbours import Neighbourhood, check_sizes, pack_values, unpack_values
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.prepared import neighbour
from layerzero.workers.provider import Call

DENSE = TensorSpec.contiguous("float32", (2, 100, 64))
PAIR = Neighbourhood(((65, 128),), ((-1, 0, -1), (-1, 0, -1)))


def resized(spec: TensorSpec, *places: int, value: int = 70) -> TensorSpec:
    (found,) = Neighbourhood(((65, 128),), (places,)).apply((spec,), (value,)) or (None,)
    assert found is not None
    return found


def test_dense_tensors_stay_dense() -> None:
    assert resized(DENSE, -1, 0, -1) == TensorSpec.contiguous("float32", (2, 70, 64))


def test_a_transposed_tensor_stays_dense_in_its_own_order() -> None:
    """As queries are that a linear layer has written, token by token."""
    tokens = TensorSpec.contiguous("float32", (2, 100, 4, 16)).permute(0, 2, 1, 3)
    assert resized(tokens, -1, -1, 0, -1) == TensorSpec.contiguous("float32", (2, 70, 4, 16)).permute(0, 2, 1, 3)


def test_a_slice_keeps_its_strides() -> None:
    """The first n rows of a cache that is longer."""
    cache = TensorSpec("float32", (2, 100, 64), (64 * 512, 64, 1))
    assert resized(cache, -1, 0, -1) == TensorSpec("float32", (2, 70, 64), (64 * 512, 64, 1))


def test_a_slice_that_becomes_all_of_its_memory_is_another_kind_of_call() -> None:
    """Rules and timings tell dense memory from rows."""
    cache = TensorSpec("float32", (4, 99, 64), (100 * 64, 64, 1))
    near = Neighbourhood(((65, 128),), ((-1, 0, -1),))
    assert near.apply((cache,), (98,)) is not None
    assert near.apply((cache,), (100,)) is None


def test_what_is_left_out_stays_out() -> None:
    found = Neighbourhood(((65, 128),), (None, (0,))).apply((None, TensorSpec.contiguous("bool", (99,))), (65,))
    assert found == (None, TensorSpec.contiguous("bool", (65,)))


@pytest.mark.parametrize("values", [(64,), (129,), (0,), (), (70, 71), (1 << 60,)])
def test_values_that_are_not_allowed_make_no_call(values: tuple[int, ...]) -> None:
    assert PAIR.apply((DENSE, DENSE), values) is None


def test_two_symbols_have_two_values() -> None:
    """Else they would be one, and the call of another kind."""
    both = Neighbourhood(((65, 128), (65, 256)), ((0, 1),))
    base = (TensorSpec.contiguous("float32", (66, 130)),)
    assert both.apply(base, (70, 71)) is not None
    assert both.apply(base, (70, 70)) is None


def test_values_are_those_of_the_first_places() -> None:
    """Whether the others agree shows in what `apply` makes of them."""
    other = TensorSpec.contiguous("float32", (2, 90, 64))
    assert PAIR.values((other, DENSE)) == (90,)
    assert PAIR.apply((DENSE, DENSE), (90,)) != (other, DENSE)


def test_it_travels() -> None:
    assert Neighbourhood.from_wire(PAIR.to_wire(), (DENSE, DENSE)) == PAIR
    assert unpack_values(pack_values((1, 1 << 40))) == (1, 1 << 40)


@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        [[[65, 128]]],
        [[[65, 128]], [[-1, 0, -1]]],  # a tensor short
        [[], [[-1, -1, -1]] * 2],  # no symbol
        [[[65, 128]] * 9, [[-1, 0, -1]] * 2],  # too many
        [[[128, 65]], [[-1, 0, -1]] * 2],
        [[[0, 65]], [[-1, 0, -1]] * 2],
        [[[65, 1 << 50]], [[-1, 0, -1]] * 2],
        [[[65.0, 128]], [[-1, 0, -1]] * 2],
        [[[True, 128]], [[-1, 0, -1]] * 2],
        [[[65, 128, 1]], [[-1, 0, -1]] * 2],
        [[[65, 128]], [[-1, 1, -1]] * 2],  # no such symbol
        [[[65, 128]], [[-2, 0, -1]] * 2],
        [[[65, 128]], [[-1, 0]] * 2],  # another ndim
        [[[65, 128]], [[-1, "0", -1]] * 2],
        [[[65, 128]], [None, [-1, 0, -1]]],
        [5, 5],
        "ab",
    ],
)
def test_what_makes_no_sense_is_refused(said: Any) -> None:
    with pytest.raises(ProtocolError):
        Neighbourhood.from_wire(said, (DENSE, DENSE))


def test_tensors_beyond_any_machine_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="above the limit"):
        check_sizes((TensorSpec.contiguous("float32", (1 << 30, 1 << 30)),))


numbers = st.integers(-2, 1 << 64) | st.none() | st.text(max_size=2) | st.floats()
near_wire = st.tuples(
    st.lists(st.lists(numbers, max_size=3), max_size=10),
    st.lists(st.none() | st.lists(numbers, max_size=4), max_size=4),
).map(list)


@given(near_wire | numbers, st.lists(st.integers(0, (1 << 64) - 1), max_size=9))
def test_nothing_that_others_say_breaks_a_process(said: Any, values: list[int]) -> None:
    """It is refused, or what it allows are tensors of sizes that it names."""
    try:
        near = Neighbourhood.from_wire(said, (DENSE, DENSE))
    except ProtocolError:
        return
    found = near.apply((DENSE, DENSE), values)
    assert found is None or all(one is not None and one.ndim == DENSE.ndim for one in found)


@given(st.binary(max_size=80))
def test_no_tail_of_a_call_breaks_a_worker(tail: bytes) -> None:
    call = Call("silu", "toy.silu", (DENSE,), (DENSE,))
    found = neighbour(call, Neighbourhood(((65, 128),), ((-1, 0, -1),) * 2), tail)
    assert found is None or 65 <= found.inputs[0].shape[1] <= 128  # type: ignore[union-attr]
