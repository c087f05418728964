"""Weights of 4 bits as libraries store them, and as lz.scaled_linear takes them: rows of out_features, two numbers in a
byte, the first in its low bits. In NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from layerzero.ipc.errors import EnvError, InvalidArgument

if TYPE_CHECKING:
    from numpy.typing import NDArray

LAYOUTS = ("gptq", "gptq_v2", "awq", "int4")
# Of the nibbles of a 32-bit word of AWQ, from the low bits on: which of its 8 columns each is.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Packed(NamedTuple):
    """weight uint8 (N, K / 2), scale float32 and zero_point int32 (N, G), None of fp4; order int64 (K): which of the
    layer's inputs each column is for, None where they are in order."""

    weight: NDArray[Any]
    scale: NDArray[Any]
    zero_point: NDArray[Any] | None
    order: NDArray[Any] | None


def converted(layout: str, qweight: Any, scales: Any, qzeros: Any, g_idx: Any) -> Packed:
    """Of one of LAYOUTS. Raises InvalidArgument for tensors that do not belong together."""
    np = numpy_module()
    words, steps = array_of("qweight", qweight), array_of("scales", scales)
    points, groups = (
        None if one is None else array_of(name, one) for name, one in (("qzeros", qzeros), ("g_idx", g_idx))
    )
    _two_dimensions(qweight=words, scales=steps, qzeros=points)
    if steps.dtype.kind != "f":
        refuse(f"scales is {steps.dtype}", "floats", "pass the layer's scales")
    if layout == "int4":
        return _plain(words, steps, points, groups)
    if words.dtype != np.int32 or (points is not None and points.dtype != np.int32):
        refuse(f"qweight is {words.dtype}", "int32, and qzeros too", "pass the layer's own tensors, or view them so")
    if layout == "awq":
        if groups is not None:
            refuse("g_idx is given for layout 'awq'", "None", "leave it out")
        numbers = _columns(words, _AWQ_ORDER).T
    else:
        numbers = _columns(words.T, range(8))
    n, k = numbers.shape
    if steps.shape[1] != n or not steps.shape[0] or k % steps.shape[0] or k % 2:
        allowed = f"(groups of {k} in_features, {n} out_features)"
        refuse(f"scales has shape {list(steps.shape)}", allowed, "pass tensors of one layer, in its layout")
    zeros = np.full(steps.shape, 8, np.int32)
    if points is not None:
        if points.shape != (steps.shape[0], n // 8):
            refuse(f"qzeros has shape {list(points.shape)}", f"[{steps.shape[0]}, {n // 8}]", "pass those of the layer")
        zeros = _columns(points, _AWQ_ORDER if layout == "awq" else range(8)).astype(np.int32)
        zeros += layout == "gptq"  # which stores them less 1
    order = None if groups is None else _order(groups, k, len(steps))
    numbers = numbers if order is None else numbers[:, order]
    return Packed(
        np.ascontiguousarray(numbers[:, ::2] | numbers[:, 1::2] << 4),
        np.ascontiguousarray(steps.T.astype(np.float32)),
        np.ascontiguousarray(zeros.T),
        order,
    )


def _plain(weight: Any, steps: Any, points: Any, groups: Any) -> Packed:
    np = numpy_module()
    if weight.dtype != np.uint8 or groups is not None:
        found = "g_idx is given" if groups is not None else f"qweight is {weight.dtype}"
        refuse(f"{found} for layout 'int4'", "uint8 (out_features, in_features / 2), no g_idx", "name another layout")
    if len(steps) != len(weight) or not steps.shape[1] or 2 * weight.shape[1] % steps.shape[1]:
        allowed = f"({len(weight)}, groups of {2 * weight.shape[1]})"
        refuse(f"scales has shape {list(steps.shape)}", allowed, "pass one for each group of each row")
    if points is not None and (points.shape != steps.shape or points.dtype.kind not in "iu"):
        refuse(f"qzeros is {points.dtype}{list(points.shape)}", f"integers {list(steps.shape)}", "pass one for each")
    zeros = np.full(steps.shape, 8, np.int32) if points is None else points.astype(np.int32)
    return Packed(np.ascontiguousarray(weight), np.ascontiguousarray(steps.astype(np.float32)), zeros, None)


def _columns(words: Any, order: Any) -> Any:
    """The numbers of 32-bit words, eight columns for each: (rows, columns) to uint8 (rows, 8 * columns)."""
    np = numpy_module()
    found = np.empty((*words.shape, 8), np.uint8)
    for place, column in enumerate(order):
        found[..., column] = words >> 4 * place & 15
    return found.reshape(words.shape[0], -1)


def _order(groups: Any, k: int, count: int) -> Any:
    """The inputs by group (act-order); None where they lie so already."""
    np = numpy_module()
    if groups.shape != (k,) or groups.dtype.kind not in "iu":
        refuse(f"g_idx is {groups.dtype}{list(groups.shape)}", f"integers [{k}]", "pass the layer's")
    if not np.array_equal(np.bincount(np.clip(groups, -1, count) + 1, minlength=count + 2)[1:-1], [k // count] * count):
        refuse("g_idx has groups of unequal sizes", f"{k // count} of each of {count}", "pass the layer's")
    order = np.argsort(groups, kind="stable")
    return None if np.array_equal(order, np.arange(k)) else order


def _two_dimensions(**tensors: Any) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.ndim != 2:
            refuse(f"{name} has shape {list(tensor.shape)}", "two dimensions", "pass those of one layer")


def refuse(found: str, allowed: str, remedy: str) -> None:
    """Raises InvalidArgument."""
    raise InvalidArgument(f"pack_weight: {found}; allowed: {allowed}; {remedy}")


def array_of(name: str, given: Any) -> Any:
    """As NumPy has it; bfloat16 of torch as float32."""
    np = numpy_module()
    if type(given).__module__.partition(".")[0] == "torch":
        if given.device.type != "cpu":
            refuse(f"{name} is on {given.device}", "the CPU", "call .cpu()")
        given = given.detach()
        given = (given.float() if str(given.dtype) == "torch.bfloat16" else given).numpy()
    return np.asarray(given)


def numpy_module() -> Any:
    """NumPy. Raises EnvError where it is not installed."""
    try:
        import numpy
    except ImportError as exc:
        repair = "pip install 'layerzero-broker[demo]'"
        raise EnvError(
            "weights are packed with NumPy, which is not installed here", cause=str(exc), repair=repair
        ) from exc
    return numpy
