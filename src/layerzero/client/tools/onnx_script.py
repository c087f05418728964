"""The model that the onnxruntime backend gives its library for a call, as lines of a script that makes it with onnx."""

from __future__ import annotations

import base64
import math
import zlib
from typing import Any

from layerzero.client.planning.plans import Plan
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.workers.provider import Call
from layerzero.workers.providers import onnxruntime as provider

MAX_NUMBERS = 256  # of a constant that is written as such; of others the packed bytes are
MAX_PACKED_BYTES = 1 << 20


def lines_of(plan: Plan, kernel_id: str) -> tuple[str, list[str]] | None:
    """What the model is of, and statements that leave the op's outputs in variables of their names. The inputs are
    in variables of theirs. None for a kernel that makes no model. Raises InvalidArgument for constants that are too
    large."""
    import numpy

    call = Call(plan.op, kernel_id, plan.inputs, plan.outputs, plan.attrs)
    model = provider.model_of(_Onnx, numpy, call)
    if model is None:
        return None
    lines = ["nodes = [", *(f"    {node!r}," for node in model.nodes), "]"]
    for kind, tensors in (("inputs", model.inputs), ("outputs", model.outputs)):
        infos = [f"    info({name!r}, {dtype!r}, {len(shape)})," for name, dtype, shape in tensors]
        lines += [f"{kind} = [", *infos, "]"]
    lines += [
        "graph = helper.make_graph(nodes, 'kernel', inputs, outputs)",
        f"imports = [helper.make_opsetid('', {model.opset}), helper.make_opsetid('com.microsoft', 1)]",
        f"model = helper.make_model(graph, opset_imports=imports, ir_version={provider.IR_VERSION})",
        "options = onnxruntime.SessionOptions()",
        "options.add_session_config_entry('session.intra_op.allow_spinning', '0')",
        "session = onnxruntime.InferenceSession(",
        "    model.SerializeToString(), options, providers=['CPUExecutionProvider']",
        ")",
        "binding = session.io_binding()",
    ]
    for (name, _, shape), source in zip(model.inputs, model.sources, strict=True):
        if not isinstance(source, str):
            lines.append(f"{name} = {_code(source)}")
        lines.append(f"bind(binding.bind_input, {name!r}, {source if isinstance(source, str) else name}, {shape})")
    for result, (name, dtype, shape) in zip(OPS[plan.op].outputs, model.outputs, strict=True):
        lines += [f"{result} = np.empty({shape}, {dtype!r})", f"bind(binding.bind_output, {name!r}, {result}, {shape})"]
    kinds = ", ".join(dict.fromkeys(node.kind for node in model.nodes))
    return f"a model of {kinds}", [*lines, "session.run_with_iobinding(binding)"]


class _Written(str):
    """Code that stands for what it makes; of a node also its kind."""

    __slots__ = ("kind",)
    kind: str

    def __repr__(self) -> str:
        return str(self)


class _Helper:
    """Of onnx.helper what the backend calls."""

    @staticmethod
    def make_node(kind: str, inputs: Any, outputs: Any, **attrs: Any) -> _Written:
        more = "".join(f", {name}={_code(value)}" for name, value in attrs.items())
        node = _Written(f"helper.make_node({kind!r}, {_code(list(inputs))}, {_code(list(outputs))}{more})")
        node.kind = kind
        return node

    @staticmethod
    def np_dtype_to_tensor_dtype(dtype: Any) -> _Written:
        return _Written(f"helper.np_dtype_to_tensor_dtype(np.dtype({dtype.name!r}))")

    @staticmethod
    def make_tensor(name: str, kind: _Written, shape: Any, values: Any) -> _Written:
        return _Written(f"helper.make_tensor({name!r}, {kind}, {_code(tuple(shape))}, {_code(list(values))})")


class _NumpyHelper:
    @staticmethod
    def from_array(array: Any, name: str = "") -> _Written:
        return _Written(f"numpy_helper.from_array({_code(array)}, {name!r})")


class _TensorProto:
    FLOAT = _Written("onnx.TensorProto.FLOAT")
    BOOL = _Written("onnx.TensorProto.BOOL")


class _Onnx:
    """In place of the module."""

    helper, numpy_helper, TensorProto = _Helper, _NumpyHelper, _TensorProto


def _code(value: Any) -> str:
    """A value as Python writes it."""
    import numpy

    if isinstance(value, numpy.ndarray):
        if value.size <= MAX_NUMBERS:
            return f"np.array({_code(value.ravel().tolist())}, {value.dtype.name!r}).reshape({value.shape})"
        packed = base64.b64encode(zlib.compress(numpy.ascontiguousarray(value).tobytes()))
        if len(packed) > MAX_PACKED_BYTES:
            raise InvalidArgument(
                f"no script can be written: the model of this call has a constant of {value.size:,} numbers; "
                "send the capsule: lz capsule share NAME FILE.tar.gz"
            )
        given = f"zlib.decompress(base64.b64decode({packed.decode()!r}))"
        return f"np.frombuffer({given}, {value.dtype.name!r}).reshape({value.shape})"
    if isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, list | tuple):
        inner = ", ".join(map(_code, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    return repr(value)
