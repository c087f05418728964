"""Convolutions, pooling and interpolation: gradient formulas in plain torch, fake functions and batch rules, as
gradients.py, fakes.py and batching.py have them of others. `padding` has one number, one for each dimension, or those
before and then those after all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from layerzero.ipc.vocabulary import resampling, windows
from layerzero.torch.gradients import Call, Gradients, through

Dims = Sequence[int | None]
Pads = tuple[tuple[int, int], ...]
aten, ops = torch.ops.aten, torch.ops.layerzero
CONV_ARGUMENTS = (
    "Tensor input, Tensor weight, Tensor? bias=None, int[1] stride=1, int[1] padding=0, int[1] dilation=1, "
    "int groups=1, str? activation=None"
)
CONV_TRANSPOSE_ARGUMENTS = (
    "Tensor input, Tensor weight, Tensor? bias=None, int[1] stride=1, int[1] padding=0, int[1] output_padding=0, "
    "int groups=1, int[1] dilation=1, str? activation=None"
)


RESIZING = {
    "max_pool": ("kernel_size", "stride", "padding", "dilation", "ceil_mode"),
    "avg_pool": ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"),
    "adaptive_max_pool": ("output_size",),
    "adaptive_avg_pool": ("output_size",),
    "interpolate": ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias"),
}


def conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    *args: Any,
    **options: Any,
) -> Tensor:
    """What reaches a kernel."""
    made: Tensor = lz.conv(input, weight, bias, stride, paired(padding, weight.dim() - 2), *args, **options)
    return made


def conv_transpose(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    *args: Any,
    **options: Any,
) -> Tensor:
    """What reaches a kernel."""
    made: Tensor = lz.conv_transpose(input, weight, bias, stride, paired(padding, weight.dim() - 2), *args, **options)
    return made


def max_pool(
    input: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    *args: Any,
    **options: Any,
) -> Tensor:
    """What reaches a kernel."""
    made: Tensor = lz.max_pool(input, kernel_size, stride or None, paired(padding, input.dim() - 2), *args, **options)
    return made


def avg_pool(
    input: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    *args: Any,
    **options: Any,
) -> Tensor:
    """What reaches a kernel."""
    made: Tensor = lz.avg_pool(input, kernel_size, stride or None, paired(padding, input.dim() - 2), *args, **options)
    return made


def paired(padding: Sequence[int], dims: int) -> Sequence[Any]:
    """As lz.conv has it."""
    if len(padding) == 2 * dims and len(padding) > 1:
        return tuple(zip(padding[:dims], padding[dims:], strict=True))
    return padding


def traced(op: str, args: Sequence[Any], options: dict[str, Any]) -> list[Any]:
    """What the functions of lz were given beside tensors, in the order of the op of torch."""
    if op in RESIZING:
        for name, of in (("size", int), ("scale_factor", float)):
            if isinstance(options.get(name), of):
                options[name] = [options[name]]
        if isinstance(options.get("padding"), Sequence) and isinstance(options["padding"][0], Sequence):
            options["padding"] = [pad[side] for side in (0, 1) for pad in options["padding"]]
        if op in ("max_pool", "avg_pool"):
            options["stride"] = options["stride"] or []
        return [options.pop(name) for name in RESIZING[op]]
    weight = args[1]
    names: tuple[str, ...] = ("stride", "padding", "dilation", "groups", "activation")
    if op == "conv_transpose":
        names = ("stride", "padding", "output_padding", "groups", "dilation", "activation")
    options["padding"] = flattened(options["padding"], weight, options["stride"], options["dilation"])
    return [options.pop(name) for name in names]


def flattened(padding: Any, weight: Tensor, stride: Any, dilation: Any) -> Any:
    """What lz.conv takes, as the op of torch has it."""
    dims = weight.dim() - 2
    if isinstance(padding, str):
        if padding not in ("valid", "same") or (padding == "same" and any(n != 1 for n in _each(stride, dims))):
            raise lz.InvalidArgument(
                f"conv: padding is {padding!r} and stride {stride}; allowed: 'valid', or with a stride of 1 'same'; "
                "pass integers"
            )
        gaps = _each(dilation, dims) if padding == "same" else [0] * dims
        totals = [gap * (n - 1) for gap, n in zip(gaps, weight.shape[2:], strict=True)]
        return [total // 2 for total in totals] + [total - total // 2 for total in totals]
    if isinstance(padding, Sequence) and padding and isinstance(padding[0], Sequence):
        return [pad[side] for side in (0, 1) for pad in padding]
    return padding


def _each(numbers: Any, dims: int) -> list[Any]:
    given = list(numbers) if isinstance(numbers, Sequence) else [numbers]
    return given * dims if len(given) == 1 else given


def _pads(padding: Any, dims: int) -> Pads:
    if isinstance(padding, Sequence) and len(padding) == 2 * dims and len(padding) > 1:
        return tuple(zip(padding[:dims], padding[dims:], strict=True))
    return tuple((n, n) for n in _each(padding, dims))


# --- gradients


def conv_gradients(grad: Tensor, call: Call) -> Gradients:
    """torch's own; of an x that is padded unevenly those of the padded one. With an activation the convolution is
    computed anew: nobody has kept it."""
    x, weight = _wide(call["input"]), _wide(call["weight"])
    dims = weight.dim() - 2
    pads = _pads(call["padding"], dims)
    padding = [before if before == after else 0 for before, after in pads]
    more = [n for before, after in reversed(pads) for n in ((0, 0) if before == after else (before, after))]
    is_alone = x.dim() == dims + 1
    batch = torch.nn.functional.pad(x.unsqueeze(0) if is_alone else x, more)
    stride, dilation = (_each(call[name], dims) for name in ("stride", "dilation"))
    settings: tuple[Any, ...] = (stride, padding, dilation, False, [0] * dims, call["groups"])
    g = _wide(grad.unsqueeze(0) if is_alone else grad)
    if call["activation"] is not None:
        g = through(call["activation"], g, aten.convolution(batch, weight, _wide(call["bias"]), *settings))
    needs = [name in call.needs for name in ("input", "weight", "bias")]
    by_x, by_weight, by_bias = aten.convolution_backward(g, batch, weight, [weight.shape[0]], *settings, needs)
    if needs[0]:
        by_x = torch.nn.functional.pad(by_x, [-n for n in more])
        by_x = by_x.squeeze(0) if is_alone else by_x
    found = zip(("input", "weight", "bias"), (by_x, by_weight, by_bias), needs, strict=True)
    return {name: one.to(grad.dtype) for name, one, is_wanted in found if is_wanted}


def conv_transpose_gradients(grad: Tensor, call: Call) -> Gradients:
    """As conv_gradients. What is cut off unevenly has a gradient of 0."""
    x, weight = _wide(call["input"]), _wide(call["weight"])
    dims, groups = weight.dim() - 2, call["groups"]
    pads = _pads(call["padding"], dims)
    padding = [min(pad) for pad in pads]
    more = [n - min(pad) for pad in reversed(pads) for n in pad]
    is_alone = x.dim() == dims + 1
    batch = x.unsqueeze(0) if is_alone else x
    stride, dilation, out = (_each(call[name], dims) for name in ("stride", "dilation", "output_padding"))
    settings: tuple[Any, ...] = (stride, padding, dilation, True, out, groups)
    g = torch.nn.functional.pad(_wide(grad.unsqueeze(0) if is_alone else grad), more)
    if call["activation"] is not None:
        g = through(call["activation"], g, aten.convolution(batch, weight, _wide(call["bias"]), *settings))
    needs = [name in call.needs for name in ("input", "weight", "bias")]
    count = [weight.shape[1] * groups]
    by_x, by_weight, by_bias = aten.convolution_backward(g, batch, weight, count, *settings, needs)
    if needs[0] and is_alone:
        by_x = by_x.squeeze(0)
    found = zip(("input", "weight", "bias"), (by_x, by_weight, by_bias), needs, strict=True)
    return {name: one.to(grad.dtype) for name, one, is_wanted in found if is_wanted}


def _wide(tensor: Tensor | None) -> Any:
    return tensor if tensor is None or tensor.dtype == torch.float64 else tensor.float()


def max_pool_gradients(grad: Tensor, call: Call) -> Gradients:
    """The gradient at the first largest element of each window, which is looked for anew."""
    x = call["input"]
    dims = x.dim() - 2
    kernel, dilation = (_each(call[name], dims) for name in ("kernel_size", "dilation"))
    stride, pads = _each(call["stride"] or kernel, dims), _pads(call["padding"], dims)
    slid = zip(x.shape[2:], grad.shape[2:], kernel, stride, pads, dilation, strict=True)
    ends = [(one[4][0], one[4][1] + windows.beyond(*one)) for one in slid]
    padded = torch.nn.functional.pad(x, [n for pad in reversed(ends) for n in pad], value=-math.inf)
    pool = getattr(torch.nn.functional, f"max_pool{dims}d")
    _, places = pool(padded, kernel, stride, 0, dilation, False, return_indices=True)
    found = _scattered(grad, places, padded.shape)
    for dim, ((low, _), size) in enumerate(zip(ends, x.shape[2:], strict=True), 2):
        found = found.narrow(dim, low, size)
    return {"input": found}


def adaptive_max_pool_gradients(grad: Tensor, call: Call) -> Gradients:
    """As max_pool_gradients."""
    x = call["input"]
    pool = getattr(torch.nn.functional, f"adaptive_max_pool{x.dim() - 2}d")
    _, places = pool(x, grad.shape[2:], return_indices=True)
    return {"input": _scattered(grad, places, x.shape)}


def _scattered(grad: Tensor, places: Tensor, shape: Sequence[int]) -> Tensor:
    """`places`: in a channel."""
    zeros = _wide(grad.new_zeros((*shape[:2], math.prod(shape[2:]))))
    return zeros.scatter_add(2, places.flatten(2), _wide(grad.flatten(2))).to(grad.dtype).view(tuple(shape))


def avg_pool_gradients(grad: Tensor, call: Call) -> Gradients:
    """Each window's gradient over the number of its elements, at all of them: a transposed convolution by ones."""
    shape = call.shape["input"]
    dims = len(shape) - 2
    kernel, pads = _each(call["kernel_size"], dims), _pads(call["padding"], dims)
    stride, divisor = _each(call["stride"] or kernel, dims), call["divisor_override"]
    slid = list(zip(map(int, shape[2:]), map(int, grad.shape[2:]), kernel, stride, pads, strict=True))
    share = torch.full((), 1 / (divisor or 1), dtype=torch.float64, device=grad.device)
    for one in slid if not divisor else ():
        counts = windows.shares(*one, counts_padding=call["count_include_pad"])
        share = share.unsqueeze(-1) / torch.tensor(counts, dtype=torch.float64, device=grad.device)
    each = (_wide(grad) * share).to(_wide(grad).dtype).flatten(0, 1).unsqueeze(1)
    spread = getattr(torch.nn.functional, f"conv_transpose{dims}d")(each, each.new_ones((1, 1, *kernel)), None, stride)
    more = [
        n
        for (low, _), size, had in zip(pads, shape[2:], spread.shape[2:], strict=True)
        for n in (-low, size - had + low)
    ]
    ends = [n for dim in range(dims - 1, -1, -1) for n in more[2 * dim : 2 * dim + 2]]
    return {"input": torch.nn.functional.pad(spread, ends).reshape(shape).to(grad.dtype)}


