"""The ONNX reference evaluator: the operators as NumPy code. Slow and plain; the last resort."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from layerzero.ipc.vocabulary.ops import OPS
from layerzero.workers.provider import Block, Bound, Call, Loaded
from layerzero.workers.providers import _onnx_attention, _onnx_graph

OPSET, IR_VERSION = 17, 8


def load() -> Loaded:
    import numpy
    import onnx
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    nodes: dict[str, Callable[[Call, list[str]], Any]] = {
        "layer_norm": lambda call, names: helper.make_node(
            "LayerNormalization", names, ["y"], axis=-call.attrs["ndim"], epsilon=call.attrs["eps"]
        ),
        "matmul": lambda call, names: helper.make_node("MatMul", names, ["y"]),
        "softmax": lambda call, names: helper.make_node("Softmax", names, ["y"], axis=call.attrs["dim"]),
    }

    def view(block: Block) -> Any:
        spec = block.spec
        strides = [stride * spec.itemsize for stride in spec.strides]
        return numpy.ndarray(spec.shape, spec.dtype, buffer=block.host, strides=strides)

    def bind(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        given = [block for block in inputs if block is not None]
        feeds = {name: view(block) for name, block in zip("xwb", given, strict=False)}
        out = view(outputs[0])
        element = helper.np_dtype_to_tensor_dtype(out.dtype)
        infos = [
            helper.make_tensor_value_info(name, element, [None] * array.ndim)
            for name, array in (*feeds.items(), ("y", out))
        ]
        graph = helper.make_graph([nodes[call.op](call, list(feeds))], "kernel", infos[:-1], infos[-1:])
        evaluator = ReferenceEvaluator(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
        )

        def bound() -> None:
            (result,) = evaluator.run(None, feeds)
            numpy.copyto(out, result, casting="no")

        return bound

    graphs = {"attention_forward": _onnx_attention.forward, "attention_backward": _onnx_attention.backward}

    def bind_graph(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        made = graphs[call.op](onnx, numpy, call)
        given = dict(zip(OPS[call.op].inputs, inputs, strict=True))
        feeds = {}
        for name, shape in made.inputs.items():
            if name in _onnx_attention.CONSTANT_INPUTS:
                dtype = _onnx_attention.CONSTANT_INPUTS[name] or outputs[0].spec.dtype
                feeds[name] = _onnx_attention.constant_input(numpy, name, shape, dtype, call)
            elif (block := given[name]) is not None:
                feeds[name] = view(block).reshape(shape)
        targets = [view(block) for block in outputs]
        infos = [
            [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(kind), None) for name, kind in named]
            for named in (
                [(name, array.dtype) for name, array in feeds.items()],
                [(name, target.dtype) for name, target in zip(made.outputs, targets, strict=True)],
            )
        ]
        graph = helper.make_graph(made.nodes, "kernel", *infos)
        evaluator = ReferenceEvaluator(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", _onnx_graph.OPSET)], ir_version=IR_VERSION)
        )

        def bound() -> None:
            with numpy.errstate(divide="ignore"):  # log(0) of a row that sees nothing
                results = evaluator.run(None, feeds)
            for target, result in zip(targets, results, strict=True):
                numpy.copyto(target, result.reshape(target.shape), casting="no")

        return bound

    versions = {"onnx": onnx.__version__, "numpy": numpy.__version__}
    binds = {**dict.fromkeys(nodes, bind), **dict.fromkeys(graphs, bind_graph)}
    return Loaded(versions=versions, kernels={f"onnx-reference.{op}": one for op, one in binds.items()})
