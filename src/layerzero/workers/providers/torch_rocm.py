"""PyTorch on an AMD GPU. Never run by this project. HIP's build of torch calls the device "cuda"
(https://docs.pytorch.org/docs/stable/notes/hip.html)."""

from __future__ import annotations

from layerzero.workers.provider import Loaded
from layerzero.workers.providers import _torch_staged


def load() -> Loaded:
    import torch

    if torch.version.hip is None or not torch.cuda.is_available():
        raise RuntimeError(
            f"torch {torch.__version__} has no AMD GPU: it was built for HIP {torch.version.hip}, and the driver gives "
            "it none"
        )
    return Loaded(
        versions={"torch": torch.__version__, "hip": torch.version.hip},
        kernels=_torch_staged.kernels(torch, "cuda", "torch-rocm"),
    )