def adaptive_avg_pool_gradients(grad: Tensor, call: Call) -> Gradients:
    """One dimension after the other: each window's gradient over the number of its elements, at all of them."""
    shape = call.shape["input"]
    found = _wide(grad)
    for dim, size in enumerate(map(int, shape[2:]), 2):
        ends = windows.adapted(size, int(grad.shape[dim]))
        rows = [[1 / (end - start) if start <= place < end else 0.0 for place in range(size)] for start, end in ends]
        found = _weighed(found, dim, rows)
    return {"input": found.to(grad.dtype)}


def interpolate_gradients(grad: Tensor, call: Call) -> Gradients:
    """One dimension after the other: each element's gradient by its weights, at the elements that it was made of."""
    shape, ours = call.shape["input"], resampling.INTERPOLATIONS[call["mode"]][0]
    found, scales = _wide(grad), call["scale_factor"]
    dims = len(shape) - 2
    factors = [None] * dims if not scales or call["recompute_scale_factor"] else _each(scales, dims)
    options = {"is_aligned": bool(call["align_corners"]), "is_smoothed": call["antialias"]}
    for dim, (size, scale) in enumerate(zip(map(int, shape[2:]), factors, strict=True), 2):
        taps = resampling.taps(size, int(grad.shape[dim]), scale, ours, **options)
        found = _weighed(found, dim, resampling.rows(taps, size))
    return {"input": found.to(grad.dtype)}


