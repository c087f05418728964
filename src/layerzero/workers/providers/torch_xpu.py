"""PyTorch on an Intel GPU. Never run by this project. Torch calls the device "xpu"
(https://docs.pytorch.org/docs/stable/notes/get_start_xpu.html)."""

from __future__ import annotations

from layerzero.workers.provider import Loaded
from layerzero.workers.providers import _torch_staged


def load() -> Loaded:
    import torch

    if not torch.xpu.is_available():
        raise RuntimeError(
            f"torch {torch.__version__} has no Intel GPU: it was built for SYCL {torch.version.xpu}, and Level Zero "
            "gives it none"
        )
    return Loaded(
        versions={"torch": torch.__version__, "sycl": str(torch.version.xpu)},
        kernels=_torch_staged.kernels(torch, "xpu", "torch-xpu"),
    )
