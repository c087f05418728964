"""Tensors by chance: extents, dtypes and ways to lie in memory."""

from __future__ import annotations

from random import Random

from layerzero.ipc.vocabulary.tensors import TensorSpec


def tensor(rng: Random, dtype: str, *shape: int) -> TensorSpec:
    """Dense, with rows apart, or transposed in memory."""
    dense = TensorSpec.contiguous(dtype, shape)
    way = rng.randrange(3)
    if way == 1 and len(shape) > 1:
        wide = TensorSpec.contiguous(dtype, (*shape[:-1], shape[-1] + 3))
        return TensorSpec(dtype, shape, wide.strides)
    if way == 2 and len(shape) > 1:
        order = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
        return TensorSpec.contiguous(dtype, tuple(shape[n] for n in order)).permute(*order)
    return dense


def float_dtype(rng: Random) -> str:
    return rng.choice(("float32", "float64", "float16", "bfloat16"))


def extents(rng: Random, count: int, least: int = 0) -> list[int]:
    return [rng.randint(least, 4) for _ in range(count)]
