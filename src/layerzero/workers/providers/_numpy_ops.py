"""What NumPy does with arrays of the caller's: numbers moved by indices, caches of keys and values among them, and the
gradients of norms. Used by numba.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerzero.ipc.errors import InvalidArgument
from layerzero.workers.provider import Bind, Block, Bound, Call
from layerzero.workers.providers._sequences import checked_slots

# What NumPy has no numbers of is moved as integers of its size.
_BITS = {"bfloat16": "uint16", **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2"), "uint8")}


def view(numpy: Any, block: Block) -> Any:
    """The caller's memory as an array, of any strides."""
    spec = block.spec
    strides = tuple(stride * spec.itemsize for stride in spec.strides)
    return numpy.ndarray(spec.shape, _BITS.get(spec.dtype, spec.dtype), block.host, strides=strides)


def reader(numpy: Any, block: Block) -> Callable[[], Any]:
    """What gives a tensor's floats, dense, in float32 or, where they are wider, in float64."""
    array, dtype = view(numpy, block), block.spec.dtype
    if dtype == "bfloat16":
        return lambda: (array.astype(numpy.uint32, order="C") << 16).view(numpy.float32)
    wide = numpy.float64 if dtype == "float64" else numpy.float32
    return lambda: array.astype(wide, order="C")


def writer(numpy: Any, block: Block) -> Callable[[Any], None]:
    """What stores floats in a tensor, rounded to its dtype; in any shape of as many."""
    array, shape = view(numpy, block), block.spec.shape

    def narrow(values: Any) -> None:
        bits = numpy.ascontiguousarray(values, numpy.float32).view(numpy.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        array[...] = numpy.where(numpy.isnan(values), 0x7FC0, rounded).astype(numpy.uint16).reshape(shape)

    def plain(values: Any) -> None:
        array[...] = values.reshape(shape)

    return narrow if block.spec.dtype == "bfloat16" else plain


def builders(numpy: Any) -> Mapping[str, Bind]:
    """By op."""
    made = _Moving(numpy)
    gradients = _NormGradients(numpy).bind
    return {
        "append_kv": made.append,
        "gather_kv": made.gather,
        "copy_kv_blocks": made.copy_blocks,
        "embedding": made.embedding,
        "layer_norm_backward": gradients,
        "rms_norm_backward": gradients,
    }


class _Moving:
    """Indices are copied before they are checked: the caller can write to its own while they are used."""

    def __init__(self, numpy: Any) -> None:
        self._numpy = numpy

    def append(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        key, value, _, _, slots, *_ = inputs
        *rows, slots = self._views(key, value, slots)
        caches = self._views(*outputs)
        blocks, page = caches[0].shape[:2]

        def bound() -> None:
            wanted = self._slots(call, slots, blocks, page)
            kept = wanted >= 0
            places = wanted[kept]
            for cache, given in zip(caches, rows, strict=True):
                cache[places // max(page, 1), places % max(page, 1)] = given[kept]

        return bound

    def gather(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        *caches, slots = self._views(*inputs[:3])
        targets = self._views(*outputs)
        blocks, page = caches[0].shape[:2]

        def bound() -> None:
            wanted = self._slots(call, slots, blocks, page)
            kept = wanted >= 0
            places = wanted[kept]
            for target, cache in zip(targets, caches, strict=True):
                target[kept] = cache[places // max(page, 1), places % max(page, 1)]
                target[~kept] = 0

        return bound

    def copy_blocks(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        sources, targets = self._views(*inputs[2:])
        caches = self._views(*outputs)
        blocks = caches[0].shape[0]

        def bound() -> None:
            origins, places = sources.copy(), targets.copy()
            for name, given in (("sources", origins), ("targets", places)):
                if (high := int(given.max(initial=-1))) >= blocks:
                    text = f"block {high} is outside [0, {blocks}), the blocks of the caches; check {name}"
                    raise InvalidArgument(f"copy_kv_blocks: {text}", block=high)
            kept = (origins >= 0) & (places >= 0) & (origins != places)
            origins, places = origins[kept], places[kept]
            both = places[self._numpy.isin(places, origins)].tolist()
            if both:
                text = f"block {both[0]} is the target of one pair and the source of another; allowed: one of both"
                raise InvalidArgument(
                    f"copy_kv_blocks: {text}, so that a call can be run again; copy in two calls", block=both[0]
                )
            for cache in caches:
                cache[places] = cache[origins]

        return bound

    def embedding(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        ids, weight = self._views(*inputs)
        (out,) = self._views(*outputs)
        rows = weight.shape[0]

        def bound() -> None:
            chosen = ids.copy()
            low, high = int(chosen.min(initial=0)), int(chosen.max(initial=-1))
            if low < 0 or high >= rows:
                bad = low if low < 0 else high
                raise InvalidArgument(
                    f"check the ids of embedding: {bad} is outside [0, {rows}), the rows of weight",
                    id=bad,
                    num_embeddings=rows,
                )
            out[...] = weight[chosen]

        return bound

    def _views(self, *blocks: Block | None) -> list[Any]:
        return [view(self._numpy, block) for block in blocks if block is not None]

    def _slots(self, call: Call, slots: Any, blocks: int, page: int) -> Any:
        wanted = slots.copy()
        checked_slots(call, [int(wanted.max(initial=-1))], blocks, page)
        return wanted


class _NormGradients:
    """With n what the norm multiplies by the weight, r what it multiplies x by, and g = grad_out * weight: by x
    r (g - n mean(g n) - mean(g)), the last mean of layer_norm alone; by weight the sums of grad_out * n over rows, by
    bias those of grad_out. In float32, or float64."""

    def __init__(self, numpy: Any) -> None:
        self._numpy = numpy

    def bind(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        numpy, is_centred = self._numpy, call.op == "layer_norm_backward"
        grad_out, x, weight = inputs
        assert grad_out is not None
        assert x is not None
        kept = x.spec.ndim - call.attrs["ndim"]
        width = math.prod(x.spec.shape[kept:])
        of_rows = [reader(numpy, block) for block in (grad_out, x)]
        read_weight = None if weight is None else reader(numpy, weight)
        writers = [writer(numpy, block) for block in outputs]
        eps = call.attrs["eps"]

        def bound() -> None:
            with numpy.errstate(all="ignore"):
                grad, rows = (read().reshape(-1, width) for read in of_rows)
                if is_centred:
                    rows = rows - rows.mean(-1, keepdims=True)
                r = 1 / numpy.sqrt((rows * rows).mean(-1, keepdims=True) + rows.dtype.type(eps))
                n = rows * r
                g = grad if read_weight is None else grad * read_weight().reshape(width)
                by_x = g - n * (g * n).mean(-1, keepdims=True)
                if is_centred:
                    by_x -= g.mean(-1, keepdims=True)
                found = r * by_x, (grad * n).sum(0), grad.sum(0)
                for write, values in zip(writers, found, strict=False):
                    write(values)

        def of_none() -> None:
            for write, block in zip(writers, outputs, strict=True):
                write(numpy.zeros(block.spec.numel, "float32"))

        return bound if x.spec.numel else of_none
