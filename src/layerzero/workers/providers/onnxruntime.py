"""ONNX Runtime's CPU kernels. Inputs and outputs are bound by address, so nothing is copied."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.provider import Block, Bound, Call, Loaded
from layerzero.workers.providers import (
    _onnx_activations,
    _onnx_attention,
    _onnx_elementwise,
    _onnx_experts,
    _onnx_graph,
    _onnx_norms,
    _onnx_packed,
    _onnx_quantized,
    _onnx_rotary,
    _onnx_vision,
)

# A weight that is a constant has a session of its own, with as many threads at most: more do not read it faster.
MOST_THREADS = 8
# A session holds a thread pool and one node. Its extents are symbolic, so one serves every shape of a rank;
# this many are more than a model needs.
MAX_SESSIONS = 32
OPSET, IR_VERSION = 17, 8  # the newest that the oldest supported runtime reads; LayerNormalization needs 17

_Shapes = tuple[tuple[int, ...], ...]  # of the inputs that are given, then of the output
_Nodes = list[Any]
_Tensor = tuple[str, str, tuple[int, ...]]  # name, dtype and shape

GRAPHS: dict[str, Callable[[Any, Any, Call], _onnx_graph.Graph]] = {
    "attention_forward": _onnx_attention.forward,
    "attention_backward": _onnx_attention.backward,
    "merge_attention": _onnx_attention.merge,
    "add_rms_norm": _onnx_norms.add_rms_norm,
    "group_norm": _onnx_norms.group_norm,
    "instance_norm": _onnx_norms.group_norm,
    "batch_norm": _onnx_norms.batch_norm,
    **dict.fromkeys(_onnx_elementwise.SERVED, _onnx_elementwise.graph),
    **_onnx_vision.GRAPHS,
    "int_matmul": _onnx_quantized.int_matmul,
    "scaled_linear": _onnx_quantized.scaled_linear,
    "scaled_linear.int4": _onnx_quantized.int4_linear,
    "quantize": _onnx_quantized.quantize,
    "dequantize": _onnx_quantized.dequantize,
    **dict.fromkeys(("rope", "rope_qk"), _onnx_rotary.graph),
}


class Model(NamedTuple):
    """What is given to the runtime for a call. `sources`: for each input the op's name of it, or what it is made of."""

    nodes: list[Any]
    inputs: list[_Tensor]
    outputs: list[_Tensor]
    sources: list[Any]
    opset: int


def model_of(onnx: Any, numpy: Any, call: Call) -> Model | None:
    """As the kernel binds it, None for a kernel that is not here. `onnx` makes the nodes."""
    op = OPS[call.op]
    given = {name: spec for name, spec in zip(op.inputs, call.inputs, strict=True) if spec is not None}
    results = [spec.dtype for spec in call.outputs]
    build = GRAPHS.get(call.kernel_id.removeprefix("onnxruntime."))
    if build is None:
        builder = _Runtime(numpy, onnx, None).builders().get(call.op)
        if builder is None:
            return None
        nodes, shapes = builder(call)
        dtypes = [spec.dtype for spec in given.values()]
        inputs = list(zip("xwb", dtypes, shapes[:-1], strict=False))
        return Model(nodes, inputs, [("y", results[0], shapes[-1])], list(given), OPSET)
    graph = build(onnx, numpy, call)
    inputs, sources = [], []
    for name, shape in graph.inputs.items():
        if name in _onnx_attention.CONSTANT_INPUTS:
            dtype = _onnx_attention.CONSTANT_INPUTS[name] or results[0]
            inputs.append((name, dtype, shape))
            sources.append(_onnx_attention.constant_input(numpy, name, shape, dtype, call))
        elif name in given:
            inputs.append((name, given[name].dtype, shape))
            sources.append(name)
    outputs = [(name, dtype, shape) for (name, shape), dtype in zip(graph.outputs.items(), results, strict=True)]
    return Model(graph.nodes, inputs, outputs, sources, _onnx_graph.OPSET)


