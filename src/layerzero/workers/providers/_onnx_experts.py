"""Products by groups: of each that has rows one by the session of a linear layer, on the caller's memory. Used by
onnxruntime.py. The runtime's own nodes for mixtures of experts, MoE and QMoE, have no kernel for CPUs (1.18.1)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from layerzero.workers.provider import Block, Bound, Call
from layerzero.workers.providers._experts import checked_offsets


def binder(numpy: Any, onnx: Any, session_of: Callable[..., Any]) -> Callable[..., Bound]:
    """A Bind of grouped_linear; `session_of` gives a session for nodes, dtypes and shapes."""

    def bind(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        x, weight, offsets, bias = inputs
        assert x is not None
        assert weight is not None
        assert offsets is not None
        (rows, k), n, dtype = x.spec.shape, weight.spec.shape[1], numpy.dtype(x.spec.dtype)
        blocks = {"x": x, "w": weight, **({} if bias is None else {"b": bias}), "y": outputs[0]}
        ranks = [(n,) if name == "b" else (n, n) for name in blocks]
        node = onnx.helper.make_node("Gemm", [name for name in blocks if name != "y"], ["y"], transB=1)
        session = session_of([node], [x.spec.dtype] * len(blocks), ranks)
        binding = session.io_binding()
        arrays = {name: numpy.frombuffer(block.host, numpy.uint8) for name, block in blocks.items()}
        places = {name: array.ctypes.data for name, array in arrays.items()}
        ends_of = numpy.frombuffer(offsets.host, offsets.spec.dtype, offsets.spec.numel)
        row_bytes, matrix_bytes = n * dtype.itemsize, n * k * dtype.itemsize

        def bound() -> None:
            ends = checked_offsets(ends_of.tolist(), rows)
            for group, (start, end) in enumerate(itertools.pairwise((0, *ends))):
                if start == end:
                    continue
                binding.bind_input("x", "cpu", 0, dtype, (end - start, k), places["x"] + start * k * dtype.itemsize)
                binding.bind_input("w", "cpu", 0, dtype, (n, k), places["w"] + group * matrix_bytes)
                if bias is not None:
                    binding.bind_input("b", "cpu", 0, dtype, (n,), places["b"] + group * row_bytes)
                binding.bind_output("y", "cpu", 0, dtype, (end - start, n), places["y"] + start * row_bytes)
                session.run_with_iobinding(binding)
            arrays["y"][ends[-1] * row_bytes : rows * row_bytes] = 0

        return bound

    return bind
