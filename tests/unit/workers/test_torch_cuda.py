"""Torch's providers on a GPU, as far as it takes none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from layerzero.workers.providers._torch_cuda import TorchCuda


def test_stream_0_is_the_default_stream_and_no_new_one() -> None:
    """torch.cuda.ExternalStream(0) is a stream of torch's pool, and its work has no order with the caller's."""
    cuda: Any = SimpleNamespace(
        is_available=lambda: True,
        init=lambda: None,
        current_device=lambda: 1,
        ExternalStream=lambda stream, device: ("external", stream, device),
        default_stream=lambda device: ("default", device),
        stream=lambda found: found,
    )
    gpu = TorchCuda(SimpleNamespace(cuda=cuda, set_grad_enabled=lambda on: None))
    assert gpu.on_stream(0) == ("default", 1)
    assert gpu.on_stream(7) == ("external", 7, 1)
