"""A BERT as an ONNX graph, made of its weights: what onnx_minilm.py runs in its environment, which has onnx."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file


def graph(folder: Path) -> bytes:
    """Of one text: int64 ids and places (1, tokens) to float32 states (1, tokens, hidden)."""
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    heads, nodes = config["num_attention_heads"], []
    weights["split"], weights["merge"] = np.array([0, 0, heads, -1]), np.array([0, 0, -1])
    weights["scale"] = np.array([heads / config["hidden_size"]], np.float32) ** 0.5
    weights["first"] = np.array([[0]])

    def op(kind: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [f"{kind}{len(nodes)}"], **attributes))
        return nodes[-1].output[0]

    def linear(x: str, name: str) -> str:
        return op("Add", op("MatMul", x, op("Transpose", f"{name}.weight")), f"{name}.bias")

    def norm(x: str, y: str, name: str) -> str:
        names = f"{name}.LayerNorm.weight", f"{name}.LayerNorm.bias"
        return op("LayerNormalization", op("Add", x, y), *names, epsilon=config["layer_norm_eps"])

    def split(x: str, name: str, *order: int) -> str:
        return op("Transpose", op("Reshape", linear(x, name), "split"), perm=order)

    def looked_up(table: str, ids: str) -> str:
        return op("Gather", f"embeddings.{table}_embeddings.weight", ids)

    places = op("Add", looked_up("position", "places"), looked_up("token_type", "first"))
    x = norm(looked_up("word", "ids"), places, "embeddings")
    for layer in (f"encoder.layer.{n}" for n in range(config["num_hidden_layers"])):
        own, out = f"{layer}.attention.self", f"{layer}.attention.output"
        q, k = split(x, f"{own}.query", 0, 2, 1, 3), split(x, f"{own}.key", 0, 2, 3, 1)
        shares = op("Softmax", op("Mul", op("MatMul", q, k), "scale"))
        mixed = op("Transpose", op("MatMul", shares, split(x, f"{own}.value", 0, 2, 1, 3)), perm=(0, 2, 1, 3))
        x = norm(x, linear(op("Reshape", mixed, "merge"), f"{out}.dense"), out)
        wide = op("Gelu", linear(x, f"{layer}.intermediate.dense"))
        x = norm(x, linear(wide, f"{layer}.output.dense"), f"{layer}.output")

    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, [1, "tokens"]) for name in ("ids", "places")]
    outputs = [helper.make_tensor_value_info(x, TensorProto.FLOAT, [1, "tokens", config["hidden_size"]])]
    constants = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    made = helper.make_model(
        helper.make_graph(nodes, "bert", inputs, outputs, constants),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=9,
    )
    return bytes(made.SerializeToString())
