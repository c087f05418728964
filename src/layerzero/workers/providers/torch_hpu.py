"""PyTorch on Intel Gaudi. Never run by this project. The plugin registers the device "hpu"
(https://docs.habana.ai/en/latest/PyTorch/Reference/PyTorch_Support_Matrix.html); the ops are those of its table of
operators, in which scaled_dot_product_attention and rms_norm are missing."""

from __future__ import annotations

from importlib.metadata import version

from layerzero.workers.provider import Loaded
from layerzero.workers.providers import _torch_staged

DOCUMENTED = (
    *("matmul", "addmm", "linear", "softmax", "log_softmax", "layer_norm", "gelu", "silu", "relu", "sigmoid", "tanh"),
    *("embedding", "add", "mul"),
)


def load() -> Loaded:
    import habana_frameworks.torch  # noqa: F401 - it registers the device
    import torch

    if not torch.hpu.is_available():
        raise RuntimeError(f"torch {torch.__version__} has no Gaudi card: the driver gives it none")
    versions = {"torch": torch.__version__, "habana-torch-plugin": version("habana-torch-plugin")}
    return Loaded(versions=versions, kernels=_torch_staged.kernels(torch, "hpu", "torch-hpu", DOCUMENTED))
