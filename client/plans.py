"""From the arguments of a public op to its canonical call: checks, views and output shapes. Pure; no memory is touched.

The rules and formulas are in docs/ops.md. Plans are remembered by their arguments: the functions run on every call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, NoReturn, TypeVar

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.tensors import FLOAT_DTYPES, MAX_NBYTES, MAX_NDIM, TensorSpec, contiguous_strides

Scalar = str | int | float | bool | None
Shape = tuple[int, ...]

LAYOUTS = ("BHSD", "BSHD")
CAUSAL_ALIGNMENTS = ("top_left", "bottom_right")
GELU_APPROXIMATIONS = ("none", "tanh")
INDEX_DTYPES = ("int32", "int64")
# torch.finfo(t).eps of the type t that torch computes in: float32 for the half types.
_RMS_EPS = {"float16": 2.0**-23, "bfloat16": 2.0**-23, "float32": 2.0**-23, "float64": 2.0**-52}
_BSHD_AXES = (0, 2, 1, 3)  # from BSHD to BHSD, and back
_REMEMBERED = 4096


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Plan:
    """One call in canonical form (ipc/ops.py). Compared and hashed by identity; equal arguments give the same plan
    while it is remembered.

    `inputs` are views of the arguments' memory: the first element is where the caller's is. A result lies
    row-major in fresh memory: `results` is the caller's view of it, `outputs` the worker's.
    """

    op: str
    inputs: tuple[TensorSpec | None, ...]
    attrs: dict[str, Scalar]
    outputs: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]


_F = TypeVar("_F", bound=Callable[..., Plan])


def _remember(plan: _F) -> _F:
    # typed: True, 1 and 1.0 are equal, but not all of them are allowed everywhere
    remembered = functools.lru_cache(maxsize=_REMEMBERED, typed=True)(plan)

    @functools.wraps(plan)
    def planned(*args: Any, **kwargs: Any) -> Plan:
        try:
            return remembered(*args, **kwargs)
        except TypeError:  # an argument that cannot be hashed, such as a list: the plan's own check names it
            return plan(*args, **kwargs)

    return planned  # type: ignore[return-value]


@_remember
def plan_attention(
    q: TensorSpec,
    k: TensorSpec,
    v: TensorSpec,
    attn_mask: TensorSpec | None = None,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: str = "BHSD",
    causal_alignment: str = "top_left",
) -> Plan:
    """torch.nn.functional.scaled_dot_product_attention, with the memory order and the causal rule named."""
    op = "attention"
    is_causal = _flag(op, "is_causal", is_causal)
    enable_gqa = _flag(op, "enable_gqa", enable_gqa)
    _choice(op, "layout", layout, LAYOUTS)
    _choice(op, "causal_alignment", causal_alignment, CAUSAL_ALIGNMENTS)
    if _number(op, "dropout_p", dropout_p) != 0.0:
        _refuse(op, f"dropout_p is {dropout_p}", "0.0, because kernels serve inference only", "drop it, or call torch")
    _same_float_dtype(op, q=q, k=k, v=v)
    q4, k4, v4 = (_bhsd(op, name, spec, layout) for name, spec in (("q", q), ("k", k), ("v", v)))
    if not q.ndim == k.ndim == v.ndim:
        _refuse(
            op,
            f"q, k and v have {q.ndim}, {k.ndim} and {v.ndim} dimensions",
            "the same number",
            "unsqueeze the smaller",
        )
    _attention_shapes(op, q4, k4, v4, enable_gqa=enable_gqa)

    batch, heads, seq_q, head_dim = q4.shape
    seq_k = k4.shape[2]
    if attn_mask is not None and is_causal:
        _refuse(op, "attn_mask and is_causal=True are both given", "one of them", "put the causal rule into the mask")
    mask4 = None if attn_mask is None else _mask(op, attn_mask, q, (batch, heads, seq_q, seq_k))
    attrs: dict[str, Scalar] = {
        "is_causal": is_causal,
        "scale": _attention_scale(op, scale, head_dim),
        # Without a mask to align, or with a square one, both rules say the same: one route serves them.
        "causal_alignment": causal_alignment if is_causal and seq_q != seq_k else "top_left",
        "layout": layout,
    }
    out_shape = (batch, heads, seq_q, v4.shape[3])
    if layout == "BSHD":
        result = _fresh(op, q.dtype, tuple(out_shape[axis] for axis in _BSHD_AXES))
        output = result.permute(*_BSHD_AXES)
    else:
        result = _fresh(op, q.dtype, out_shape[4 - q.ndim :])
        output = TensorSpec.contiguous(q.dtype, out_shape)
    return Plan(op, (q4, k4, v4, mask4), attrs, (output,), (result,))


def _bhsd(op: str, name: str, spec: TensorSpec, layout: str) -> TensorSpec:
    """The (batch, heads, sequence, head_dim) view of an argument with 2 to 4 dimensions."""
    dims = f"{name} has shape {list(spec.shape)}"
    if layout == "BSHD":
        if spec.ndim != 4:
            _refuse(op, dims, "(batch, sequence, heads, head_dim) with layout='BSHD'", "unsqueeze it to 4 dimensions")
        return spec.permute(*_BSHD_AXES)
    if spec.ndim < 2:
        _refuse(op, dims, "2 to 4 dimensions, the last two (sequence, head_dim)", "unsqueeze it")
    if spec.ndim > 4:
        _refuse(op, dims, "2 to 4 dimensions", f"flatten the leading ones: {name}.flatten(0, {spec.ndim - 4})")
    while spec.ndim < 4:
        spec = spec.unsqueeze(0)
    return spec


def _attention_shapes(op: str, q: TensorSpec, k: TensorSpec, v: TensorSpec, *, enable_gqa: bool) -> None:
    names = ("q batch", "k batch", "v batch")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        _refuse(
            op,
            _listed(names, (q.shape[0], k.shape[0], v.shape[0])),
            "equal batches",
            "expand the smaller; that copies nothing",
        )
    if k.shape[1] != v.shape[1]:
        _refuse(op, f"k has {k.shape[1]} heads and v {v.shape[1]}", "equal numbers", "expand the smaller")
    if k.shape[2] != v.shape[2]:
        _refuse(op, f"k has sequence length {k.shape[2]} and v {v.shape[2]}", "equal lengths", "check the layout")
    if q.shape[3] != k.shape[3]:
        _refuse(op, f"q has head_dim {q.shape[3]} and k {k.shape[3]}", "equal sizes", "check the layout")
    heads_q, heads_k = q.shape[1], k.shape[1]
    if heads_q == heads_k:
        return
    if not enable_gqa:
        _refuse(
            op, f"q has {heads_q} heads and k {heads_k}", "equal numbers", "pass enable_gqa=True to share key heads"
        )
    if heads_k == 0 or heads_q % heads_k:
        _refuse(op, f"q has {heads_q} heads and k {heads_k}", "a multiple of k's heads for q", "check the layout")


def _mask(op: str, mask: TensorSpec, q: TensorSpec, target: Shape) -> TensorSpec:
    """The mask with leading extents of 1 up to 4 dimensions; it broadcasts to (B, Hq, Sq, Sk) in either layout."""
    if mask.dtype not in ("bool", q.dtype):
        _refuse(op, f"attn_mask is {mask.dtype}", f"bool, or {q.dtype} like q", f"convert it to {q.dtype}")
    shape = f"attn_mask has shape {list(mask.shape)}"
    if mask.ndim > q.ndim:
        _refuse(op, shape, f"at most {q.ndim} dimensions, like q", "squeeze it")
    while mask.ndim < 4:
        mask = mask.unsqueeze(0)
    if any(given not in (1, wanted) for given, wanted in zip(mask.shape, target, strict=True)):
        _refuse(
            op, shape, f"shapes that broadcast to (batch, heads, queries, keys) = {list(target)}", "check its order"
        )
    return mask


def _attention_scale(op: str, scale: object, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0  # nothing to scale in a head of size 0
    return _finite(op, "scale", scale, "None for 1/sqrt(head_dim)")


@_remember
def plan_matmul(a: TensorSpec, b: TensorSpec) -> Plan:
    """torch.matmul, 1-D arguments included."""
    op = "matmul"
    _same_dtype(op, a=a, b=b)
    if a.dtype == "bool":
        _refuse(op, "a is bool", "numbers", "convert it to an integer or float dtype")
    if not a.ndim or not b.ndim:
        _refuse(op, f"a has {a.ndim} dimensions and b {b.ndim}", "at least 1 each", "multiply scalars with *")
    a2 = a.unsqueeze(0) if a.ndim == 1 else a
    b2 = b.unsqueeze(1) if b.ndim == 1 else b
    if a2.shape[-1] != b2.shape[-2]:
        _refuse(
            op,
            f"a has shape {list(a.shape)} and b {list(b.shape)}",
            f"a's last dimension ({a2.shape[-1]}) equal to b's {'second to last' if b.ndim > 1 else 'only'} "
            f"({b2.shape[-2]})",
            "transpose one of them",
        )
    batch = _broadcast(op, a2.shape[:-2], b2.shape[:-2])
    rows, columns = a2.shape[-2:-1], b2.shape[-1:]
    result = _fresh(op, a.dtype, batch + (rows if a.ndim > 1 else ()) + (columns if b.ndim > 1 else ()))
    return Plan(op, (a2, b2), {}, (TensorSpec.contiguous(a.dtype, batch + rows + columns),), (result,))


@_remember
def plan_linear(x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None = None) -> Plan:
    """torch.nn.functional.linear: x @ weight.T + bias."""
    op = "linear"
    _same_dtype(op, x=x, weight=weight, bias=bias)
    if x.dtype == "bool":
        _refuse(op, "x is bool", "numbers", "convert it to an integer or float dtype")
    if x.ndim == 0:
        _refuse(op, "x has no dimensions", "(..., in_features)", "unsqueeze it")
    if weight.ndim not in (1, 2):
        _refuse(
            op, f"weight has shape {list(weight.shape)}", "(out_features, in_features) or (in_features,)", "reshape it"
        )
    weight2 = weight.unsqueeze(0) if weight.ndim == 1 else weight
    if weight2.shape[1] != x.shape[-1]:
        _refuse(
            op,
            f"x has shape {list(x.shape)} and weight {list(weight.shape)}",
            f"{x.shape[-1]} in_features in both last dimensions",
            "pass the weight as (out_features, in_features)",
        )
    out_features = weight.shape[:-1]  # () for a vector
    if bias is not None and bias.shape != out_features:
        _refuse(op, f"bias has shape {list(bias.shape)}", f"{list(out_features)}, weight's out_features", "reshape it")
    if bias is not None and bias.ndim == 0:
        bias = bias.unsqueeze(0)
    x2 = x.unsqueeze(0) if x.ndim == 1 else x
    output = TensorSpec.contiguous(x.dtype, (*x2.shape[:-1], weight2.shape[0]))
    return Plan(op, (x2, weight2, bias), {}, (output,), (_fresh(op, x.dtype, x.shape[:-1] + out_features),))


@_remember
def plan_softmax(x: TensorSpec, dim: int) -> Plan:
    """torch.nn.functional.softmax; `dim` is required."""
    op = "softmax"
    _floating(op, "x", x)
    if isinstance(dim, bool) or not isinstance(dim, Integral):
        _refuse(op, f"dim is {dim!r}", "an integer", "pass dim=-1 for the last dimension")
    ndim = max(x.ndim, 1)  # a scalar counts as a vector of one
    if not -ndim <= dim < ndim:
        _refuse(op, f"dim is {dim} for shape {list(x.shape)}", f"{-ndim} to {ndim - 1}", "pass one of them")
    x1 = x if x.ndim else x.unsqueeze(0)
    output = TensorSpec.contiguous(x.dtype, x1.shape)
    return Plan(op, (x1,), {"dim": int(dim) % ndim}, (output,), (_fresh(op, x.dtype, x.shape),))


def plan_layer_norm(
    x: TensorSpec,
    normalized_shape: Sequence[int],
    weight: TensorSpec | None = None,
    bias: TensorSpec | None = None,
    eps: float = 1e-5,
) -> Plan:
    """torch.nn.functional.layer_norm."""
    return _plan_layer_norm(x, _extents("layer_norm", normalized_shape), weight, bias, eps)


@_remember
def _plan_layer_norm(
    x: TensorSpec, shape: Shape, weight: TensorSpec | None, bias: TensorSpec | None, eps: float
) -> Plan:
    op = "layer_norm"
    _same_float_dtype(op, x=x, weight=weight, bias=bias)
    ndim = _normalized(op, x, shape, weight=weight, bias=bias)
    attrs: dict[str, Scalar] = {"ndim": ndim, "eps": _epsilon(op, eps)}
    return _same_shape(op, (x, weight, bias), attrs)


def plan_rms_norm(
    x: TensorSpec,
    normalized_shape: Sequence[int],
    weight: TensorSpec | None = None,
    eps: float | None = None,
) -> Plan:
    """torch.nn.functional.rms_norm."""
    return _plan_rms_norm(x, _extents("rms_norm", normalized_shape), weight, eps)


@_remember
def _plan_rms_norm(x: TensorSpec, shape: Shape, weight: TensorSpec | None, eps: float | None) -> Plan:
    op = "rms_norm"
    _same_float_dtype(op, x=x, weight=weight)
    ndim = _normalized(op, x, shape, weight=weight)
    attrs: dict[str, Scalar] = {"ndim": ndim, "eps": _RMS_EPS[x.dtype] if eps is None else _epsilon(op, eps)}
    return _same_shape(op, (x, weight), attrs)


@_remember
def plan_gelu(x: TensorSpec, approximate: str = "none") -> Plan:
    """torch.nn.functional.gelu."""
    _floating("gelu", "x", x)
    _choice("gelu", "approximate", approximate, GELU_APPROXIMATIONS)
    return _same_shape("gelu", (x,), {"approximate": approximate})


@_remember
def plan_silu(x: TensorSpec) -> Plan:
    """torch.nn.functional.silu."""
    _floating("silu", "x", x)
    return _same_shape("silu", (x,), {})


@_remember
def plan_embedding(ids: TensorSpec, weight: TensorSpec) -> Plan:
    """torch.nn.functional.embedding without its training arguments."""
    op = "embedding"
    if ids.dtype not in INDEX_DTYPES:
        _refuse(op, f"ids is {ids.dtype}", " or ".join(INDEX_DTYPES), "convert it to int64")
    if weight.ndim != 2:
        _refuse(op, f"weight has shape {list(weight.shape)}", "(rows, features)", "reshape it to 2 dimensions")
    result = _fresh(op, weight.dtype, (*ids.shape, weight.shape[1]))
    return Plan(op, (ids, weight), {}, (result,), (result,))


@_remember
def plan_null() -> Plan:
    """An op without arguments and effect: measures dispatch."""
    return Plan("null", (), {}, (), ())


@functools.lru_cache(maxsize=_REMEMBERED)
def plan_out(plan: Plan, out: TensorSpec) -> Plan:
    """The plan that writes its one result into the caller's `out`, which may be strided but must not overlap itself."""
    if len(plan.results) != 1:
        raise InvalidArgument(f"{plan.op} has {len(plan.results)} results; out= is for ops with one")
    wanted = plan.results[0]
    if (out.dtype, out.shape) != (wanted.dtype, wanted.shape):
        _refuse(plan.op, f"out is {out}", str(wanted), "pass an out of this dtype and shape; it is never resized")
    if _may_overlap(out):
        _refuse(
            plan.op,
            f"out has shape {list(out.shape)} and strides {list(out.strides)}, so elements share memory",
            "one place per element",
            "pass a tensor that was not expanded",
        )
    output = plan.outputs[0]
    view = out.permute(*_BSHD_AXES) if plan.attrs.get("layout") == "BSHD" else _padded(out, output.shape)
    return replace(plan, outputs=(view,), results=(out,))


