"""Products by groups and mixtures of experts: of each group that has rows one run of a session on the caller's
weights. Used by onnxruntime.py. The runtime's own node for this, MoE, has no kernel for CPUs (1.18.1)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerzero.workers.provider import Bind, Block, Bound, Call
from layerzero.workers.providers._experts import checked_offsets, refuse_id
from layerzero.workers.providers._onnx_activations import gated_mlp


def binds(numpy: Any, onnx: Any, session_of: Callable[..., Any]) -> Mapping[str, Bind]:
    """By op. `session_of` gives a session for nodes, dtypes and shapes."""
    made = _Experts(numpy, onnx, session_of)
    return {"grouped_linear": made.grouped_linear, "moe_mlp": made.mlp}


class _Experts:
    def __init__(self, numpy: Any, onnx: Any, session_of: Callable[..., Any]) -> None:
        self.numpy = numpy
        self.onnx = onnx
        self.session_of = session_of

    def grouped_linear(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        x, weight, offsets, *bias = (self._view(one) for one in inputs if one is not None)
        out = self._view(outputs[0])
        weights = dict(zip("wb", (weight, *bias), strict=False))
        node = self.onnx.helper.make_node("Gemm", ["x", *weights], ["y"], transB=1)
        run = self._runner([node], x.dtype, weights)

        def bound() -> None:
            ends = checked_offsets(offsets.tolist(), len(x))
            run(x, ends, out)
            out[ends[-1] :] = 0

        return bound

    def mlp(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        numpy = self.numpy
        x, gate_up, down, ids, weights = (self._view(one) for one in inputs if one is not None)
        out, experts, each = self._view(outputs[0]), len(down), ids.shape[1]
        nodes = gated_mlp(self.onnx.helper, call.attrs["activation"])
        run = self._runner(nodes, x.dtype, {"w": gate_up, "b": down})

        def bound() -> None:
            flat = ids.reshape(-1).astype(numpy.int64)  # a copy: the caller can write to its own
            if flat.max() >= experts:
                refuse_id(int(flat.max()), experts)
            is_here = flat >= 0
            flat[~is_here] = experts
            order = numpy.argsort(flat, kind="stable")[: is_here.sum()]
            ends = numpy.searchsorted(flat[order], numpy.arange(experts), side="right").tolist()
            made = numpy.empty((len(order), down.shape[1]), x.dtype)
            run(x[order // each], ends, made)
            rows = numpy.zeros((len(flat), down.shape[1]), x.dtype)
            rows[order] = made
            shares = numpy.where(is_here, weights.reshape(-1), 0).astype(x.dtype).reshape(-1, 1, each)
            numpy.matmul(shares, rows.reshape(-1, each, down.shape[1]), out=out[:, None])

        return bound

    def _view(self, block: Block) -> Any:
        spec = block.spec
        return self.numpy.frombuffer(block.host, spec.dtype, spec.numel).reshape(spec.shape)

    def _runner(
        self, nodes: list[Any], dtype: Any, weights: Mapping[str, Any]
    ) -> Callable[[Any, list[int], Any], None]:
        """What computes y of x for each group, by its part of the weights; `ends`: the row after its last."""
        shapes = [(1, 1), *(array.shape[1:] for array in weights.values()), (1, 1)]
        session = self.session_of(nodes, [dtype.name] * len(shapes), shapes)
        binding = session.io_binding()

        def put(bind: Callable[..., None], name: str, array: Any, first: int, shape: tuple[int, ...]) -> None:
            bind(name, "cpu", 0, dtype, shape, array.ctypes.data + first * array.strides[0])

        def run(x: Any, ends: list[int], y: Any) -> None:
            for group, (start, end) in enumerate(itertools.pairwise((0, *ends))):
                if start < end:
                    put(binding.bind_input, "x", x, start, (end - start, *x.shape[1:]))
                    for name, array in weights.items():
                        put(binding.bind_input, name, array, group, array.shape[1:])
                    put(binding.bind_output, "y", y, start, (end - start, *y.shape[1:]))
                    session.run_with_iobinding(binding)

        return run
