"""What a client may say about a call, and what is refused."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.signatures import planned

from layerzero.broker.selection.ranking import Engine
from layerzero.broker.selection.signature import CallSpec
from layerzero.capabilities import descriptor
from layerzero.capabilities.device import DeviceSpec
from layerzero.client.planning.plans import Plan
from layerzero.ipc.errors import InvalidArgument, LayerZeroError, ProtocolError
from layerzero.ipc.transport.messages import Route, encode
from layerzero.ipc.vocabulary.ops import CALLED_OPS, OPS
from layerzero.ipc.vocabulary.tensors import ITEMSIZE, TensorSpec

FLOAT = ["float32", [4], [1]]
QKV = ["float32", [1, 2, 3, 8], [48, 24, 8, 1]]
PAGES = ["float32", [4, 16, 2, 8], [256, 16, 8, 1]]
PAGED = [["float32", [1, 2, 8], [16, 8, 1]], PAGES, PAGES, ["int32", [1, 4], [4, 1]], ["int32", [1], [1]], None, None]
ATTENTION = {"is_causal": False, "scale": 1.0, "causal_alignment": "top_left", "layout": "BHSD"}
DESCRIPTORS = sorted((Path(descriptor.__file__).parent / "descriptors").glob("*.json"))
OURS = {path.stem: descriptor.load(path) for path in DESCRIPTORS}


# --- what a route must look like -----------------------------------------------------------------------------


def route(op: str = "silu", **fields: Any) -> bytes:
    given = {"op": op, "inputs": [FLOAT], "outputs": [FLOAT], "attrs": {}, **fields}
    return encode(Route(**given))


@pytest.mark.parametrize(
    ("body", "error", "text"),
    [
        (b"", ProtocolError, "not msgpack"),
        (b"\x90", ProtocolError, "must be a map, got list"),
        (route("function_on_gpu"), InvalidArgument, "no op is called 'function_on_gpu'"),
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
            route("attention", inputs=[FLOAT, QKV, QKV, None, None, None], outputs=[QKV], attrs=ATTENTION),
            InvalidArgument,
            "4 dimensions",
        ),
        (
            route("paged_attention", inputs=PAGED[:5], outputs=PAGED[:1], attrs={"scale": 1.0}),
            ProtocolError,
            "paged_attention has 7 inputs and 1 outputs",
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


def specs_of(ndim: int) -> st.SearchStrategy[list[Any]]:
    steps = st.lists(st.integers(0, 2**12), min_size=ndim, max_size=ndim)
    return st.tuples(st.sampled_from(sorted(ITEMSIZE)), steps, steps).map(list)


def route_of(call: Plan) -> bytes:
    inputs = [None if spec is None else spec.to_wire() for spec in call.inputs]
    return encode(Route(op=call.op, inputs=inputs, outputs=[s.to_wire() for s in call.outputs], attrs=call.attrs))


good_specs = st.integers(0, 5).flatmap(specs_of)


@st.composite
def routes(draw: st.DrawFn) -> bytes:
    op = OPS[draw(st.sampled_from(sorted(OPS)))]
    if draw(st.booleans()):
        return route_of(planned(op.name, Random(draw(st.integers(0, 2**32)))))
    inputs = [draw(good_specs | specs) for _ in op.inputs]
    outputs = [draw(good_specs) for _ in op.outputs]
    attrs = {name: draw(scalars) for name in op.attrs}
    return encode(Route(op=op.name, inputs=inputs, outputs=outputs, attrs=attrs, backend=draw(st.text(max_size=4))))


SCALAR = TensorSpec.contiguous("bfloat16", ()).to_wire()
EMPTY = TensorSpec.contiguous("bfloat16", (0,)).to_wire()


@given(routes())
@example(encode(Route(op="rms_norm", inputs=[EMPTY, None], outputs=[SCALAR], attrs={"ndim": None, "eps": None})))
@example(encode(Route(op="rms_norm", inputs=[None, None], outputs=[SCALAR], attrs={"ndim": 1, "eps": 1e-6})))
def test_no_route_breaks_the_broker(body: bytes) -> None:
    """A client's nonsense ends in an error or a verdict with reasons, never in an exception of the broker."""
    try:
        spec = CallSpec.parse(body)
    except LayerZeroError:
        return
    for device in (DeviceSpec(), DeviceSpec(device_type="cuda", sm_version=90)):
        engine = Engine(OURS, device)
        for one in engine.rank(spec, engine.context(spec), {}, 0.0):
            assert all(reason.detail for reason in one.reasons)


@pytest.mark.parametrize("op", sorted(CALLED_OPS))
def test_what_the_client_plans_is_taken(op: str) -> None:
    for seed in range(50):
        call = planned(op, Random(seed))
        assert CallSpec.parse(route_of(call)).attrs == call.attrs


def test_what_is_written_in_place_has_one_spec() -> None:
    """A worker gets the tensor twice, to read and to write: two shapes of it would be two tensors."""
    rows, cache, other = (
        TensorSpec.contiguous("float32", shape).to_wire() for shape in ((1, 1, 2), (3, 4, 1, 2), (3,))
    )
    slots = TensorSpec.contiguous("int64", (1,)).to_wire()
    route = Route(
        op="append_kv", inputs=[rows, rows, cache, cache, slots, None, None], outputs=[cache, other], attrs={}
    )
    with pytest.raises(InvalidArgument, match="output v_cache is float32"):
        CallSpec.parse(encode(route))
