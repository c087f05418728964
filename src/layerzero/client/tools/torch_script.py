"""Calls of torch's public functions that are what the torch backend's kernels make of ops: lines of a script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from layerzero.client.planning.plans import Plan
from layerzero.ipc.vocabulary import resampling, windows
from layerzero.ipc.vocabulary.ops import OPS

F = "torch.nn.functional"
_ACTIVATIONS = {
    "relu": f"{F}.relu({{}})",
    "gelu": f"{F}.gelu({{}})",
    "gelu_tanh": f"{F}.gelu({{}}, approximate='tanh')",
    "silu": f"{F}.silu({{}})",
}


def lines_of(plan: Plan) -> tuple[str, list[str]] | None:
    """The function, and statements that leave the op's outputs in variables of their names. The inputs are in
    variables of theirs, None where left out. None for an op, or options, whose kernel is no such call."""
    return _Lines(plan).made()


class _Lines:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.attrs = plan, plan.attrs
        self.specs = dict(zip(OPS[plan.op].inputs, plan.inputs, strict=True))

    def made(self) -> tuple[str, list[str]] | None:
        op = self.plan.op
        if op in _PLAIN:
            function, arguments = _PLAIN[op]
            return function, [f"out = {function}({', '.join(arguments)})"]
        own: Callable[[], tuple[str, list[str]] | None] | None = getattr(self, op, None)
        return None if own is None else own()

    def attention(self) -> tuple[str, list[str]] | None:
        attrs, q, k = self.attrs, self.specs["q"], self.specs["k"]
        has_more = self.specs["sinks"] or self.specs["alibi_slopes"] or not OPS["attention"].options.isdisjoint(attrs)
        if q is None or k is None or has_more or (attrs["is_causal"] and self.specs["attn_mask"]) or not k.shape[2]:
            return None
        lines, queries, keys, is_causal = [], q.shape[2], k.shape[2], attrs["is_causal"]
        if is_causal and queries != keys and attrs["causal_alignment"] == "bottom_right":
            is_causal = False
            lines.append(f"attn_mask = torch.ones({queries}, {keys}, dtype=torch.bool).tril_({keys - queries})")
        function, is_grouped = f"{F}.scaled_dot_product_attention", q.shape[1] != k.shape[1]
        more = f"is_causal={is_causal}, scale={attrs['scale']!r}, enable_gqa={is_grouped}"
        return function, [*lines, f"out = {function}(q, k, v, attn_mask=attn_mask, {more})"]

    def gelu(self) -> tuple[str, list[str]]:
        return f"{F}.gelu", [f"out = {F}.gelu(x, approximate={self.attrs['approximate']!r})"]

    def geglu(self) -> tuple[str, list[str]]:
        return f"{F}.gelu", [f"out = {F}.gelu(gate, approximate={self.attrs['approximate']!r}) * up"]

    def swiglu(self) -> tuple[str, list[str]]:
        return f"{F}.silu", [f"out = {F}.silu(gate) * up"]

    def reglu(self) -> tuple[str, list[str]]:
        return f"{F}.relu", [f"out = {F}.relu(gate) * up"]

    def softmax(self) -> tuple[str, list[str]]:
        return self._softmax("torch.softmax")

    def log_softmax(self) -> tuple[str, list[str]]:
        return self._softmax("torch.log_softmax")

    def _softmax(self, function: str) -> tuple[str, list[str]]:
        dtype = f", dtype=torch.{self.attrs['dtype']}" if self.attrs["dtype"] else ""
        return function, [f"out = {function}(x, {self.attrs['dim']}{dtype})"]

    def layer_norm(self) -> tuple[str, list[str]]:
        return f"{F}.layer_norm", [f"out = {F}.layer_norm(x, {self._last()}, weight, bias, {self.attrs['eps']!r})"]

    def rms_norm(self) -> tuple[str, list[str]]:
        return f"{F}.rms_norm", [f"out = {F}.rms_norm(x, {self._last()}, weight, {self.attrs['eps']!r})"]

    def add_rms_norm(self) -> tuple[str, list[str]]:
        norm = f"out = {F}.rms_norm(summed, {self._last()}, weight, {self.attrs['eps']!r})"
        return f"{F}.rms_norm", ["summed = torch.add(x, residual)", norm]

    def _last(self) -> list[int]:
        """The extents that are normalized."""
        x, ndim = self.specs["x"], self.attrs["ndim"]
        assert x is not None
        assert isinstance(ndim, int)
        return list(x.shape[len(x.shape) - ndim :])

    def group_norm(self) -> tuple[str, list[str]]:
        made = [f"out = {F}.group_norm(x, {self.attrs['num_groups']}, weight, bias, {self.attrs['eps']!r})"]
        return f"{F}.group_norm", made + self._activated()

    def instance_norm(self) -> tuple[str, list[str]]:
        """As the kernel has it: each channel is a group."""
        eps = self.attrs["eps"]
        return f"{F}.group_norm", [f"out = {F}.group_norm(x, x.shape[1], weight, bias, {eps!r})"]

    def batch_norm(self) -> tuple[str, list[str]]:
        more = f"running_mean, running_var, weight, bias, eps={self.attrs['eps']!r}"
        return f"{F}.batch_norm", [f"out = {F}.batch_norm(x, {more})"]

    def linear(self) -> tuple[str, list[str]]:
        return f"{F}.linear", [f"out = {F}.linear(x, weight, bias)", *self._activated()]

    def gated_mlp(self) -> tuple[str, list[str]]:
        opened = _ACTIVATIONS[str(self.attrs["activation"])].format("gate")
        made = [f"gate, up = {F}.linear(x, gate_up).chunk(2, -1)", f"out = {F}.linear({opened} * up, down)"]
        return f"{F}.linear", made

    def addmm(self) -> tuple[str, list[str]]:
        first, a, b = OPS["addmm"].inputs
        more = f"beta={self.attrs['beta']!r}, alpha={self.attrs['alpha']!r}"
        return "torch.addmm", [f"out = torch.addmm({first}, {a}, {b}, {more})"]

    def clamp(self) -> tuple[str, list[str]]:
        return "torch.clamp", [f"out = torch.clamp(x, {_code(self.attrs['min'])}, {_code(self.attrs['max'])})"]

    def cat(self) -> tuple[str, list[str]]:
        given = ", ".join(name for name, spec in self.specs.items() if spec is not None)
        return "torch.cat", [f"out = torch.cat([{given}], {self.attrs['dim']})"]

    def cast(self) -> tuple[str, list[str]]:
        return "torch.Tensor.to", [f"out = x.to(torch.{self.attrs['dtype']})"]

    def conv(self) -> tuple[str, list[str]]:
        pads = windows.pads(str(self.attrs["padding"]))
        lines, padding = self._padded(pads)
        function = f"{F}.conv{len(pads)}d"
        numbers = f"{self._numbers('stride')}, {padding}, {self._numbers('dilation')}, {self.attrs['groups']}"
        return function, [*lines, f"out = {function}(x, weight, bias, {numbers})", *self._activated()]

    def conv_transpose(self) -> tuple[str, list[str]] | None:
        cuts = windows.cut(self.attrs)
        if any(cut.before != cut.after or cut.zeros for cut in cuts):
            return None
        function = f"{F}.conv_transpose{len(cuts)}d"
        numbers = f"{self._numbers('stride')}, {[cut.before for cut in cuts]}, {[cut.more for cut in cuts]}"
        more = f"{numbers}, {self.attrs['groups']}, {self._numbers('dilation')}"
        return function, [f"out = {function}(x, weight, bias, {more})", *self._activated()]

    def max_pool(self) -> tuple[str, list[str]] | None:
        return self._pool("max", f", {self._numbers('dilation')}, {self.attrs['ceil_mode']}")

    def avg_pool(self) -> tuple[str, list[str]] | None:
        if self.attrs["divisor"]:
            return None
        return self._pool("avg", f", {self.attrs['ceil_mode']}, {self.attrs['count_include_pad']}")

    def _pool(self, kind: str, more: str) -> tuple[str, list[str]] | None:
        pads = windows.pads(str(self.attrs["padding"]))
        if any(before != after for before, after in pads):
            return None
        function = f"{F}.{kind}_pool{len(pads)}d"
        numbers = f"{self._numbers('kernel_size')}, {self._numbers('stride')}, {[before for before, _ in pads]}"
        return function, [f"out = {function}(x, {numbers}{more})"]

    def adaptive_max_pool(self) -> tuple[str, list[str]]:
        return self._adaptive("max")

    def adaptive_avg_pool(self) -> tuple[str, list[str]]:
        return self._adaptive("avg")

    def _adaptive(self, kind: str) -> tuple[str, list[str]]:
        sizes = self._numbers("output_size")
        function = f"{F}.adaptive_{kind}_pool{len(sizes)}d"
        return function, [f"out = {function}(x, {sizes})"]

    def interpolate(self) -> tuple[str, list[str]]:
        attrs, x = self.attrs, self.specs["x"]
        assert x is not None
        mode, scales = str(attrs["mode"]), resampling.scales_of(str(attrs["scale"] or ""))
        wanted = f"scale_factor={list(scales)}" if scales else f"size={self._numbers('size')}"
        if mode.startswith("nearest"):
            given, more = "x", f"mode={mode.replace('_', '-')!r}"
        else:
            name = ("linear", "bilinear", "trilinear")[len(x.shape) - 3] if mode == "linear" else "bicubic"
            given = "x" if x.dtype == "float64" else "x.float()"
            more = f"mode={name!r}, align_corners={attrs['align_corners']}, antialias={attrs['antialias']}"
        return f"{F}.interpolate", [f"out = {F}.interpolate({given}, {wanted}, {more})"]

    def _padded(self, pads: Any) -> tuple[list[str], list[int]]:
        """What is padded unevenly is padded before."""
        if all(before == after for before, after in pads):
            return [], [before for before, _ in pads]
        flat = [number for pad in reversed(pads) for number in pad]
        return [f"x = {F}.pad(x, {flat})"], [0] * len(pads)

    def _numbers(self, name: str) -> list[int]:
        return list(windows.known(str(self.attrs[name])))

    def _activated(self) -> list[str]:
        activation = str(self.attrs.get("activation") or "")
        return [f"out = {_ACTIVATIONS[activation].format('out')}"] if activation else []


def _code(number: Any) -> str:
    """A number as Python writes it."""
    return f"float('{number}')" if isinstance(number, float) else repr(number)


_PLAIN: dict[str, tuple[str, tuple[str, ...]]] = {
    "silu": (f"{F}.silu", ("x",)),
    "relu": (f"{F}.relu", ("x",)),
    "mish": (f"{F}.mish", ("x",)),
    "hardswish": (f"{F}.hardswish", ("x",)),
    "sigmoid": ("torch.sigmoid", ("x",)),
    "tanh": ("torch.tanh", ("x",)),
    "matmul": ("torch.matmul", ("a", "b")),
    "add": ("torch.add", ("x", "other")),
    "mul": ("torch.mul", ("x", "other")),
    "where": ("torch.where", ("condition", "x", "other")),
    "embedding": (f"{F}.embedding", ("ids", "weight")),
}