def _weighed(grad: Tensor, dim: int, rows: list[list[float]]) -> Tensor:
    """Through what each element of a dimension was a weighed sum of."""
    weights = torch.tensor(rows, dtype=grad.dtype, device=grad.device)
    return torch.matmul(grad.movedim(dim, -1), weights).movedim(-1, dim)


# --- fake functions


def pool_fake(op: str) -> Callable[..., Tensor]:
    """Of max_pool and avg_pool."""

    def fake(
        input: Tensor,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        *args: Any,
        **options: Any,
    ) -> Tensor:
        dims = _pooled(op, input)
        kernel = _each(kernel_size, dims)
        names = ("dilation", "ceil_mode") if op == "max_pool" else ("ceil_mode",)
        rest = {"dilation": 1, "ceil_mode": False, **dict(zip(names, args, strict=False)), **options}
        steps, pads = _each(stride or kernel, dims), _pads(padding, dims)
        slid = zip(input.shape[2:], kernel, steps, pads, _each(rest["dilation"], dims), strict=True)
        sizes = [windows.count(*one, is_ceiled=rest["ceil_mode"]) for one in slid]
        return input.new_empty((*input.shape[:2], *sizes))

    return fake


def adaptive_fake(op: str) -> Callable[..., Tensor]:
    """Of adaptive_max_pool and adaptive_avg_pool."""

    def fake(input: Tensor, output_size: Sequence[int], **_: Any) -> Tensor:
        return input.new_empty((*input.shape[:2], *_each(output_size, _pooled(op, input))))

    return fake


