"""Models for tests/envs/test_models.py, made where their library is."""

from __future__ import annotations

from typing import Any

import layerzero as lz

ONNX = lz.env("model-onnx", requires=["onnxruntime==1.18.1", "onnx==1.16.2", "numpy<2"], python="3.11")
TORCH = lz.env("model-torch", requires=["torch==2.13.0", "safetensors", "numpy"], python="3.11")


@lz.isolated(ONNX, timeout_s=60)
def write_onnx(path: str, kind: str) -> str:
    """A graph of one step; the version of ONNX Runtime that will run it."""
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper

    def info(name: str, dims: Any, dtype: int = TensorProto.FLOAT) -> Any:
        return helper.make_tensor_value_info(name, dtype, dims)

    inputs, outputs = [info("x", ["rows", 4]), info("y", ["rows", 4])], [info("sum", ["rows", 4])]
    nodes = [helper.make_node("Add", ["x", "y"], ["sum"])]
    if kind == "two":
        nodes.append(helper.make_node("Mul", ["x", "y"], ["product"]))
        outputs.append(info("product", ["rows", 4]))
    elif kind == "unknown":  # its size depends on the values
        inputs, outputs = [info("x", ["rows", 4])], [info("found", [2, "many"], TensorProto.INT64)]
        nodes = [helper.make_node("NonZero", ["x"], ["found"])]
    elif kind == "lying":  # the name of a size says what is not so
        inputs, outputs = [info("x", ["rows", 4])], [info("twice", ["rows", 4])]
        nodes = [helper.make_node("Concat", ["x", "x"], ["twice"], axis=0)]
    graph = helper.make_graph(nodes, kind, inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return onnxruntime.__version__


@lz.isolated(TORCH, timeout_s=120)
def write_torch(folder: str) -> str:
    """One linear layer, in each of the forms."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3)
    torch.jit.script(layer).save(f"{folder}/linear.pt")
    rows = torch.export.Dim("rows", min=2, max=64)
    torch.export.save(
        torch.export.export(layer, (torch.zeros(5, 4),), dynamic_shapes={"input": {0: rows}}), f"{folder}/linear.pt2"
    )
    torch.save(layer.state_dict(), f"{folder}/pickle.pt")
    save_file({f"layer.{name}": value for name, value in layer.state_dict().items()}, f"{folder}/linear.safetensors")
    return str(torch.__version__)