def _padded(spec: TensorSpec, shape: Shape) -> TensorSpec:
    """The view of `spec` in `shape`, which has the same extents and more of 1 among them."""
    kept = iter([s for n, s in zip(spec.shape, spec.strides, strict=True) if n != 1])
    plain = contiguous_strides(shape)  # of an extent of 1: any stride will do
    return TensorSpec(spec.dtype, shape, tuple(next(kept) if n != 1 else s for n, s in zip(shape, plain, strict=True)))


def _may_overlap(spec: TensorSpec) -> bool:
    """False when each dimension steps over all that lies below it; exact for slices and transposes of dense memory."""
    if spec.numel == 0:
        return False
    last = 0
    for stride, extent in sorted((s, n) for n, s in zip(spec.shape, spec.strides, strict=True) if n > 1):
        if stride <= last:
            return True
        last += (extent - 1) * stride
    return False


# --- checks


def _refuse(op: str, found: str, allowed: str, remedy: str) -> NoReturn:
    raise InvalidArgument(f"{op}: {found}; allowed: {allowed}; {remedy}")


def _listed(names: Iterable[str], values: Iterable[object]) -> str:
    return ", ".join(f"{name} is {value}" for name, value in zip(names, values, strict=True))


def _flag(op: str, name: str, value: object) -> bool:
    if not isinstance(value, bool) and type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        value = value.item()  # type: ignore[attr-defined]
    if not isinstance(value, bool):
        _refuse(op, f"{name} is {value!r}", "True or False", "pass a bool")
    return value


