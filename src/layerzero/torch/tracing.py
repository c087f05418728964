"""`lz.silu(x)` in a program that torch traces: torch.compile and torch.export see the op of torch.ops.layerzero in
its place. Outside of that the call goes its usual way, and costs what it always did."""

from __future__ import annotations

from typing import Any

import torch

from layerzero.client.connection.call import Request
from layerzero.client.facade import running
from layerzero.torch import vision
from layerzero.torch.table import TABLE


def traced(request: Request) -> Any:
    """The op of torch for a request. Raises NotImplementedError, which torch can trace, where it has none of us."""
    if request.op not in TABLE:
        raise NotImplementedError(f"lz.{request.op} cannot be traced; call it outside of the compiled function")
    packet = getattr(torch.ops.layerzero, request.op)
    options = {**request.params, "backend": request.backend, "timeout_s": request.timeout_s}
    if request.op in ("layer_norm", "rms_norm"):
        x, *params = request.args
        args = (x, options.pop("normalized_shape"), *params, options.pop("eps"))
    elif request.op in ("layer_norm_backward", "rms_norm_backward", "add_rms_norm"):
        first, second, weight = request.args
        args = (first, second, options.pop("normalized_shape"), weight, options.pop("eps"))
    elif request.op == "group_norm":
        x, *params = request.args
        args = (x, options.pop("num_groups"), *params, options.pop("eps"))
    elif request.op == "instance_norm":
        args = (*request.args, options.pop("eps"))
    elif request.op == "batch_norm":
        args = (*request.args, *(options.pop(name) for name in ("training", "momentum", "eps")))
    elif request.op in ("conv", "conv_transpose", *vision.RESIZING):
        args = (*request.args, *vision.traced(request.op, request.args, options))
    elif request.op in ("softmax", "log_softmax"):
        args = (*request.args, options.pop("dim"))
    elif request.op in ("linear", "gated_mlp", "moe_mlp", "clamp", "cast"):
        named = {"clamp": ("min", "max"), "cast": ("dtype",)}.get(request.op, ("activation",))
        args = (*request.args, *(options.pop(name) for name in named))
    elif request.op == "cross_entropy":
        args = (*request.args, *(options.pop(name) for name in ("ignore_index", "reduction", "label_smoothing")))
    elif request.op in ("gelu", "geglu"):
        args = (*request.args, options.pop("approximate"))
    elif request.op == "attention":
        named = ("dropout_p", "is_causal", "scale", "enable_gqa")
        *tensors, sinks, slopes = request.args
        args = (*tensors, *(options.pop(name) for name in named), sinks, slopes)
    else:
        args = request.args
    if isinstance(request.out, tuple):  # several results have no form with `out`
        for target, made in zip(request.out, packet.default(*args, **options), strict=True):
            target.copy_(made)
        return request.out
    if request.out is not None:
        packet.out(*args, **options, out=request.out)
        return request.out
    return packet.default(*args, **options)


def install() -> None:
    """Have calls ask whether torch is tracing."""
    running.tracing = running.Tracing(torch.compiler.is_compiling, traced)
