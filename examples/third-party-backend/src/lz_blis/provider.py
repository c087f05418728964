"""BLIS: matrix products. Runs in an environment of its own, with blis, NumPy and the code of LayerZero's workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from layerzero.workers.provider import Block, Bound, Call, Loaded


def load() -> Loaded:
    import importlib.metadata

    import numpy
    from blis.py import gemm

    def view(block: Block) -> Any:
        """The caller's memory as an array: nothing is copied, and inputs are read-only."""
        return numpy.frombuffer(block.host, block.spec.dtype, math.prod(block.spec.shape)).reshape(block.spec.shape)

    def matmul(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        a, b, out = (view(block) for block in (*inputs, *outputs) if block is not None)
        batch = out.shape[:-2]
        lefts = numpy.broadcast_to(a, (*batch, *a.shape[-2:]))
        rights = numpy.broadcast_to(b, (*batch, *b.shape[-2:]))
        products = [(lefts[i], rights[i], out[i]) for i in numpy.ndindex(batch)]

        def bound() -> None:
            for left, right, product in products:
                gemm(left, right, out=product, beta=0.0)  # its default, 1.0, adds to what `out` held before

        return bound

    def linear(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        x, weight = (view(block) for block in inputs[:2] if block is not None)
        bias = None if inputs[2] is None else view(inputs[2])
        out = view(outputs[0])
        rows, results = x.reshape(-1, x.shape[-1]), out.reshape(-1, out.shape[-1])

        def bound() -> None:
            gemm(rows, weight, out=results, trans2=True, beta=0.0)
            if bias is not None:
                numpy.add(results, bias, out=results)

        return bound

    versions = {"blis": importlib.metadata.version("blis"), "numpy": numpy.__version__}
    return Loaded(versions=versions, kernels={"blis.matmul": matmul, "blis.linear": linear})
