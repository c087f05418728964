"""Numba: kernels of LayerZero's own (_numba_kernels.py), compiled for the processor and kept in NUMBA_CACHE_DIR, and
NumPy, which Numba needs anyway, for what it does as well. All of it reads and writes the caller's memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from typing import Any

from layerzero.ipc.vocabulary.ops import ACTIVATIONS, GATED
from layerzero.workers.provider import Bind, Block, Bound, Call, Loaded
from layerzero.workers.providers import _numba_kernels, _numpy_ops, _numpy_quantized

PARALLEL = 1 << 18  # elements from which on all cores take part: telling another thread costs 30 to 60 us
_BITS = {"bfloat16": "uint16"}  # NumPy has no such numbers


def load() -> Loaded:
    import numba
    import numpy

    library = _Numba(numba, numpy)
    library.warm_up()
    kernels: dict[str, Bind] = {
        **dict.fromkeys((*ACTIVATIONS, *GATED, "silu", "gelu", "swiglu"), library.elements),
        "softmax": library.softmax,
        "log_softmax": library.softmax,
        "layer_norm": library.norm,
        "rms_norm": library.norm,
        "add_rms_norm": library.add_rms_norm,
        "rope": library.rope,
        "rope_qk": library.rope_qk,
        **dict.fromkeys(("add", "mul", "where", "clamp", "cat", "cast"), library.of_numpy),
        **_numpy_ops.builders(numpy),
        **_numpy_quantized.builders(numpy),
    }
    versions = {"numba": numba.__version__, "numpy": numpy.__version__}
    return Loaded(versions=versions, kernels={f"numba.{op}": bind for op, bind in kernels.items()})


class _Numba:
    """A Bind for each kind of op. Those of _numba_kernels.py take dense memory."""

    def __init__(self, numba: Any, numpy: Any) -> None:
        self._numpy = numpy
        self._kinds = cache(partial(_numba_kernels.specialize, numba, numpy))
        self._cores = len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(max(self._cores - 1, 1), thread_name_prefix="numba")

    def warm_up(self) -> None:
        """What Numba does once, at the first kernel that it compiles or reads, takes half a second."""
        x = self._numpy.zeros(1, self._numpy.float32)
        given = x.view()
        given.flags.writeable = False
        self._kinds("float32")["relu"](given, x, 0, 1)

    def elements(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        approximate = call.attrs.get("approximate")
        kernel = self._kernel(call, f"{call.op}_{approximate}" if approximate else call.op)
        return self._split(kernel, self._flat(inputs, outputs), call.outputs[0].numel, 1)

    def softmax(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        shape, dim = call.outputs[0].shape, call.attrs["dim"]
        width, inner = shape[dim], math.prod(shape[dim + 1 :])
        arguments = (*self._flat(inputs, outputs), width, inner, int(call.op == "log_softmax"))
        return self._split(self._kernel(call, "softmax"), arguments, math.prod(shape[:dim]), width * inner)

    def norm(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        x, weight, bias = (*inputs, None)[:3]
        given = self._flat([x, weight or x, bias or x], outputs)
        flags = int(call.op == "layer_norm"), int(weight is not None), int(bias is not None)
        rows, width = _rows(call)
        return self._split(self._kernel(call, "norm"), (*given, width, call.attrs["eps"], *flags), rows, width)

    def add_rms_norm(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        x, residual, weight = inputs
        rows, width = _rows(call)
        given = self._flat([x, residual, weight or x], outputs)
        arguments = (*given, width, call.attrs["eps"], int(weight is not None))
        return self._split(self._kernel(call, "add_rms_norm"), arguments, rows, width)

    def rope(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        x, cos, sin = inputs
        assert x is not None
        assert cos is not None
        batch, length, heads, width = x.spec.shape
        half, places = cos.spec.shape[-1], math.prod(cos.spec.shape[:2])
        numbers = heads, width, half, max(places, 1), int(call.attrs["interleaved"])
        arguments = (*self._flat([x, cos, sin], outputs), *numbers)
        return self._split(self._kernel(call, "rope"), arguments, batch * length, heads * width)

    def rope_qk(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        q, k, *tables = inputs
        both = [self.rope(call, (x, *tables), (out,)) for x, out in zip((q, k), outputs, strict=True)]

        def bound() -> None:
            for each in both:
                each()

        return bound

    def of_numpy(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        """NumPy on views of any strides. Overflow is no news: integers wrap, floats become infinite."""
        numpy, attrs = self._numpy, call.attrs
        given = [_numpy_ops.view(numpy, block) for block in inputs if block is not None]
        out = _numpy_ops.view(numpy, outputs[0])
        run: Callable[[], Any]
        if call.op == "cast":
            run = partial(numpy.copyto, out, given[0], casting="unsafe")
        elif call.op == "cat":
            run = partial(numpy.concatenate, given, axis=attrs["dim"], out=out)
        elif call.op == "where":
            condition, one, other = given

            def choose() -> None:
                numpy.copyto(out, other)
                numpy.copyto(out, one, where=condition)

            run = choose
        elif call.op == "clamp":
            low, high = (None if attrs[end] is None else out.dtype.type(attrs[end]) for end in ("min", "max"))
            run = partial(numpy.clip, given[0], low, high, out=out)
        else:
            run = partial({"add": numpy.add, "mul": numpy.multiply}[call.op], *given, out=out)

        def bound() -> None:
            with numpy.errstate(all="ignore"):
                run()

        return bound

    def _kernel(self, call: Call, name: str) -> Callable[..., None]:
        found: Callable[..., None] = self._kinds(call.outputs[0].dtype)[name]
        return found

    def _flat(self, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> list[Any]:
        """Inputs as arrays that cannot be written, so that Numba has one type for them wherever they come from."""
        given = [self._dense(block) for block in inputs if block is not None]
        for array in given:
            array.flags.writeable = False
        return [*given, *map(self._dense, outputs)]

    def _dense(self, block: Block) -> Any:
        spec = block.spec
        return self._numpy.frombuffer(block.host, _BITS.get(spec.dtype, spec.dtype), spec.numel)

    def _split(self, kernel: Callable[..., None], arguments: Sequence[Any], count: int, size: int) -> Bound:
        """A kernel over `count` rows of `size` elements, by all cores where these are many."""
        if not count * size:
            return lambda: None
        cores = min(self._cores, count) if count * size >= PARALLEL else 1
        ends = [count * n // cores for n in range(cores + 1)]
        first, *others = [partial(kernel, *arguments, start, stop) for start, stop in pairwise(ends)]
        if not others:
            return first
        submit = self._pool.submit

        def bound() -> None:
            waiting = [submit(part) for part in others]
            first()
            for part in waiting:
                part.result()

        return bound


def _rows(call: Call) -> tuple[int, int]:
    """How many rows are normalized, and of how many elements."""
    shape = call.outputs[0].shape
    width = math.prod(shape[len(shape) - call.attrs["ndim"] :])
    return math.prod(shape) // width if width else 0, width
