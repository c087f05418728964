"""Calls of a provider in this process, without a broker: what a Runner gives the kernel and gets from it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import msgpack
import pytest

from layerzero.client.session.in_process import MAX_BOUND, Lane, Runner, is_abi_failure
from layerzero.ipc.errors import OutputTooSmall
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.provider import Block, Bound, Call


def spec(dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec.contiguous(dtype, shape)


def place(memory: bytearray) -> tuple[int, int]:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)


DETOKENIZE = Call(
    "detokenize",
    "toy.detokenize",
    (spec("uint8", 0), spec("int32", 0), spec("int64", 0)),
    (spec("uint8", 0), spec("int64", 0)),
)


def digits(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
    """One digit for each token id: a kernel with sized outputs."""
    _, ids, _ = inputs
    assert ids is not None

    def run() -> dict[str, list[int]]:
        count = ids.spec.shape[0]
        if outputs[0].spec.shape[0] < count:
            raise OutputTooSmall("too small", needed=[count, 2])
        outputs[0].memory[:count] = bytes(48 + value for value in ids.memory.cast("i"))
        return {"used": [count, 2]}

    return run


def test_sized_outputs_are_as_long_as_the_memory_and_sizes_come_back() -> None:
    """The route has no lengths; a call that needs more says so to the op, which knows what to do."""
    runner = Runner(DETOKENIZE, digits, threading.Lock())
    file, splits, text, ends = bytearray(3), bytearray(16), bytearray(5), bytearray(16)
    ids = bytearray(b"".join(value.to_bytes(4, "little") for value in (1, 2, 3)))
    elapsed_ns, body = runner.run([place(file), place(ids), place(splits)], [place(text), place(ends)])
    assert (bytes(text), msgpack.unpackb(body)) == (b"123\0\0", {"used": [3, 2]})
    assert elapsed_ns > 0
    with pytest.raises(OutputTooSmall) as caught:
        runner.run([place(file), place(ids), place(splits)], [place(bytearray(2)), place(ends)])
    assert caught.value.facts == {"needed": [3, 2]}


def test_blocks_stay_bound_up_to_a_limit_and_inputs_are_read_only() -> None:
    """Binding costs more than most calls; memory that was let go must not pile up."""
    bound: list[bool] = []

    def bind(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        source, target = inputs[0], outputs[0]
        assert source is not None
        bound.append(source.memory.readonly)

        def run() -> None:
            target.memory[:] = source.memory

        return run

    runner = Runner(Call("silu", "toy.silu", (spec("float32", 2),), (spec("float32", 2),)), bind, threading.Lock())
    x, out = bytearray(b"12345678"), [bytearray(8) for _ in range(MAX_BOUND + 1)]
    for _ in range(2):
        assert runner.run([place(x)], [place(out[0])])[1] == b""
    assert (bound, out[0]) == ([True], x)
    for one in out[1:]:
        runner.run([place(x)], [place(one)])
    x[:] = b"abcdefgh"
    runner.run([place(x)], [place(out[0])])  # the oldest had to make room
    assert (len(bound), out[0]) == (MAX_BOUND + 2, x)


@pytest.mark.parametrize(
    ("exc", "is_abi"),
    [
        (ImportError("no module"), True),
        (OSError("libfoo.so: cannot open shared object file"), True),
        (RuntimeError("undefined symbol: _ZN2at"), True),
        (ValueError("numpy.dtype size changed"), True),
        (RuntimeError("out of range"), False),
        (ValueError("bad shape"), False),
    ],
)
def test_abi_failures_are_told_from_those_of_a_call(exc: Exception, is_abi: bool) -> None:
    """The first kind would strike every call, the second one only this one."""
    assert is_abi_failure(exc) is is_abi


def test_refused_backend_is_named_with_the_reason() -> None:
    lane = Lane()
    assert lane.refusals() == {}
    lane.refuse("toy", "it does not fit")
    assert lane.refusals() == {"toy": "it does not fit"}