def load() -> Loaded:
    import numpy
    import onnx
    import onnxruntime

    library = _Runtime(numpy, onnx, onnxruntime)
    builders = library.builders()

    def bind(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        return library.bind(call, builders[call.op](call), [b for b in inputs if b is not None], outputs[0])

    def bind_graph(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        build = GRAPHS[call.kernel_id.removeprefix("onnxruntime.")]
        return library.bind_graph(call, build(onnx, numpy, call), inputs, outputs)

    versions = {"onnxruntime": onnxruntime.__version__, "onnx": onnx.__version__, "numpy": numpy.__version__}
    packed = _onnx_packed.PackedWeights(numpy, onnx, library.session_of_constants, bind_graph)
    binds = {**dict.fromkeys(builders, bind), "linear.activation": bind, **dict.fromkeys(GRAPHS, bind_graph)}
    binds["scaled_linear.int4"] = packed.bind
    binds |= _onnx_experts.binds(numpy, onnx, library.session)
    return Loaded(versions=versions, kernels={f"onnxruntime.{op}": one for op, one in binds.items()})


class _Runtime:
    """One method per op: the nodes that compute `y` from `x`, `w` and `b`, and the shapes that these are bound with."""

    def __init__(self, numpy: Any, onnx: Any, onnxruntime: Any) -> None:
        self.numpy = numpy
        self.onnx = onnx
        self.runtime = onnxruntime
        self.sessions: OrderedDict[bytes, Any] = OrderedDict()

    def builders(self) -> dict[str, Callable[[Call], tuple[_Nodes, _Shapes]]]:
        """By op."""
        return {
            "layer_norm": self.layer_norm,
            "linear": self.linear,
            "matmul": self.matmul,
            "addmm": self.addmm,
            "gated_mlp": self.gated_mlp,
            "softmax": self.softmax,
            "log_softmax": self.softmax,
            **dict.fromkeys(_onnx_activations.OPS, self.activation),
        }

    def bind(self, call: Call, graph: tuple[_Nodes, _Shapes], blocks: list[Block], out: Block) -> Bound:
        nodes, shapes = graph
        dtypes = [block.spec.dtype for block in (*blocks, out)]
        session = self.session(nodes, dtypes, shapes)
        binding = session.io_binding()
        arrays = [self.numpy.frombuffer(block.host, self.numpy.uint8) for block in (*blocks, out)]
        kinds = [self.numpy.dtype(dtype) for dtype in dtypes]
        for name, kind, array, shape in zip("xwb", kinds[:-1], arrays[:-1], shapes[:-1], strict=False):
            binding.bind_input(name, "cpu", 0, kind, shape, array.ctypes.data)
        binding.bind_output("y", "cpu", 0, kinds[-1], shapes[-1], arrays[-1].ctypes.data)

        def bound(_memory: object = arrays) -> None:  # the binding holds bare addresses; _memory keeps the maps alive
            session.run_with_iobinding(binding)

        return bound

    def bind_graph(
        self, call: Call, graph: _onnx_graph.Graph, inputs: Sequence[Block | None], outputs: Sequence[Block]
    ) -> Bound:
        """As `bind`, of a graph whose tensors have names."""
        numpy, given = self.numpy, dict(zip(OPS[call.op].inputs, inputs, strict=True))
        places = []  # name, dtype, shape and memory, of inputs and then of outputs
        for name, shape in graph.inputs.items():
            if name in _onnx_attention.CONSTANT_INPUTS:
                dtype = _onnx_attention.CONSTANT_INPUTS[name] or outputs[0].spec.dtype
                made = _onnx_attention.constant_input(numpy, name, shape, dtype, call)
                places.append((name, dtype, shape, made))
            elif (block := given[name]) is not None:
                places.append((name, block.spec.dtype, shape, numpy.frombuffer(block.host, numpy.uint8)))
        for (name, shape), block in zip(graph.outputs.items(), outputs, strict=True):
            places.append((name, block.spec.dtype, shape, numpy.frombuffer(block.host, numpy.uint8)))
        infos = [self._info(name, dtype, shape) for name, dtype, shape, _ in places]
        count = len(infos) - len(outputs)
        session = self._session(graph.nodes, infos[:count], infos[count:], _onnx_graph.OPSET)
        binding = session.io_binding()
        for number, (name, dtype, shape, array) in enumerate(places):
            put = binding.bind_input if number < count else binding.bind_output
            put(name, "cpu", 0, numpy.dtype(dtype), shape, array.ctypes.data)

        def bound(_memory: object = places) -> None:
            session.run_with_iobinding(binding)

        return bound

    def _info(self, name: str, dtype: str, shape: tuple[int, ...]) -> Any:
        """A tensor of a graph, of this rank."""
        helper = self.onnx.helper
        element = helper.np_dtype_to_tensor_dtype(self.numpy.dtype(dtype))
        return helper.make_tensor_value_info(name, element, [None] * len(shape))

    def session(self, nodes: _Nodes, dtypes: Sequence[str], shapes: _Shapes) -> Any:
        """A session for these nodes on tensors of these ranks, from the cache if it is there."""
        names = [*"xwb"[: len(shapes) - 1], "y"]
        infos = [self._info(*its) for its in zip(names, dtypes, shapes, strict=True)]
        return self._session(nodes, infos[:-1], infos[-1:])

    def _session(self, nodes: _Nodes, inputs: list[Any], outputs: list[Any], opset: int = OPSET) -> Any:
        text = self._text(nodes, inputs, outputs, opset)
        if text in self.sessions:
            self.sessions.move_to_end(text)
            return self.sessions[text]
        session = self.runtime.InferenceSession(text, self._options(), providers=["CPUExecutionProvider"])
        self.sessions[text] = session
        if len(self.sessions) > MAX_SESSIONS:
            self.sessions.popitem(last=False)
        return session

    def _text(self, nodes: _Nodes, inputs: list[Any], outputs: list[Any], opset: int, constants: Any = ()) -> bytes:
        helper = self.onnx.helper
        graph = helper.make_graph(nodes, "kernel", inputs, outputs, constants)
        imports = [helper.make_opsetid("", opset), helper.make_opsetid(_onnx_graph.CONTRIB, 1)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION)
        text: bytes = model.SerializeToString(deterministic=True)
        return text

    def _options(self) -> Any:
        options = self.runtime.SessionOptions()
        # Spinning threads of idle sessions would take the cores from other workers.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return options

    def session_of_constants(self, graph: _onnx_graph.Graph, dtypes: dict[str, str], constants: dict[str, Any]) -> Any:
        """A session for these nodes on tensors of these ranks, with constants, whose memory must stay: its own."""
        onnx, options = self.onnx, self._options()
        options.enable_cpu_mem_arena = False  # one for each weight would hold what its largest call took
        options.enable_mem_pattern = False
        if len(os.sched_getaffinity(0)) > MOST_THREADS:
            options.intra_op_num_threads = MOST_THREADS
        tensors = []
        for name, value in constants.items():
            element = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
            tensor = onnx.TensorProto(name=name, data_type=element, dims=value.shape)
            tensor.data_location = onnx.TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value=name)
            tensors.append(tensor)
        given = [self.runtime.OrtValue.ortvalue_from_numpy(value) for value in constants.values()]
        options.add_external_initializers(list(constants), given)
        ins, outs = (
            [self._info(name, dtypes[name], shape) for name, shape in some.items()]
            for some in (graph.inputs, graph.outputs)
        )
        text = self._text(graph.nodes, ins, outs, _onnx_graph.OPSET, tensors)
        return self.runtime.InferenceSession(text, options, providers=["CPUExecutionProvider"])

    def layer_norm(self, call: Call) -> tuple[_Nodes, _Shapes]:
        x, given = call.inputs[0], [spec for spec in call.inputs if spec is not None]
        assert x is not None
        axes = list(range(-call.attrs["ndim"], 0))
        node = self.onnx.helper.make_node
        # The runtime computes the variance as E[x^2] - E[x]^2, which cancels when the mean is large (error 0.02 at
        # a mean of 100 in float32, NaN at 10000; 1.18.1). Centred values have a mean of 0.
        nodes = [
            node("ReduceMean", ["x"], ["mean"], axes=axes, keepdims=1),
            node("Sub", ["x", "mean"], ["centred"]),
            node(
                "LayerNormalization",
                ["centred", *"wb"[: len(given) - 1]],
                ["y"],
                axis=axes[0],
                epsilon=call.attrs["eps"],
            ),
        ]
        return nodes, (*(spec.shape for spec in given), x.shape)

    def linear(self, call: Call) -> tuple[_Nodes, _Shapes]:
        x, weight, bias = call.inputs
        assert x is not None
        assert weight is not None
        rows, columns = math.prod(x.shape[:-1]), weight.shape[0]
        activation = call.attrs["activation"]
        made = "product" if activation else "y"
        nodes = [self.onnx.helper.make_node("Gemm", ["x", "w"] + (["b"] if bias else []), [made], transB=1)]
        if activation:  # of relu the runtime makes one node, FusedGemm
            nodes += _onnx_activations.after(self.onnx.helper, activation, made)
        biases = (bias.shape,) if bias else ()
        return nodes, ((rows, x.shape[-1]), weight.shape, *biases, (rows, columns))

    def matmul(self, call: Call) -> tuple[_Nodes, _Shapes]:
        return [self.onnx.helper.make_node("MatMul", ["x", "w"], ["y"])], _shapes(call)

    def addmm(self, call: Call) -> tuple[_Nodes, _Shapes]:
        attrs = {name: call.attrs[name] for name in ("beta", "alpha")}
        return [self.onnx.helper.make_node("Gemm", ["w", "b", "x"], ["y"], **attrs)], _shapes(call)

    def gated_mlp(self, call: Call) -> tuple[_Nodes, _Shapes]:
        x, gate_up, down = call.inputs
        assert x is not None
        assert gate_up is not None
        assert down is not None
        rows, nodes = math.prod(x.shape[:-1]), _onnx_activations.gated_mlp(self.onnx.helper, call.attrs["activation"])
        return nodes, ((rows, x.shape[-1]), gate_up.shape, down.shape, (rows, down.shape[0]))

    def softmax(self, call: Call) -> tuple[_Nodes, _Shapes]:
        name = {"softmax": "Softmax", "log_softmax": "LogSoftmax"}[call.op]
        helper, nodes, given = self.onnx.helper, [], "x"
        if call.attrs["dtype"]:
            element = helper.np_dtype_to_tensor_dtype(self.numpy.dtype(call.attrs["dtype"]))
            nodes, given = [helper.make_node("Cast", ["x"], ["converted"], to=element)], "converted"
        return [*nodes, helper.make_node(name, [given], ["y"], axis=call.attrs["dim"])], _shapes(call)

    def activation(self, call: Call) -> tuple[_Nodes, _Shapes]:
        return _onnx_activations.nodes(self.onnx.helper, call), _shapes(call)


def _shapes(call: Call) -> _Shapes:
    specs: list[TensorSpec] = [spec for spec in (*call.inputs, *call.outputs) if spec is not None]
    return tuple(spec.shape for spec in specs)
