"""One program with NumPy 1.26 and 2, protobuf 3 and 6, ONNX Runtime 1.16 and torch 2.13, in two environments.

python examples/functions.py --build     # resolves, locks and builds both environments, once
python examples/functions.py
"""

import sys
import tempfile
import warnings

import numpy as np

import layerzero as lz

OLD_STACK = ["numpy==1.26.4", "protobuf==3.20.3", "onnxruntime==1.16.3", "onnx==1.15.0"]
OLD = lz.env("example-old", requires=OLD_STACK, python="3.11")
NEW = lz.env("example-new", requires=["numpy>=2.2,<3", "protobuf>=6,<7", "torch==2.13.0"], python="3.11")


def versions(*names: str) -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in names}


old_versions, new_versions = lz.isolated(OLD)(versions), lz.isolated(NEW)(versions)


@lz.isolated(OLD, timeout_s=60)
def write_model(path: str, weight: np.ndarray) -> None:
    import onnx
    from onnx import helper, numpy_helper

    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["rows", len(weight)]) for name in "xy")
    nodes = [helper.make_node("MatMul", ["x", "weight"], ["z"]), helper.make_node("Relu", ["z"], ["y"])]
    graph = helper.make_graph(nodes, "layer", [x], [y], [numpy_helper.from_array(weight, "weight")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


@lz.isolated(NEW, timeout_s=60, shapes=lambda x, weight: (x.shape, x.dtype))
def layer(x: np.ndarray, weight: np.ndarray, *, out: np.ndarray) -> np.ndarray:
    import torch

    warnings.simplefilter("ignore", UserWarning)  # torch says that x cannot be written, which is meant
    torch.mm(torch.from_numpy(x), torch.from_numpy(weight), out=torch.from_numpy(out)).relu_()
    return out


if __name__ == "__main__":
    if "--build" in sys.argv:
        OLD.build(), NEW.build()
    lz.connect()
    print("old", old_versions("numpy", "protobuf", "onnxruntime"), "new", new_versions("numpy", "protobuf", "torch"))
    x, weight = (lz.share(np.random.standard_normal(shape).astype(np.float32)) for shape in ((4096, 64), (64, 64)))
    with tempfile.TemporaryDirectory() as folder:
        write_model(path := f"{folder}/layer.onnx", weight)
        with lz.load(path, env=OLD) as model:
            print("largest difference", float(abs(model(x) - layer(x, weight)).max()))
            print(model.last_report(), layer.last_report(), sep="\n")
