"""CuPy: elementwise and norm kernels written here in CUDA C++, compiled by NVRTC, on dense tensors of any alignment,
and append_kv on any strides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from layerzero.workers.provider import Bind, Block, Bound, Call, Loaded

THREADS = 256  # of a block; norms use one block for each row

# Half types are kept as bits, because their headers do not come with every CuPy.
_TYPES = {
    "float32": "typedef float T; __device__ float get(T x) { return x; } __device__ T put(float x) { return x; }",
    "float16": """typedef unsigned short T;
__device__ float get(T x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
__device__ T put(float x) { T y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }""",
    "bfloat16": """typedef unsigned short T;
__device__ float get(T x) { return __uint_as_float((unsigned)x << 16); }
__device__ T put(float x) { T y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }""",
}
_KERNELS = r"""
#define EACH(name, formula)                                                                     \
    extern "C" __global__ void name(const T* in, T* out, long long count) {                     \
        long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;                         \
        if (i < count) { float x = get(in[i]); out[i] = put(formula); }                         \
    }
EACH(silu, x / (1.0f + expf(-x)))
EACH(gelu_none, 0.5f * x * erfcf(-x * 0.70710678118654752f))
EACH(gelu_tanh, 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x))))

extern "C" __global__ void swiglu(const T* gate, const T* up, T* out, long long count) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) { float x = get(gate[i]); out[i] = put(x / (1.0f + expf(-x)) * get(up[i])); }
}

__device__ float sum_of_block(float value) {
    __shared__ float sums[32];
    for (int lane = 16; lane; lane /= 2) value += __shfl_xor_sync(~0u, value, lane);
    __syncthreads();  // those of an earlier sum have been read
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0.0f;
    for (int lane = 16; lane; lane /= 2) value += __shfl_xor_sync(~0u, value, lane);
    return value;
}

extern "C" __global__ void norm_row(
    const T* x, const T* weight, const T* bias, T* out, long long columns, float eps, int centres, int has_weight,
    int has_bias
) {
    x += blockIdx.x * columns;
    out += blockIdx.x * columns;
    float mean = 0.0f;
    if (centres) {
        for (long long i = threadIdx.x; i < columns; i += blockDim.x) mean += get(x[i]);
        mean = sum_of_block(mean) / columns;
    }
    float squares = 0.0f;
    for (long long i = threadIdx.x; i < columns; i += blockDim.x) {
        float value = get(x[i]) - mean;
        squares += value * value;
    }
    float factor = 1.0f / sqrtf(sum_of_block(squares) / columns + eps);
    for (long long i = threadIdx.x; i < columns; i += blockDim.x) {
        float value = (get(x[i]) - mean) * factor;
        if (has_weight) value *= get(weight[i]);
        if (has_bias) value += get(bias[i]);
        out[i] = put(value);
    }
}
"""

# T is an element's bits, S a slot's type. Steps are in elements.
_APPEND = r"""
extern "C" __global__ void append_rows(
    const T* rows, T* cache, const S* slots, long long room, long long page, long long heads, long long dim,
    long long row_step, long long head_step, long long dim_step, long long block_step, long long place_step,
    long long cache_head_step, long long cache_dim_step, long long slot_step
) {
    long long slot = slots[blockIdx.x * slot_step];
    if (slot < 0 || slot >= room) return;
    rows += blockIdx.x * row_step;
    cache += slot / page * block_step + slot % page * place_step;
    for (long long i = threadIdx.x; i < heads * dim; i += blockDim.x) {
        long long h = i / dim, d = i % dim;
        cache[h * cache_head_step + d * cache_dim_step] = rows[h * head_step + d * dim_step];
    }
}
"""
_BITS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}


def load() -> Loaded:
    import cupy
    import numpy

    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as exc:
        raise RuntimeError(f"CuPy {cupy.__version__} has no CUDA device: {exc}") from exc
    if count == 0:
        raise RuntimeError(f"CuPy {cupy.__version__} has no CUDA device")

    @cache
    def kernel(name: str, dtype: str) -> Any:
        return module(dtype).get_function(name)

    @cache
    def module(dtype: str) -> Any:
        found = cupy.RawModule(code=_TYPES[dtype] + _KERNELS)
        found.compile()
        return found

    def pointer(block: Block) -> Any:
        return numpy.uint64(block.device.pointer)

    def elementwise(name: Callable[[Call], str]) -> Bind:
        def bind(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
            out = outputs[0]
            numel = out.spec.numel
            if numel == 0:
                return lambda: None
            tensors = [pointer(block) for block in (*inputs, out) if block is not None]
            run, arguments = kernel(name(call), out.spec.dtype), (*tensors, numpy.int64(numel))
            return lambda: run((-(-numel // THREADS),), (THREADS,), arguments)

        return bind

    def norm(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        x, weight, bias = (*inputs, None)[:3]
        assert x is not None
        spec = x.spec
        if spec.numel == 0:
            return lambda: None
        columns = math.prod(spec.shape[spec.ndim - call.attrs["ndim"] :])
        parameters = [pointer(x) if block is None else pointer(block) for block in (weight, bias)]
        flags = [numpy.int32(fact) for fact in (call.op == "layer_norm", weight is not None, bias is not None)]
        scalars = (numpy.int64(columns), numpy.float32(call.attrs["eps"]), *flags)
        run, arguments = kernel("norm_row", spec.dtype), (pointer(x), *parameters, pointer(outputs[0]), *scalars)
        return lambda: run((spec.numel // columns,), (THREADS,), arguments)

    @cache
    def append_rows(itemsize: int, slot: str) -> Any:
        types = f"typedef {_BITS[itemsize]} T; typedef {'int' if slot == 'int32' else 'long long'} S;"
        found = cupy.RawModule(code=types + _APPEND)
        found.compile()
        return found.get_function("append_rows")

    def append_kv(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        key, value, _, _, slots, *_ = inputs
        rows = key, value
        assert slots is not None
        calls = []
        for source, target in zip(rows, outputs, strict=True):
            assert source is not None
            (tokens, heads, dim), (blocks, page, *_) = source.spec.shape, target.spec.shape
            if not source.spec.numel or not target.spec.numel:
                continue
            extents = (blocks * page, page, heads, dim)
            numbers = (*extents, *source.spec.strides, *target.spec.strides, *slots.spec.strides)
            run = append_rows(source.spec.itemsize, slots.spec.dtype)
            arguments = (pointer(source), pointer(target), pointer(slots), *map(numpy.int64, numbers))
            calls.append((run, (tokens,), (THREADS,), arguments))

        def bound() -> None:
            for run, *given in calls:
                run(*given)

        return bound

    return Loaded(
        versions={"cupy": cupy.__version__, "numpy": numpy.__version__},
        kernels={
            "cupy.silu": elementwise(lambda call: "silu"),
            "cupy.gelu": elementwise(lambda call: f"gelu_{call.attrs['approximate']}"),
            "cupy.swiglu": elementwise(lambda call: "swiglu"),
            "cupy.rms_norm": norm,
            "cupy.layer_norm": norm,
            "cupy.append_kv": append_kv,
        },
        on_stream=cupy.cuda.ExternalStream,
    )
