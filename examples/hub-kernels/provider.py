"""Activations of a package on the HF Kernel Hub that has the functions of kernels-community/activation: each fills the
first tensor that it is given."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from layerzero.workers import hub_kernels
from layerzero.workers.provider import Bind, Block, Bound, Call, Loaded


def load() -> Loaded:
    import torch

    torch.set_grad_enabled(False)
    package = hub_kernels.load_package()

    def view(block: Block) -> Any:
        """The caller's memory as a tensor: nothing is copied."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
            dtype, shape = getattr(torch, block.spec.dtype), block.spec.shape
            return torch.frombuffer(block.host, dtype=dtype, count=math.prod(shape)).view(shape)

    def elementwise(function_of: Callable[[Call], Any]) -> Bind:
        def bind(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
            (x,), out = [view(block) for block in inputs if block is not None], view(outputs[0])
            function = function_of(call)
            return lambda: function(out, x)

        return bind

    def swiglu(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        halves, out = [view(block) for block in inputs if block is not None], view(outputs[0])
        return lambda: package.silu_and_mul(out, torch.cat(halves, dim=-1))  # both halves in one tensor

    return Loaded(
        versions={"torch": torch.__version__},
        kernels={
            "hub-activation.silu": elementwise(lambda call: package.silu),
            "hub-activation.gelu": elementwise(
                lambda call: package.gelu_tanh if call.attrs["approximate"] == "tanh" else package.gelu
            ),
            "hub-activation.swiglu": swiglu,
        },
    )
