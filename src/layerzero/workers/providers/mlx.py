"""MLX on the CPU. It copies inputs into its own memory and results out of it; needs no NumPy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, Literal

from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.provider import Block, Bound, Call, Loaded
from layerzero.workers.providers import (
    _mlx_activations,
    _mlx_attention,
    _mlx_elementwise,
    _mlx_experts,
    _mlx_losses,
    _mlx_quantized,
    _mlx_rotary,
    _mlx_sequences,
)
from layerzero.workers.providers._mlx_norms import ChannelNorms
from layerzero.workers.providers._mlx_sampling import Sampling
from layerzero.workers.providers._mlx_vision import Vision

# Buffers are moved as unsigned integers of the item size: memoryview knows no bfloat16, and casts no float16.
_FORMAT: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


def load() -> Loaded:
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    library = _Mlx(mx)
    builders: dict[str, Callable[..., Callable[..., Any]]] = {
        "attention": partial(_mlx_attention.attention, mx),
        "merge_attention": partial(_mlx_attention.merge_attention, mx),
        "layer_norm": library.layer_norm,
        "matmul": library.matmul,
        "addmm": library.addmm,
        "rms_norm": library.rms_norm,
        "add_rms_norm": library.add_rms_norm,
        "softmax": library.softmax,
        "log_softmax": library.log_softmax,
        **ChannelNorms(mx).builders(),
        **Sampling(mx).builders(),
        **Vision(mx).builders(),
        **_mlx_activations.builders(mx),
        **_mlx_elementwise.builders(mx),
        **_mlx_experts.builders(mx),
        **_mlx_losses.builders(mx),
        **_mlx_quantized.builders(mx),
        **_mlx_rotary.builders(mx),
    }

    def bind(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        readers = [None if block is None else library.reader(block) for block in inputs]
        compute = builders[call.op](call)
        writers = [library.writer(block) for block in outputs]

        def bound() -> None:
            found = compute(*[read and read() for read in readers])
            for write, result in zip(writers, found if len(writers) > 1 else (found,), strict=True):
                write(result)

        return bound

    kernels = {**dict.fromkeys(builders, bind), **_mlx_sequences.binds(library)}
    return Loaded(versions={"mlx": version("mlx")}, kernels={f"mlx.{name}": bind for name, bind in kernels.items()})


class _Mlx:
    """One method per op: `call -> compute(*arrays)`, which returns the lazy result in the inputs' dtype."""

    def __init__(self, mx: Any) -> None:
        self.mx = mx
        self.unsigned = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}

    def reader(self, block: Block) -> Callable[[], Any]:
        """A function that copies the block's present content into a new array."""
        mx, spec = self.mx, block.spec
        flat = block.host[: spec.span_bytes].cast(_FORMAT[spec.itemsize])
        dtype = mx.bool_ if spec.dtype == "bool" else getattr(mx, spec.dtype, mx.uint8)  # it has no 8-bit floats
        if spec.is_contiguous:
            return lambda: mx.array(flat).view(dtype).reshape(spec.shape)
        return lambda: mx.as_strided(mx.array(flat).view(dtype), spec.shape, spec.strides)

    def writer(self, block: Block) -> Callable[[Any], None]:
        """A function that evaluates an array and copies it to the block's strided view."""
        mx, spec = self.mx, block.spec
        order = sorted(range(spec.ndim), key=lambda d: -spec.strides[d])
        memory = block.host[: spec.span_bytes].cast(_FORMAT[spec.itemsize])
        runs = _runs(spec.permute(*order))
        unsigned = self.unsigned[spec.itemsize]

        def write(result: Any) -> None:
            dense = mx.contiguous(mx.transpose(result, order)).view(unsigned).reshape(-1)
            mx.eval(dense)
            source = memoryview(dense)
            for target, piece in runs:
                memory[target] = source[piece]

        return write

    def layer_norm(self, call: Call) -> Callable[..., Any]:
        rows, shape, eps = *_norm_shape(call), call.attrs["eps"]

        def compute(x: Any, weight: Any, bias: Any) -> Any:
            weight = None if weight is None else weight.reshape(-1)
            bias = None if bias is None else bias.reshape(-1)
            return self.mx.fast.layer_norm(x.reshape(rows), weight, bias, eps).reshape(shape)

        return compute

    def rms_norm(self, call: Call) -> Callable[..., Any]:
        rows, shape, eps = *_norm_shape(call), call.attrs["eps"]

        def compute(x: Any, weight: Any) -> Any:
            weight = None if weight is None else weight.reshape(-1)
            return self.mx.fast.rms_norm(x.reshape(rows), weight, eps).reshape(shape)

        return compute

    def add_rms_norm(self, call: Call) -> Callable[..., Any]:
        rms_norm = self.rms_norm(call)

        def compute(x: Any, residual: Any, weight: Any) -> Any:
            summed = x + residual
            return rms_norm(summed, weight), summed

        return compute

    def matmul(self, call: Call) -> Callable[..., Any]:
        return self.mx.matmul

    def addmm(self, call: Call) -> Callable[..., Any]:
        mx, beta, alpha = self.mx, call.attrs["beta"], call.attrs["alpha"]

        def compute(x: Any, a: Any, b: Any) -> Any:
            wide = [array.astype(mx.float32) for array in (x, a, b)]  # half precision loses digits in MLX's products
            if beta == 0.0:  # MLX would multiply what does not count
                return (alpha * mx.matmul(*wide[1:])).astype(x.dtype)
            return mx.addmm(*wide, alpha=alpha, beta=beta).astype(x.dtype)

        return compute

    def softmax(self, call: Call) -> Callable[..., Any]:
        dim, dtype = call.attrs["dim"], getattr(self.mx, call.outputs[0].dtype)
        return lambda x: self.mx.softmax(x.astype(dtype), axis=dim, precise=True)

    def log_softmax(self, call: Call) -> Callable[..., Any]:
        mx, dim = self.mx, call.attrs["dim"]
        dtype = getattr(mx, call.outputs[0].dtype)

        def compute(x: Any) -> Any:
            wide = x.astype(dtype).astype(mx.float32)
            wide = wide - mx.max(wide, axis=dim, keepdims=True)  # an infinite one becomes NaN, as it must
            return (wide - mx.log(mx.sum(mx.exp(wide), axis=dim, keepdims=True))).astype(dtype)

        return compute


def _norm_shape(call: Call) -> tuple[tuple[int, int], tuple[int, ...]]:
    """x as (rows, normalized elements), and x's own shape."""
    x = call.inputs[0]
    assert x is not None
    columns = math.prod(x.shape[x.ndim - call.attrs["ndim"] :])
    return (x.numel // columns, columns), x.shape


def _runs(spec: TensorSpec) -> list[tuple[slice, slice]]:
    """Slices (of the strided view, of its elements in row-major order) that together copy the whole tensor."""
    dims: list[tuple[int, int]] = []  # (extent, stride), with dimensions merged where one continues the next
    for extent, stride in zip(spec.shape, spec.strides, strict=True):
        if extent == 1:
            continue
        if dims and dims[-1][1] == extent * stride:
            dims[-1] = (dims[-1][0] * extent, stride)
        else:
            dims.append((extent, stride))
    if not dims:
        return [(slice(0, 1), slice(0, 1))]
    *outer, (length, step) = dims
    runs = []
    for index, position in enumerate(itertools.product(*(range(extent) for extent, _ in outer))):
        start = sum(p * stride for p, (_, stride) in zip(position, outer, strict=True))
        runs.append((slice(start, start + (length - 1) * step + 1, step), slice(index * length, (index + 1) * length)))
    return runs
