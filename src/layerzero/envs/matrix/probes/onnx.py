"""A matrix product by the reference evaluator."""

from typing import Any


def op(memory: Any) -> tuple[list[Any], list[Any]]:
    import numpy as np
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [64, 64]) for name in ("left", "right")]
    output = helper.make_tensor_value_info("out", TensorProto.FLOAT, [64, 64])
    graph = helper.make_graph([helper.make_node("MatMul", ["left", "right"], ["out"])], "matmul", inputs, [output])
    evaluator = ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)]))
    feeds = {"left": np.asarray(memory.left), "right": np.asarray(memory.right)}
    return evaluator.run(None, feeds)[0].ravel().tolist(), memory.product