def _choice(op: str, name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        _refuse(op, f"{name} is {value!r}", " or ".join(map(repr, allowed)), "pass one of them")


def _number(op: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        _refuse(op, f"{name} is {value!r}", "a number", "pass a float")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _finite(op: str, name: str, value: object, otherwise: str) -> float:
    number = _number(op, name, value)
    if not math.isfinite(number):
        _refuse(op, f"{name} is {value!r}", "a finite number", f"pass one, or {otherwise}")
    return number


def _epsilon(op: str, value: object) -> float:
    eps = _finite(op, "eps", value, "leave it out")
    if eps < 0.0:
        _refuse(op, f"eps is {value!r}", "0.0 or more", "pass a small positive number such as 1e-5")
    return eps


def _floating(op: str, name: str, spec: TensorSpec) -> None:
    if spec.dtype not in FLOAT_DTYPES:
        _refuse(op, f"{name} is {spec.dtype}", ", ".join(sorted(FLOAT_DTYPES)), "convert it to float32")


def _same_dtype(op: str, **specs: TensorSpec | None) -> None:
    given = {name: spec.dtype for name, spec in specs.items() if spec is not None}
    first = next(iter(given))
    if any(dtype != given[first] for dtype in given.values()):
        _refuse(
            op,
            _listed(given, given.values()),
            "one dtype for all",
            f"convert them to {given[first]}, the dtype of {first}",
        )


def _same_float_dtype(op: str, **specs: TensorSpec | None) -> None:
    first, spec = next(iter(specs.items()))
    assert spec is not None
    _floating(op, first, spec)
    _same_dtype(op, **specs)


def _extents(op: str, shape: Any) -> Shape:
    if isinstance(shape, (str, bytes)) or not isinstance(shape, Sequence):
        _refuse(
            op, f"normalized_shape is {shape!r}", "a tuple of integers", "pass (n,) for the last dimension of size n"
        )
    return shape if type(shape) is tuple else tuple(shape)


def _normalized(op: str, x: TensorSpec, shape: Shape, **params: TensorSpec | None) -> int:
    """How many trailing dimensions `shape` covers, checked against x and the parameters."""
    ndim = len(shape)
    if ndim == 0 or x.shape[-ndim:] != shape:
        _refuse(
            op,
            f"normalized_shape is {list(shape)} and x has shape {list(x.shape)}",
            "one or more of x's last dimensions",
            f"pass {list(x.shape[-1:])} for the last one" if x.ndim else "unsqueeze x",
        )
    for name, spec in params.items():
        if spec is not None and spec.shape != shape:
            _refuse(op, f"{name} has shape {list(spec.shape)}", f"normalized_shape, {list(shape)}", "reshape it")
    return ndim


def _broadcast(op: str, a: Shape, b: Shape) -> Shape:
    """NumPy's and torch's rule for leading dimensions."""
    ndim = max(len(a), len(b))
    a, b = (1,) * (ndim - len(a)) + a, (1,) * (ndim - len(b)) + b
    if any(m != n and 1 not in (m, n) for m, n in zip(a, b, strict=True)):
        _refuse(op, f"leading dimensions {list(a)} and {list(b)}", "equal extents, or 1", "expand or index one of them")
    return tuple(n if m == 1 else m for m, n in zip(a, b, strict=True))


def _fresh(op: str, dtype: str, shape: Shape) -> TensorSpec:
    """Row-major memory for a result."""
    if len(shape) > MAX_NDIM:
        _refuse(op, f"the result has {len(shape)} dimensions", f"at most {MAX_NDIM}", "flatten some of them")
    spec = TensorSpec.contiguous(dtype, shape)
    if spec.span_bytes > MAX_NBYTES:  # broadcasting can ask for any size
        _refuse(op, f"the result {spec} has {spec.span_bytes} bytes", f"at most {MAX_NBYTES}", "split the call")
    return spec


def _same_shape(op: str, inputs: tuple[TensorSpec | None, ...], attrs: dict[str, Scalar]) -> Plan:
    x = inputs[0]
    assert x is not None
    result = _fresh(op, x.dtype, x.shape)
    return Plan(op, inputs, attrs, (result,), (result,))
