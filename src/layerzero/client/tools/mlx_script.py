"""What the mlx backend's kernels make of ops, where that is one of MLX's public functions: lines of a script."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from layerzero.client.planning.plans import Plan
from layerzero.ipc.vocabulary import windows
from layerzero.ipc.vocabulary.ops import OPS

WIDE = "astype(mx.float32)"
_HALF_DTYPES = ("float16", "bfloat16")


def lines_of(plan: Plan) -> tuple[str, list[str]] | None:
    """The function, and statements that leave the op's outputs, evaluated, in variables of their names. The inputs are
    in variables of theirs, None where left out. None for an op, or options, whose kernel is no such call."""
    found = _Lines(plan).made()
    if found is None:
        return None
    function, lines = found
    return function, [*lines, f"mx.eval({', '.join(OPS[plan.op].outputs)})"]


class _Lines:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.attrs = plan, plan.attrs
        self.specs = dict(zip(OPS[plan.op].inputs, plan.inputs, strict=True))

    def made(self) -> tuple[str, list[str]] | None:
        op = self.plan.op
        if op in _PLAIN:
            function, arguments = _PLAIN[op]
            return function, [f"out = {function}({', '.join(arguments)})"]
        if op in _WIDE:
            return _WIDE[op], [f"out = {_WIDE[op]}(x.{WIDE}).astype(x.dtype)"]
        own: Callable[[], tuple[str, list[str]] | None] | None = getattr(self, op, None)
        return None if own is None else own()

    def attention(self) -> tuple[str, list[str]] | None:
        attrs, q, k = self.attrs, self.specs["q"], self.specs["k"]
        left_out = all(self.specs[name] is None for name in ("attn_mask", "sinks", "alibi_slopes"))
        if q is None or k is None or not left_out or not OPS["attention"].options.isdisjoint(attrs):
            return None
        function, lines, mask = "mx.fast.scaled_dot_product_attention", [], "None"
        if q.dtype in _HALF_DTYPES:
            lines.append(f"q, k, v = q.{WIDE}, k.{WIDE}, v.{WIDE}")
        queries, keys = q.shape[2], k.shape[2]
        if attrs["is_causal"]:
            shift = keys - queries if attrs["causal_alignment"] == "bottom_right" else 0
            lines.append(f"mask = mx.arange({keys})[None, :] - mx.arange({queries})[:, None] - {shift} <= 0")
            mask = "mask"
        return function, [*lines, f"out = {function}(q, k, v, scale={attrs['scale']!r}, mask={mask})"]

    def conv(self) -> tuple[str, list[str]] | None:
        x, attrs = self.specs["x"], self.attrs
        groups = attrs["groups"]
        if x is None or (groups != 1 and len(x.shape) == 5) or attrs["activation"]:
            return None
        stride, dilation = (list(windows.known(str(attrs[name]))) for name in ("stride", "dilation"))
        pads = windows.pads(str(attrs["padding"]))
        padding = tuple([pad[side] for pad in pads] for side in (0, 1))
        more = f"stride={stride}, padding={padding}, kernel_dilation={dilation}, groups={groups}"
        lines = [
            f"channels_last = mx.moveaxis(x.{WIDE}, 1, -1)",
            f"by = mx.moveaxis(weight.{WIDE}, 1, -1)",
            f"out = mx.conv_general(channels_last, by, {more})",
        ]
        lines += [f"out = out + bias.{WIDE}"] if self.specs["bias"] is not None else []
        return "mx.conv_general", [*lines, "out = mx.moveaxis(out, -1, 1).astype(x.dtype)"]

    def addmm(self) -> tuple[str, list[str]] | None:
        names, beta, alpha = OPS["addmm"].inputs, self.attrs["beta"], self.attrs["alpha"]
        if not beta:
            return None
        wide = ", ".join(f"{name}.{WIDE}" for name in names)
        made = f"mx.addmm({wide}, alpha={alpha!r}, beta={beta!r})"
        return "mx.addmm", [f"out = {made}.astype({names[0]}.dtype)"]

    def softmax(self) -> tuple[str, list[str]]:
        dtype = self.plan.outputs[0].dtype
        return "mx.softmax", [f"out = mx.softmax(x.astype(mx.{dtype}), axis={self.attrs['dim']}, precise=True)"]

    def layer_norm(self) -> tuple[str, list[str]]:
        return self._norm("mx.fast.layer_norm", ("weight", "bias"))

    def rms_norm(self) -> tuple[str, list[str]]:
        return self._norm("mx.fast.rms_norm", ("weight",))

    def _norm(self, function: str, names: tuple[str, ...]) -> tuple[str, list[str]]:
        x, ndim = self.specs["x"], self.attrs["ndim"]
        assert x is not None
        assert isinstance(ndim, int)
        columns = math.prod(x.shape[len(x.shape) - ndim :])
        given = ["None" if self.specs[name] is None else f"{name}.reshape(-1)" for name in names]
        more = ", ".join([*given, repr(self.attrs["eps"])])
        return function, [f"out = {function}(x.reshape(-1, {columns}), {more}).reshape(x.shape)"]

    def clamp(self) -> tuple[str, list[str]]:
        low, high = (_bound(self.attrs[name]) for name in ("min", "max"))
        return "mx.clip", [f"out = mx.clip(x, {low}, {high})"]

    def cat(self) -> tuple[str, list[str]]:
        given = ", ".join(name for name, spec in self.specs.items() if spec is not None)
        return "mx.concatenate", [f"out = mx.concatenate([{given}], axis={self.attrs['dim']})"]

    def cast(self) -> tuple[str, list[str]]:
        return "mx.array.astype", [f"out = x.astype(kind({self.attrs['dtype']!r}))"]


def _bound(number: Any) -> str:
    if number is None:
        return "None"
    return f"mx.array({f'float({str(number)!r})' if isinstance(number, float) else repr(number)}, x.dtype)"


_PLAIN: dict[str, tuple[str, tuple[str, ...]]] = {
    "matmul": ("mx.matmul", ("a", "b")),
    "add": ("mx.add", ("x", "other")),
    "mul": ("mx.multiply", ("x", "other")),
    "where": ("mx.where", ("condition", "x", "other")),
}
_WIDE = {"sigmoid": "mx.sigmoid", "tanh": "mx.tanh"}