def interpolate_fake(
    input: Tensor, size: Sequence[int] | None = None, scale_factor: Sequence[float] | None = None, *_: Any, **__: Any
) -> Tensor:
    """(batch, channels, ...)."""
    dims = _pooled("interpolate", input)
    if (size is None) == (scale_factor is None):
        text = f"interpolate: size is {size}, scale_factor {scale_factor}; allowed: one of them; leave out the other"
        raise lz.InvalidArgument(text)
    if size is not None:
        return input.new_empty((*input.shape[:2], *_each(size, dims)))
    sizes = [torch.sym_int(n * factor) for n, factor in zip(input.shape[2:], _each(scale_factor, dims), strict=True)]
    return input.new_empty((*input.shape[:2], *sizes))


def _pooled(op: str, x: Tensor) -> int:
    if not 3 <= x.dim() <= 5:
        raise lz.InvalidArgument(
            f"{op}: input has shape {list(x.shape)}; allowed: (batch, channels, ...) of 3 to 5 dimensions; unsqueeze it"
        )
    return x.dim() - 2


def conv_fake(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """(batch, out_channels, ...)."""
    dims = _convolved("conv", input, weight, bias)
    sizes = [
        (size + sum(pad) - gap * (n - 1) - 1) // step + 1
        for size, n, step, pad, gap in zip(
            input.shape[input.dim() - dims :],
            weight.shape[2:],
            _each(stride, dims),
            _pads(padding, dims),
            _each(dilation, dims),
            strict=True,
        )
    ]
    return input.new_empty((*input.shape[: input.dim() - dims - 1], weight.shape[0], *sizes))


def conv_transpose_fake(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    dilation: Sequence[int] = (1,),
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """(batch, out_channels, ...)."""
    dims = _convolved("conv_transpose", input, weight, bias)
    sizes = [
        (size - 1) * step + gap * (n - 1) + 1 - sum(pad) + more
        for size, n, step, pad, gap, more in zip(
            input.shape[input.dim() - dims :],
            weight.shape[2:],
            _each(stride, dims),
            _pads(padding, dims),
            _each(dilation, dims),
            _each(output_padding, dims),
            strict=True,
        )
    ]
    return input.new_empty((*input.shape[: input.dim() - dims - 1], weight.shape[1] * groups, *sizes))


def _convolved(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> int:
    """How many dimensions the convolution has."""
    given = {"input": x, "weight": weight, **({} if bias is None else {"bias": bias})}
    names = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in given.items()}
    if len(set(names.values())) > 1:
        found = ", ".join(f"{name} is {dtype}" for name, dtype in names.items())
        raise lz.InvalidArgument(f"{op}: {found}; allowed: one dtype for all; convert them")
    dims = weight.dim() - 2
    if not 1 <= dims <= 3 or x.dim() not in (dims + 1, dims + 2):
        raise lz.InvalidArgument(
            f"{op}: input has {x.dim()} dimensions and weight {weight.dim()}; allowed: a weight of 3 to 5, and as many "
            "of input, or one less without a batch; reshape them"
        )
    return dims


# --- batch rules


def pool_batch(name: str) -> Callable[..., tuple[Tensor, int]]:
    """Samples are more of the batch."""

    def rule(info: Any, dims: Dims, input: Tensor, *args: Any, **options: Any) -> tuple[Tensor, int]:
        x = input.movedim(dims[0] or 0, 0)
        return getattr(ops, name)(x.flatten(0, 1), *args, **options).unflatten(0, x.shape[:2]), 0

    return rule


def conv_batch(
    info: Any, dims: Dims, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **options: Any
) -> tuple[Tensor, int]:
    """One weight for all: samples are more of the batch. A weight for each: their channels are more groups."""
    return _batch("conv", 3, info, (*dims, None), input, weight, bias, *args, **options)


def conv_transpose_batch(
    info: Any, dims: Dims, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **options: Any
) -> tuple[Tensor, int]:
    """As conv_batch."""
    return _batch("conv_transpose", 3, info, (*dims, None), input, weight, bias, *args, **options)


def _batch(
    name: str,
    at: int,
    info: Any,
    dims: Dims,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *args: Any,
    **options: Any,
) -> tuple[Tensor, int]:
    op, size = getattr(ops, name), info.batch_size
    x = input.expand(size, *input.shape) if dims[0] is None else input.movedim(dims[0], 0)
    spatial = weight.dim() - 2 - (dims[1] is not None)
    is_alone = x.dim() == spatial + 2
    if dims[1] is None and dims[2] is None:
        if is_alone:
            return op(x, weight, bias, *args, **options), 0
        return op(x.flatten(0, 1), weight, bias, *args, **options).unflatten(0, x.shape[:2]), 0
    w = weight.expand(size, *weight.shape) if dims[1] is None else weight.movedim(dims[1], 0)
    if bias is not None:
        bias = (bias.expand(size, *bias.shape) if dims[2] is None else bias.movedim(dims[2], 0)).flatten()
    # `at`: where groups is among what follows the tensors
    groups = args[at] if len(args) > at else options.pop("groups", 1)
    rest = [*args[:at], groups * size, *args[at + 1 :]] if len(args) > at else list(args)
    more = {} if len(args) > at else {"groups": groups * size}
    beside = x.flatten(0, 1).unsqueeze(0) if is_alone else x.transpose(0, 1).flatten(1, 2)
    result = op(beside, w.flatten(0, 1), bias, *rest, **more, **options).unflatten(1, (size, -1))
    return (result.squeeze(0), 0) if is_alone else (result, 1)


ADAPTIVE = [
    (name, adaptive_fake(name), formula, saves, pool_batch(name))
    for name, formula, saves in (
        ("adaptive_max_pool", adaptive_max_pool_gradients, ("input",)),
        ("adaptive_avg_pool", adaptive_avg_pool_gradients, ()),
    )
]
