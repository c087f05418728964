"""What a client may say about a call, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from layerzero.broker.selection.ranking import Engine
from layerzero.broker.selection.signature import CallSpec
from layerzero.capabilities import descriptor
from layerzero.capabilities.device import DeviceSpec
from layerzero.ipc.errors import InvalidArgument, LayerZeroError, ProtocolError
from layerzero.ipc.transport.messages import Route, encode
from layerzero.ipc.vocabulary.ops import OPS, Op
from layerzero.ipc.vocabulary.tensors import ITEMSIZE, TensorSpec

FLOAT = ["float32", [4], [1]]
QKV = ["float32", [1, 2, 3, 8], [48, 24, 8, 1]]
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


def specs_of(ndim: int) -> st.SearchStrategy[list[Any]]:
    steps = st.lists(st.integers(0, 2**12), min_size=ndim, max_size=ndim)
    return st.tuples(st.sampled_from(sorted(ITEMSIZE)), steps, steps).map(list)


good_specs = st.integers(0, 5).flatmap(specs_of)


@st.composite
def routes(draw: st.DrawFn) -> bytes:
    op = OPS[draw(st.sampled_from(sorted(OPS)))]
    is_whole = op.ndims and draw(st.booleans())
    inputs = [draw(specs_of(n)) for n in op.ndims] if is_whole else [draw(good_specs | specs) for _ in op.inputs]
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


@pytest.mark.parametrize("op", [op for op in OPS.values() if op.ndims], ids=lambda op: op.name)
def test_tensors_of_other_dimensions_are_refused(op: Op) -> None:
    """Rules read extents by their place, and a broker must not fall over a client's nonsense."""
    scalar = TensorSpec.contiguous("float32", ()).to_wire()
    inputs, outputs = [scalar] * len(op.inputs), [scalar] * len(op.outputs)
    route = Route(op=op.name, inputs=inputs, outputs=outputs, attrs=dict.fromkeys(op.attrs, 1))
    with pytest.raises(ProtocolError, match=rf"{op.name} takes {op.inputs[0]} with {op.ndims[0]} dimensions, got 0"):
        CallSpec.parse(encode(route))


@pytest.mark.parametrize("op", [op for op in OPS.values() if op.ndims and not op.in_place], ids=lambda op: op.name)
def test_results_of_other_dimensions_are_refused(op: Op) -> None:
    """Found by fuzzing: a proposed change of layout read four extents of eight."""
    inputs = [TensorSpec.contiguous("float32", (1,) * ndim).to_wire() for ndim in op.ndims]
    outputs = [TensorSpec.contiguous("float32", (1,) * 8).to_wire()]
    route = Route(op=op.name, inputs=inputs, outputs=outputs, attrs=dict.fromkeys(op.attrs, 1))
    with pytest.raises(ProtocolError, match=rf"{op.name} gives out with {op.ndims[0]} dimensions, got 8"):
        CallSpec.parse(encode(route))


def test_what_is_written_in_place_has_one_spec() -> None:
    """A worker gets the tensor twice, to read and to write: two shapes of it would be two tensors."""
    rows, cache, other = (
        TensorSpec.contiguous("float32", shape).to_wire() for shape in ((1, 1, 2), (3, 4, 1, 2), (3,))
    )
    slots = TensorSpec.contiguous("int64", (1,)).to_wire()
    route = Route(op="append_kv", inputs=[rows, rows, cache, cache, slots], outputs=[cache, other], attrs={})
    with pytest.raises(ProtocolError, match="append_kv writes v_cache in place, and its input and output differ"):
        CallSpec.parse(encode(route))
