"""zentorch (ZenDNN) kernels, called as bare torch ops on tensors that view the caller's memory."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from layerzero.workers.provider import Block, Bound, Call, Loaded
from layerzero.workers.providers._torch_attention import restore_nan
from layerzero.workers.providers._torch_ops import any_scale, host_view, in_place

LEAST_EPS = 2.0**-126  # of 0 in float32 ZenDNN's norms do nothing, and say nothing: the result is what lay there
WEIGHT_CACHE = "ZENDNNL_MATMUL_WEIGHT_CACHE"


def load() -> Loaded:
    if os.environ.get(WEIGHT_CACHE) != "0":
        raise RuntimeError(
            f"{WEIGHT_CACHE} is {os.environ.get(WEIGHT_CACHE)!r}; it must be '0'. With its weight cache zentorch "
            "writes into the caller's weights, or serves stale ones when memory is used again. Set it in the env's "
            "manifest."
        )
    import torch
    import zentorch

    torch.set_grad_enabled(False)
    library = _Zentorch(torch)
    kernels = {
        "zentorch.attention": library.attention,
        "zentorch.linear": library.linear,
        "zentorch.gated_mlp": library.gated_mlp,
        "zentorch.rms_norm": library.rms_norm,
        "zentorch.add_rms_norm": library.add_rms_norm,
    }
    return Loaded(
        versions={"zentorch": zentorch.__version__, "torch": torch.__version__, "numpy": version("numpy")},
        kernels=kernels,
    )


class _Zentorch:
    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.ops = torch.ops.zentorch
        self.view = host_view(torch)

    def views(self, blocks: Sequence[Block | None]) -> list[Any]:
        return [None if block is None else self.view(block) for block in blocks]

    def attention(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        torch = self.torch
        q, k, v, mask, *_ = self.views(inputs)
        out = self.view(outputs[0])
        rows, keys, value_width = q.shape[2], k.shape[2], v.shape[3]
        width = max(q.shape[3], value_width)
        is_causal, scale = call.attrs["is_causal"], call.attrs["scale"]
        padded_out = torch.empty((*out.shape[:3], width), dtype=out.dtype) if width != value_width else out

        def adapt(tensor: Any) -> Any:
            """zentorch takes one head_dim for q, k and v (zeros added to it change nothing), and no stride of 0."""
            if tensor.shape[3] != width:
                return torch.nn.functional.pad(tensor, (0, width - tensor.shape[3]))
            if tensor.stride(3) != 1 or 0 in tensor.stride():
                return tensor.clone(memory_format=torch.contiguous_format)
            return tensor

        @any_scale
        def sdpa(queries: Any, bias: Any, *, scale: float) -> None:
            self.ops.zentorch_sdpa.out(
                *(adapt(queries), adapt(k), adapt(v), 0.0, is_causal), attn_mask=bias, scale=scale, out=padded_out
            )
            restore_nan(padded_out, queries, k, mask, is_causal=is_causal)

        def bound() -> None:
            bias = mask
            if bias is not None:  # it takes a mask of q's dtype with every key in it, and no other
                if bias.dtype == torch.bool:
                    bias = torch.zeros(bias.shape, dtype=q.dtype).masked_fill_(~bias, -math.inf)
                bias = bias.expand(*bias.shape[:2], rows, keys).contiguous()
            sdpa(q, bias, scale=scale)
            if padded_out is not out:
                out.copy_(padded_out[..., :value_width])

        return bound

    def linear(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        """The activation is ZenDNN's, fused into the product (a "post op"), but for relu: its relu of NaN is 0, and for
        gelu of infinity, which it gives NaN for."""
        x, weight, bias = self.views(inputs)
        out = self.view(outputs[0])
        kernel = self.ops.zentorch_linear_unary.out
        activation = {"": "none", "gelu": "gelu_erf"}.get(call.attrs["activation"], call.attrs["activation"])

        def bound() -> None:
            kernel(x, weight, bias, post_op="none" if activation == "relu" else activation, out=out)
            if activation == "relu":
                self.torch.relu_(out)
            elif activation.startswith("gelu") and not math.isfinite(out.sum()):
                kernel(x, weight, bias, post_op="none", out=out)
                in_place(self.torch, call.attrs["activation"])(out)

        return bound

    def gated_mlp(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        """ZenDNN's product of gates and others with the activation fused into it, and the product after it. Of gelu it
        has that by erf alone, whatever the name."""
        x, gate_up, down = self.views(inputs)
        out = self.view(outputs[0])
        rows, results = x.view(-1, x.shape[-1]), out.view(-1, out.shape[-1])
        kernel, activation = self.ops.zentorch_fused_ffn_concat.out, call.attrs["activation"]

        def bound() -> None:
            kernel(results, rows, gate_up, down, None, None, activation)

        return bound

    def rms_norm(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        x, weight = self.views(inputs)
        # Anything but contiguous (rows, columns) gives wrong numbers or never returns (2.13.0.2).
        rows, flat_weight = x.view(-1, weight.numel()), weight.view(-1)
        out, eps = self.view(outputs[0]), call.attrs["eps"]
        kernel = self.ops.zentorch_rms_norm
        if eps < LEAST_EPS:
            kernel = self._plain_rms_norm

        def bound() -> None:
            out.copy_(kernel(rows, flat_weight, eps).view(out.shape))

        return bound

    def _plain_rms_norm(self, rows: Any, weight: Any, eps: float) -> Any:
        return self.torch.nn.functional.rms_norm(rows, weight.shape, weight, eps)

    def add_rms_norm(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        """In place: on the results' own memory, where copies of the arguments lie."""
        x, residual, weight = self.views(inputs)
        out, summed = self.views(outputs)
        shape, flat_weight = (-1, weight.numel()), weight.view(-1)
        kernel, eps = self.ops.zentorch_add_rms_norm_, call.attrs["eps"]

        def bound() -> None:
            targets = [t if t.is_contiguous() else self.torch.empty(t.shape, dtype=t.dtype) for t in (out, summed)]
            for target, source in zip(targets, (x, residual), strict=True):
                target.copy_(source)
            normed, sums = (target.view(shape) for target in targets)
            if eps < LEAST_EPS:
                sums.add_(normed)
                normed.copy_(self._plain_rms_norm(sums, flat_weight, eps))
            else:
                kernel(normed, flat_weight, sums, eps)
            for one, target in zip((out, summed), targets, strict=True):
                if one is not target:
                    one.copy_(target)

        return bound
