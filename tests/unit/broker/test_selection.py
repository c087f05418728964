"""Who may serve a call, in which order, and why not the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.simulator import CAPABILITIES, route_body

from layerzero.broker.selection import CallSpec, Signature, Verdict, rank, static_verdicts
from layerzero.capabilities import descriptor
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import InvalidArgument, LayerZeroError, ProtocolError
from layerzero.ipc.messages import Route, encode
from layerzero.ipc.ops import OPS
from layerzero.ipc.tensors import ITEMSIZE

FLOAT = ["float32", [4], [1]]
QKV = ["float32", [1, 2, 3, 8], [48, 24, 8, 1]]
ATTENTION = {"is_causal": False, "scale": 1.0, "causal_alignment": "top_left", "layout": "BHSD"}
DESCRIPTORS = sorted((Path(descriptor.__file__).parent / "descriptors").glob("*.json"))
OURS = {path.stem: descriptor.load(path) for path in DESCRIPTORS}


def verdict(backend: str, priority: int = 50, *reasons: Rejection) -> Verdict:
    return Verdict(f"{backend}.silu", backend, reasons, priority)


def ranked(
    *verdicts: Verdict, pinned: str = "", measured: dict[str, float] | None = None, **down: Rejection
) -> list[str]:
    spec = CallSpec.parse(route_body(backend=pinned))
    return [v.backend for v in rank(spec, verdicts, down, measured or {}) if v.is_accepted]


def test_priority_comes_first() -> None:
    """The descriptor's author knows the library; one lucky measurement does not."""
    measured = {"low.silu": 1.0, "high.silu": 900.0}
    assert ranked(verdict("low", 40), verdict("high", 60), measured=measured) == ["high", "low"]


def test_measured_time_decides_between_equals() -> None:
    """The faster of two kernels of one rank should run, and a known time beats an unknown one."""
    measured = {"slow.silu": 900.0, "fast.silu": 10.0}
    assert ranked(verdict("new"), verdict("slow"), verdict("fast"), measured=measured) == ["fast", "slow", "new"]


def test_names_decide_between_full_equals() -> None:
    """The same call must not wander between backends."""
    assert ranked(verdict("b"), verdict("a"), verdict("c")) == ["a", "b", "c"]


def test_rejected_ones_come_last_with_all_their_reasons() -> None:
    """A report that stops at the first reason sends its reader round in circles."""
    down = Rejection(Reason.BACKEND_DISABLED, "died; repair: lz env probe a")
    dtype = Rejection(Reason.DTYPE_UNSUPPORTED, "x is float16; allowed: float32")
    spec = CallSpec.parse(route_body(backend="b"))
    first, second = rank(spec, (verdict("a", 90, dtype), verdict("b", 10)), {"a": down}, {})
    assert (first.backend, first.is_accepted) == ("b", True)
    assert [reason.code for reason in second.reasons] == [Reason.NOT_PINNED, dtype.code, down.code]
    assert second.to_wire() == {
        "kernel_id": "a.silu",
        "backend": "a",
        "accepted": False,
        "reasons": [
            {"code": "NOT_PINNED", "detail": "the call is pinned to 'b'"},
            {"code": "DTYPE_UNSUPPORTED", "detail": "x is float16; allowed: float32"},
            {"code": "BACKEND_DISABLED", "detail": "died; repair: lz env probe a"},
        ],
        "score": None,
        "measured_us": None,
    }


def test_backend_without_the_op_is_named_when_it_is_pinned() -> None:
    """An empty list of candidates would explain nothing."""
    spec = CallSpec.parse(route_body("gelu", backend="gamma"))
    (unsupported,) = (v for v in static_verdicts(spec, CAPABILITIES) if v.backend == "gamma")
    assert unsupported.reasons == (Rejection(Reason.OP_UNSUPPORTED, "gamma serves silu"),)
    unpinned = static_verdicts(CallSpec.parse(route_body("gelu")), CAPABILITIES)
    assert [v.backend for v in unpinned] == ["alpha", "beta"]


def test_measured_time_is_a_running_average() -> None:
    """One slow call must not turn the order over."""
    signature = Signature(b"", CallSpec.parse(route_body()), ())
    for kernel_ns in (8000, 16000):
        signature.note_time("a.silu", kernel_ns)
    assert signature.measured_us == {"a.silu": 9.0}


# --- what a route must look like -----------------------------------------------------------------------------


def route(op: str = "silu", **fields: Any) -> bytes:
    given = {"op": op, "inputs": [FLOAT], "outputs": [FLOAT], "attrs": {}, **fields}
    return encode(Route(**given))


@pytest.mark.parametrize(
    ("body", "error", "text"),
    [
        (b"", ProtocolError, "not msgpack"),
        (b"\x90", ProtocolError, "must be a map, got list"),
        (route("sillu"), InvalidArgument, "did you mean 'silu'"),
        (route(inputs=[FLOAT, FLOAT]), ProtocolError, "silu has 1 inputs and 1 outputs"),
        (route(outputs=[]), ProtocolError, "silu has 1 inputs and 1 outputs"),
        (route(inputs=[None]), ProtocolError, "silu lacks x"),
        (route(attrs={"dim": 1}), ProtocolError, r"exactly the attributes \(none\)"),
        (route("softmax"), ProtocolError, "exactly the attributes dim"),
        (route("softmax", attrs={"dim": [0]}), ProtocolError, "all scalars"),
        (route(inputs=[["float8", [1], [1]]]), InvalidArgument, "unknown dtype 'float8'"),
        (route(outputs=[["float32", [1], [-1]]]), InvalidArgument, "non-negative"),
        (
            route("attention", inputs=[FLOAT, QKV, QKV, None], outputs=[QKV], attrs=ATTENTION),
            ProtocolError,
            "4 dimensions",
        ),
    ],
)
def test_broken_route_is_refused(body: bytes, error: type[LayerZeroError], text: str) -> None:
    """What is wrong is said by name, and nothing broken reaches the rules."""
    with pytest.raises(error, match=text):
        CallSpec.parse(body)


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
extents = st.lists(st.integers(0, 2**47), max_size=6)
specs = st.none() | st.lists(st.sampled_from(sorted(ITEMSIZE)) | extents, min_size=3, max_size=3)
good_specs = st.integers(0, 5).flatmap(
    lambda n: st.tuples(
        st.sampled_from(sorted(ITEMSIZE)),
        st.lists(st.integers(0, 2**12), min_size=n, max_size=n),
        st.lists(st.integers(0, 2**12), min_size=n, max_size=n),
    ).map(list)
)


@st.composite
def routes(draw: st.DrawFn) -> bytes:
    op = OPS[draw(st.sampled_from(sorted(OPS)))]
    inputs = [draw(good_specs | specs) for _ in op.inputs]
    outputs = [draw(good_specs) for _ in op.outputs]
    attrs = {name: draw(scalars) for name in op.attrs}
    return encode(Route(op=op.name, inputs=inputs, outputs=outputs, attrs=attrs, backend=draw(st.text(max_size=4))))


@given(routes())
def test_no_route_breaks_the_broker(body: bytes) -> None:
    """A client's nonsense ends in an error or a verdict with reasons, never in an exception of the broker."""
    try:
        spec = CallSpec.parse(body)
    except LayerZeroError:
        return
    for one in static_verdicts(spec, OURS):
        assert all(reason.detail for reason in one.reasons)
