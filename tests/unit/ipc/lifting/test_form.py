"""What a lifted call is as bytes: what is packed comes back, and nothing that leads outside of its memory is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.lifting.form import (
    ALIGNMENTS,
    ATTRIBUTE_BYTES,
    MAX_ATTRIBUTES,
    MAX_PARAMETER_BYTES,
    MAX_SCRATCH,
    MAX_SHARED_BYTES,
    MAX_STEPS,
    Address,
    Copy,
    Fill,
    Kernel,
    Lifted,
    Patch,
    Span,
    Step,
    alignment_class,
    digest,
)
from layerzero.ipc.transport.plain import pack_body, unpack_body
from layerzero.ipc.vocabulary.tensors import TensorSpec

X, WEIGHT = TensorSpec.contiguous("float16", (4, 64)), TensorSpec.contiguous("float16", (64,))
NBYTES = X.span_bytes
CODE, OTHER = digest(b"code"), digest(b"other")


def kernel(**changes: Any) -> Kernel:
    made = Kernel(
        code=CODE,
        name="_Z4normPv",
        grid=(4, 1, 1),
        block=(128, 1, 1),
        shared_bytes=1024,
        params=bytes(32),
        layout=(Span(0, 8), Span(8, 24)),
        patches=(Patch(0, Address("input", 0, 0)), Patch(16, Address("scratch", 1, 100))),
        padding=(Span(28, 4),),
        attributes=((4, bytes(ATTRIBUTE_BYTES)),),
        max_shared_bytes=65536,
        is_cluster_size_free=True,
    )
    return replace(made, **changes)


def lifted(*steps: Step, **changes: Any) -> Lifted:
    made = Lifted(
        op="rms_norm",
        kernel_id="test.rms_norm",
        inputs=(X, WEIGHT),
        outputs=(X,),
        attrs={"ndim": 1, "eps": 1e-5},
        alignments=(256, 16, 2),
        scratch=(512, 1000),
        steps=steps or (kernel(),),
        gpu="Test GPU",
        driver="13000",
        versions={"torch": "2"},
    )
    return replace(made, **changes)


def packed(change: Callable[[dict[str, Any]], None], *steps: Step) -> bytes:
    """A lifted call as another process might send it."""
    value = unpack_body(lifted(*steps).pack())
    change(value)
    return pack_body(value)


def test_what_is_packed_comes_back() -> None:
    made = lifted(
        Fill(Address("scratch", 0, 8), 0xFFFF_FFFF, 4, 126),
        kernel(),
        Copy(Address("scratch", 1, 0), Address("output", 0, 0), NBYTES),
        kernel(code=OTHER, params=b"", layout=(), patches=(), padding=(), attributes=()),
        kernel(),
    )
    assert Lifted.unpack(made.pack()) == made
    assert made.codes == (CODE, OTHER)


def test_an_input_that_is_left_out_stays_so() -> None:
    made = lifted(kernel(patches=()), inputs=(X, None), alignments=(256, 0, 2))
    assert Lifted.unpack(made.pack()) == made


def test_outputs_that_are_inputs_are_known() -> None:
    rows, cache = TensorSpec.contiguous("float16", (2, 1, 8)), TensorSpec.contiguous("float16", (4, 2, 1, 8))
    slots = TensorSpec.contiguous("int64", (2,))
    made = lifted(
        kernel(patches=()), op="append_kv", inputs=(rows, rows, cache, cache, slots, None, None),
        outputs=(cache, cache), attrs={}, alignments=(*(16,) * 5, 0, 0, 16, 16),
    )  # fmt: skip
    assert Lifted.unpack(made.pack()).aliases() == {0: 2, 1: 3}
    assert lifted().aliases() == {}


@given(st.integers(1, 1 << 47))
def test_the_class_of_an_address_is_the_best_that_it_has(address: int) -> None:
    found = alignment_class(address)
    assert address % found == 0
    assert all(address % better for better in ALIGNMENTS if better > found)


@pytest.mark.parametrize(
    ("kind", "number", "room"), [("input", 0, NBYTES), ("output", 0, NBYTES), ("scratch", 1, 1000)]
)
def test_steps_stay_in_the_memory_that_is_provided(kind: Any, number: int, room: int) -> None:
    """The end is an address, too, but nothing may be written there."""
    inside: list[Step] = [
        kernel(patches=(Patch(24, Address(kind, number, room)),)),
        Fill(Address(kind, number, room - 8), 0, 4, 2),
        Copy(Address(kind, number, room - 3), Address("scratch", 0, 0), 3),
        Copy(Address("scratch", 0, 0), Address(kind, number, room - 3), 3),
    ]
    outside: list[Step] = [
        kernel(patches=(Patch(24, Address(kind, number, room + 1)),)),
        kernel(patches=(Patch(24, Address(kind, 2, 0)),)),
        Fill(Address(kind, number, room - 8), 0, 4, 3),
        Fill(Address(kind, number, room), 0, 1, 1),
        Copy(Address(kind, number, room - 3), Address("scratch", 0, 0), 4),
        Copy(Address("scratch", 0, 0), Address(kind, number, room - 3), 4),
        Copy(Address(kind, number, -1), Address("scratch", 0, 0), 1),
    ]
    for step in inside:
        assert Lifted.unpack(lifted(step).pack()).steps == (step,)
    for step in outside:
        with pytest.raises(ProtocolError):
            Lifted.unpack(lifted(step).pack())


@pytest.mark.parametrize(
    "changes",
    [
        {"code": CODE[:-1]},
        {"code": CODE.upper()},
        {"code": ""},
        {"name": "x" * 70000},
        {"grid": (0, 1, 1)},
        {"grid": (1 << 31, 1, 1)},
        {"grid": (1, 1)},
        {"block": (1025, 1, 1)},
        {"block": (1, 0, 1)},
        {"shared_bytes": -1},
        {"shared_bytes": MAX_SHARED_BYTES + 1},
        {"params": bytes(MAX_PARAMETER_BYTES + 1)},
        {"params": "x" * 32},
        {"layout": (Span(0, 33),)},
        {"layout": (Span(32, 1),)},
        {"layout": (Span(0, 0),)},
        {"layout": (Span(-1, 4),)},
        {"patches": (Patch(25, Address("input", 0, 0)),)},
        {"patches": (Patch(-1, Address("input", 0, 0)),)},
        {"padding": (Span(30, 3),)},
        {"attributes": ((4, bytes(63)),)},
        {"attributes": ((-1, bytes(64)),)},
        {"attributes": ((4, bytes(64)),) * (MAX_ATTRIBUTES + 1)},
        {"max_shared_bytes": MAX_SHARED_BYTES + 1},
        {"max_shared_bytes": True},
    ],
    ids=lambda changes: f"{next(iter(changes))}",
)
def test_kernel_that_is_none_is_refused(changes: dict[str, Any]) -> None:
    """Before it is near a driver, which would believe it."""
    with pytest.raises(ProtocolError):
        Lifted.unpack(lifted(kernel(**changes)).pack())


@pytest.mark.parametrize(
    "step",
    [
        Fill(Address("scratch", 0, 0), 256, 1, 1),
        Fill(Address("scratch", 0, 0), -1, 1, 1),
        Fill(Address("scratch", 0, 0), 0, 8, 1),
        Fill(Address("scratch", 0, 0), 0, 1, 0),
        Copy(Address("scratch", 0, 0), Address("output", 0, 0), 0),
    ],
)
def test_fill_or_copy_that_is_none_is_refused(step: Step) -> None:
    with pytest.raises(ProtocolError):
        Lifted.unpack(lifted(step).pack())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", 2),
        ("op", "unheard_of"),
        ("op", 3),
        ("op", "attention"),
        ("kernel_id", None),
        ("kernel_id", "x" * 2000),
        ("inputs", None),
        ("inputs", [X.to_wire()]),
        ("inputs", [X.to_wire(), ["float99", [1], [1]]]),
        ("outputs", []),
        ("outputs", [None]),
        ("attrs", []),
        ("alignments", [256, 16]),
        ("alignments", [256, 16, 3]),
        ("alignments", [256, 16, 512]),
        ("alignments", [256, 16, None]),
        ("scratch", [0]),
        ("scratch", [1.5]),
        ("scratch", [1] * (MAX_SCRATCH + 1)),
        ("steps", {}),
        ("steps", [None]),
        ("steps", [{}]),
        ("steps", [{"fill": [[0, 0, 0]]}]),
        ("steps", [{"copy": [[0, 0, 0], [9, 0, 0], 1]}]),
        ("steps", [{"copy": [[0, 0, 0], 7, 1]}]),
        ("gpu", 1),
        ("driver", None),
        ("versions", {"torch": 2}),
        ("versions", []),
    ],
    ids=str,
)
def test_call_that_is_none_is_refused(key: str, value: object) -> None:
    """By one error, whatever is wrong with it."""
    with pytest.raises(ProtocolError):
        Lifted.unpack(packed(lambda call: call.__setitem__(key, value)))
    with pytest.raises(ProtocolError):
        Lifted.unpack(packed(lambda call: call.pop(key)))


def test_more_steps_than_a_call_has_are_refused() -> None:
    step = Fill(Address("scratch", 0, 0), 0, 1, 1)
    assert len(Lifted.unpack(lifted(*[step] * MAX_STEPS).pack()).steps) == MAX_STEPS
    with pytest.raises(ProtocolError):
        Lifted.unpack(lifted(*[step] * (MAX_STEPS + 1)).pack())


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Lifted.unpack(data)


@given(st.data())
def test_a_form_that_was_damaged_is_refused_or_still_in_bounds(data: st.DataObject) -> None:
    """Bytes of a file may be anything."""
    whole = bytearray(lifted(kernel(), Copy(Address("input", 0, 0), Address("output", 0, 0), NBYTES)).pack())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = Lifted.unpack(bytes(whole))
    except ProtocolError:
        return
    extents: dict[str, list[int]] = {
        "input": [0 if spec is None else spec.span_bytes for spec in found.inputs],
        "output": [spec.span_bytes for spec in found.outputs],
        "scratch": list(found.scratch),
    }
    for step in found.steps:
        if isinstance(step, Kernel):
            for at, (kind, number, offset) in step.patches:
                assert at + 8 <= len(step.params)
                assert 0 <= offset <= extents[kind][number]
        elif isinstance(step, Copy):
            for kind, number, offset in (step.source, step.target):
                assert 0 <= offset <= extents[kind][number] - step.nbytes


WIDE = TensorSpec.contiguous("float16", (8, 64))


@pytest.mark.parametrize(
    "step",
    [
        kernel(grid=(8, 1, 1), params=b"\1" * 32, shared_bytes=2048),
        kernel(patches=(Patch(0, Address("input", 0, 64)), Patch(16, Address("scratch", 1, 200)))),
    ],
)
def test_neighbours_differ_in_numbers_grids_and_offsets(step: Kernel) -> None:
    """What a proof has shown of one holds for the other."""
    fill, copy = Fill(Address("scratch", 0, 0), 0, 4, 8), Copy(Address("input", 0, 0), Address("output", 0, 0), 64)
    more = Fill(Address("scratch", 0, 64), 0, 4, 16), Copy(Address("input", 0, 8), Address("output", 0, 0), 128)
    neighbour = lifted(step, *more, inputs=(WIDE, WEIGHT), outputs=(WIDE,), scratch=(1024, 2000))
    assert neighbour.is_like(lifted(kernel(), fill, copy))


@pytest.mark.parametrize(
    "step",
    [
        kernel(code=OTHER),
        kernel(name="_Z5othern"),
        kernel(block=(256, 1, 1)),
        kernel(layout=(Span(0, 16), Span(16, 16))),
        kernel(attributes=()),
        kernel(max_shared_bytes=0),
        kernel(is_cluster_size_free=False),
        kernel(patches=(Patch(0, Address("input", 0, 0)),)),
        kernel(patches=(Patch(0, Address("input", 1, 0)), Patch(16, Address("scratch", 1, 100)))),
        kernel(patches=(Patch(0, Address("output", 0, 0)), Patch(16, Address("scratch", 1, 100)))),
        kernel(patches=(Patch(8, Address("input", 0, 0)), Patch(16, Address("scratch", 1, 100)))),
        Fill(Address("scratch", 0, 0), 0, 4, 8),
    ],
)
def test_another_kernel_or_another_use_of_it_is_no_neighbour(step: Step) -> None:
    assert not lifted(step).is_like(lifted())
    assert not lifted(kernel(), step).is_like(lifted())


@pytest.mark.parametrize(
    "changes",
    [
        {"kernel_id": "test.other"},
        {"alignments": (256, 16, 16)},
        {"scratch": (512, 1000, 8)},
        {"gpu": "Another GPU"},
        {"driver": "13010"},
        {"versions": {"test": "2"}},
        {"attrs": {"ndim": 1, "eps": 1e-6}},
    ],
)
def test_neighbours_come_from_one_place(changes: dict[str, Any]) -> None:
    assert not lifted(**changes).is_like(lifted())
