"""client/planning/plans.py against torch 2.13: same shapes, same refusals, and views that name the caller's own
elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerzero.client.planning import attention_plans, plans
from layerzero.client.planning.plans import Plan, plan_out
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec

torch = pytest.importorskip("torch")
F = torch.nn.functional
Tensor = torch.Tensor


def spec_of(tensor: Tensor | None) -> TensorSpec | None:
    if tensor is None:
        return None
    return TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride()))


def planned(op: str, *args: Any, **kwargs: Any) -> Plan:
    """plan_`op` with the specs of tensor arguments."""
    module = attention_plans if op.startswith("attention") else plans
    plan: Plan = getattr(module, f"plan_{op}")(*(spec_of(a) if isinstance(a, Tensor) else a for a in args), **kwargs)
    assert len(plan.inputs) == len(OPS[op].inputs)
    assert len(plan.outputs) == len(plan.results) == len(OPS[op].outputs)
    expected = tuple(name for name in OPS[op].attrs if name in plan.attrs or name not in OPS[op].options)
    assert tuple(plan.attrs) == expected
    assert not any(s is None and n not in OPS[op].optional for s, n in zip(plan.inputs, OPS[op].inputs, strict=True))
    return plan


def kernel(plan: Plan, args: Sequence[Tensor | None]) -> Tensor:
    """What a worker computes: it sees the canonical views and attributes and nothing else."""
    x = [None if s is None else t.as_strided(s.shape, s.strides, t.storage_offset())
         for t, s in zip_longest(args, plan.inputs)]  # fmt: skip
    a = plan.attrs
    match plan.op:
        case "attention":
            q, k, v, mask, *_ = x
            if a["is_causal"] and a["causal_alignment"] == "bottom_right":
                sq, sk = q.shape[2], k.shape[2]
                mask = torch.ones(sq, sk, dtype=torch.bool).tril(sk - sq)
            is_causal = a["is_causal"] and mask is None
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=a["scale"], enable_gqa=True)
        case "matmul":
            return torch.matmul(*x)
        case "linear":
            made = F.linear(*x)
            return _ACTIVATIONS[a["activation"]](made) if a["activation"] else made
        case "softmax":
            return F.softmax(x[0], a["dim"])
        case "layer_norm":
            return F.layer_norm(x[0], x[0].shape[-a["ndim"] :], x[1], x[2], a["eps"])
        case "rms_norm":
            return F.rms_norm(x[0], x[0].shape[-a["ndim"] :], x[1], a["eps"])
        case "gelu":
            return F.gelu(x[0], approximate=a["approximate"])
        case "silu":
            return F.silu(x[0])
        case "embedding":
            return F.embedding(*x)
    raise AssertionError(plan.op)


def run(plan: Plan, args: Sequence[Tensor | None], out: Tensor | None = None) -> Tensor:
    """The whole trip of a call: views in, kernel, views out of fresh memory or of the caller's `out`."""
    (output,), (result,) = plan.outputs, plan.results
    start = 0
    if out is None:
        assert result.is_contiguous
        out = torch.empty(max(result.numel, 1), dtype=getattr(torch, result.dtype))
    else:
        start = out.storage_offset()
    answer = kernel(plan, args)
    assert spec_of(answer).shape == output.shape
    out.as_strided(output.shape, output.strides, start).copy_(answer)
    return out.as_strided(result.shape, result.strides, start)


def spaced(*shape: int, dtype: Any = torch.float32) -> Tensor:
    """A strided tensor: every second element of reversed dimensions, with an offset."""
    torch.manual_seed(sum(shape) + len(shape))
    if not shape:
        return torch.randn(2)[1].to(dtype)
    whole = torch.randn([2 * n + 1 for n in reversed(shape)]).to(dtype)
    return whole[tuple(slice(1, None, 2) for _ in shape)].permute(*reversed(range(len(shape))))


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu,
}  # fmt: skip

# --- the whole trip, op by op

S = spaced
CALLS: dict[str, tuple[str, Callable[..., Tensor], tuple[Any, ...]]] = {
    **{
        f"matmul {len(a)}-D by {len(b)}-D {a} {b}": ("matmul", torch.matmul, (S(*a), S(*b)))
        for a, b in [
            ((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 4)), ((1, 3), (3, 1)), ((3,), (3, 1)), ((1, 3), (3,)),
            ((2, 3), (3, 4)), ((3,), (2, 3, 4)), ((5, 2, 3), (3,)), ((5, 2, 3), (3, 4)), ((2, 3), (5, 3, 4)),
            ((5, 1, 2, 3), (6, 3, 4)), ((1, 2, 3), (1, 3, 4)), ((0,), (0,)), ((2, 0), (0, 3)),
            ((0, 2, 3), (3, 4)), ((0, 2, 3), (1, 3, 4)),
        ]
    },
    **{
        f"linear {x} {w} {b}": ("linear", F.linear, (S(*x), S(*w), None if b is None else S(*b)))
        for x, w, b in [
            ((2, 3), (4, 3), None), ((2, 3), (4, 3), (4,)), ((3,), (4, 3), (4,)), ((2, 5, 3), (4, 3), (4,)),
            ((3,), (3,), None), ((2, 3), (3,), None), ((2, 5, 3), (3,), None), ((3,), (3,), ()),
            ((0, 3), (4, 3), (4,)), ((2, 0), (4, 0), (4,)), ((2, 3), (0, 3), (0,)),
        ]
    },
    **{
        f"linear and {name}": (
            "linear",
            lambda x, w, b, name: _ACTIVATIONS[name](F.linear(x, w, b)),
            (S(2, 3), S(4, 3), S(4), name),
        )
        for name in _ACTIVATIONS
    },
    **{
        f"softmax {x} {dim}": ("softmax", F.softmax, (S(*x), dim))
        for x, dim in [((2, 3), 0), ((2, 3), -1), ((2, 3, 4), -2), ((), 0), ((), -1), ((2, 0), 1), ((0, 3), 1)]
    },
    **{
        f"gelu {x} {how}": ("gelu", lambda x, how: F.gelu(x, approximate=how), (S(*x), how))
        for x, how in [((2, 3), "none"), ((2, 3), "tanh"), ((), "none"), ((0, 3), "none")]
    },
    **{f"silu {x}": ("silu", F.silu, (S(*x),)) for x in [(2, 3), (), (0, 3)]},
    **{
        f"layer_norm {x} {n} {w} {b}": (
            "layer_norm", F.layer_norm, (S(*x), n, S(*n) if w else None, S(*n) if b else None, 1e-3),
        )
        for x, n, w, b in [
            ((2, 3), (3,), True, True), ((2, 3), (3,), False, True), ((2, 3), (3,), True, False),
            ((2, 3), (2, 3), False, False), ((2, 3, 4), (3, 4), True, True), ((3,), (3,), True, True),
            ((0, 3), (3,), True, True), ((2, 0), (0,), True, True),
        ]
    },
    **{
        f"rms_norm {x} {n} {w} {eps}": ("rms_norm", F.rms_norm, (S(*x), n, S(*n) if w else None, eps))
        for x, n, w, eps in [
            ((2, 3), (3,), True, None), ((2, 3, 4), (3, 4), True, 1e-3), ((2, 3), [3], False, 0.1),
            ((0, 3), (3,), True, 1),
        ]
    },
    **{
        f"embedding {ids} {w} {dtype}": ("embedding", F.embedding, (torch.ones(ids, dtype=dtype), S(*w)))
        for ids, w, dtype in [
            ((2,), (5, 3), torch.int64), ((2, 3), (5, 3), torch.int32), ((), (5, 3), torch.int64),
            ((0,), (5, 3), torch.int64), ((2,), (5, 0), torch.int32),
        ]
    },
}  # fmt: skip


def tensors_in(op: str, args: Sequence[Any]) -> list[Tensor | None]:
    """The tensor arguments, None for those left out."""
    given = [a for a in args if a is None or isinstance(a, Tensor)]
    return (given + [None] * 4)[: len(OPS[op].inputs)]


@pytest.mark.parametrize("name", list(CALLS))
def test_a_call_gives_what_torch_gives(name: str) -> None:
    """Shapes and values of torch.nn.functional, through the canonical views; also into a strided out."""
    op, function, args = CALLS[name]
    plan = planned(op, *args)
    expected = function(*args)
    actual = run(plan, tensors_in(op, args))
    assert actual.shape == expected.shape
    same(actual, expected)
    out = spaced(*expected.shape)
    same(run(plan_out(plan, spec_of(out)), tensors_in(op, args), out), expected)
    same(out, expected)


def bottom_right(q: Tensor, k: Tensor) -> Tensor:
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(k.shape[-2] - q.shape[-2])


ATTENTION = {
    "4-D": ((2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 6), {}),
    "3-D": ((4, 3, 8), (4, 5, 8), (4, 5, 6), {}),
    "2-D": ((3, 8), (5, 8), (5, 6), {}),
    "causal": ((2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 6), {"is_causal": True}),
    "causal, square": ((2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 8), {"is_causal": True}),
    "causal, more queries": ((2, 4, 5, 8), (2, 4, 3, 8), (2, 4, 3, 8), {"is_causal": True}),
    "scale": ((2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 6), {"scale": 2}),
    "grouped heads": ((2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 6), {"enable_gqa": True}),
    "grouped heads, 3-D": ((4, 3, 8), (2, 5, 8), (2, 5, 6), {"enable_gqa": True}),
    "equal heads, enable_gqa": ((2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 6), {"enable_gqa": True}),
    "no keys": ((2, 4, 3, 8), (2, 4, 0, 8), (2, 4, 0, 6), {}),
    "no queries": ((2, 4, 0, 8), (2, 4, 5, 8), (2, 4, 5, 6), {}),
    "no batch": ((0, 4, 3, 8), (0, 4, 5, 8), (0, 4, 5, 6), {}),
    "head size 0": ((2, 4, 3, 0), (2, 4, 5, 0), (2, 4, 5, 6), {}),
}


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("case", list(ATTENTION))
def test_attention_gives_what_torch_gives_in_both_layouts(case: str, layout: str) -> None:
    """BSHD is a permuted view going in and coming out; nothing is transposed in memory."""
    *shapes, options = ATTENTION[case]
    q, k, v = (spaced(*shape) for shape in shapes)
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    if layout == "BSHD":
        if q.ndim != 4:
            with pytest.raises(InvalidArgument, match=r"allowed: \(batch, sequence, heads, head_dim\)"):
                planned("attention", q, k, v, layout=layout)
            return
        q, k, v, expected = (t.transpose(1, 2) for t in (q, k, v, expected))
    plan = planned("attention", q, k, v, None, layout=layout, **options)
    actual = run(plan, (q, k, v, None))
    assert actual.shape == expected.shape
    assert actual.is_contiguous()
    same(actual, expected)
    out = spaced(*expected.shape)
    same(run(plan_out(plan, spec_of(out)), (q, k, v, None), out), expected)


@pytest.mark.parametrize(
    "shape", [(), (5,), (1, 5), (3, 1), (3, 5), (4, 3, 5), (1, 3, 5), (2, 1, 3, 5), (1, 4, 1, 5), (1, 1, 1, 1)]
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_masks_broadcast_to_batch_heads_queries_keys(shape: tuple[int, ...], dtype: Any, layout: str) -> None:
    """In either layout, and with any number of dimensions up to 4."""
    q, k, v = spaced(2, 4, 3, 8), spaced(2, 4, 5, 8), spaced(2, 4, 5, 6)
    mask = spaced(*shape) > 0 if dtype == torch.bool else spaced(*shape)
    expected = F.scaled_dot_product_attention(q, k, v, mask.expand(2, 4, 3, 5))
    if layout == "BSHD":
        q, k, v, expected = (t.transpose(1, 2) for t in (q, k, v, expected))
    plan = planned("attention", q, k, v, mask, layout=layout)
    assert plan.inputs[3] is not None
    assert plan.inputs[3].shape == (1,) * (4 - len(shape)) + shape
    same(run(plan, (q, k, v, mask)), expected)


@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (5, 3), (4, 4)])
def test_bottom_right_alignment_lets_the_last_query_see_all_keys(queries: int, keys: int) -> None:
    """The rule of flash-attn and of decoding with a cache; rows that see nothing are 0."""
    q, k, v = spaced(2, 4, queries, 8), spaced(2, 4, keys, 8), spaced(2, 4, keys, 8)
    plan = planned("attention", q, k, v, is_causal=True, causal_alignment="bottom_right")
    expected = F.scaled_dot_product_attention(q, k, v, bottom_right(q, k))
    same(run(plan, (q, k, v, None)), expected)
    assert plan.attrs["causal_alignment"] == ("top_left" if queries == keys else "bottom_right")


def test_alignment_is_canonical_where_it_means_nothing() -> None:
    """Calls that mean the same must share one route."""
    q = TensorSpec.contiguous("float32", (1, 2, 3, 4))
    plan = attention_plans.plan_attention(q, q, q, is_causal=False, causal_alignment="bottom_right")
    assert plan.attrs == {"is_causal": False, "scale": 0.5, "causal_alignment": "top_left", "layout": "BHSD"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_rms_norm_without_eps_uses_the_one_of_torch(dtype: str) -> None:
    """torch takes the epsilon of the dtype it computes in: float32 for halves, not the halves' own."""
    eps = planned("rms_norm", torch.ones(1, 4, dtype=getattr(torch, dtype)), (4,)).attrs["eps"]
    assert eps == torch.finfo(torch.float64 if dtype == "float64" else torch.float32).eps
    x = torch.full((1, 4), 1e-3, dtype=getattr(torch, dtype))
    assert torch.equal(F.rms_norm(x, (4,)), F.rms_norm(x, (4,), eps=eps))


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=3),
    st.lists(st.integers(0, 3), max_size=3),
    st.lists(st.integers(0, 3), min_size=1, max_size=2),
    st.lists(st.integers(0, 3), min_size=1, max_size=2),
)
def test_matmul_accepts_exactly_the_shapes_of_numpy(
    a_batch: list[int], b_batch: list[int], a_core: list[int], b_core: list[int]
) -> None:
    """NumPy and torch share these rules; any other shape must be refused before a kernel sees it."""
    a, b = (*a_batch, *a_core), (*b_batch, *b_core)
    specs = TensorSpec.contiguous("float32", a), TensorSpec.contiguous("float32", b)
    try:
        expected = np.matmul(np.zeros(a, np.float32), np.zeros(b, np.float32)).shape
    except ValueError:
        with pytest.raises(InvalidArgument):
            plans.plan_matmul(*specs)
    else:
        assert plans.plan_matmul(*specs).results == (TensorSpec.contiguous("float32", expected),)


@st.composite
def strided(draw: st.DrawFn, *, min_ndim: int, max_ndim: int) -> np.ndarray:
    """A view of distinct numbers with arbitrary order, steps and broadcast dimensions."""
    base = np.arange(400, dtype=np.float32)
    shape = draw(st.lists(st.integers(1, 3), min_size=min_ndim, max_size=max_ndim))
    strides = draw(st.lists(st.integers(0, 20), min_size=len(shape), max_size=len(shape)))
    return np.lib.stride_tricks.as_strided(base, shape, [4 * s for s in strides])


def np_view(data: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """The elements that `spec` names, counted from the first element of `data`."""
    return np.lib.stride_tricks.as_strided(data, spec.shape, [s * spec.itemsize for s in spec.strides])


def np_spec(data: np.ndarray) -> TensorSpec:
    return TensorSpec(data.dtype.name, data.shape, tuple(s // data.itemsize for s in data.strides))


@given(strided(min_ndim=4, max_ndim=4))
def test_bshd_views_address_the_elements_of_a_transpose(data: np.ndarray) -> None:
    """Whatever the strides, the worker's (batch, heads, ...) view is NumPy's own transpose."""
    plan = attention_plans.plan_attention(np_spec(data), np_spec(data), np_spec(data), layout="BSHD")
    for view in plan.inputs[:3]:
        assert view is not None
        np.testing.assert_array_equal(np_view(data, view), data.transpose(0, 2, 1, 3))


@given(strided(min_ndim=2, max_ndim=3))
def test_padded_views_address_the_same_elements(data: np.ndarray) -> None:
    """2-D and 3-D attention gets leading extents of 1 and nothing else."""
    view = attention_plans.plan_attention(np_spec(data), np_spec(data), np_spec(data)).inputs[0]
    assert view is not None
    np.testing.assert_array_equal(np_view(data, view), data[(None,) * (4 - data.ndim)])


@given(strided(min_ndim=1, max_ndim=4))
def test_an_out_with_shared_elements_is_refused(data: np.ndarray) -> None:
    """Two results in one place: the later would overwrite the earlier. Disjoint strides are never refused for
    slices and transposes of dense memory."""
    spec = np_spec(data)
    plan = plans.plan_silu(TensorSpec.contiguous("float32", spec.shape))
    is_shared = len(np.unique(data)) < data.size
    try:
        plan_out(plan, spec)
    except InvalidArgument:
        is_refused = True
    else:
        is_refused = False
    assert is_refused if is_shared else (not is_refused or not is_nested(spec))


def is_nested(spec: TensorSpec) -> bool:
    """Each stride is a multiple of the span below it, as in slices and transposes of dense memory."""
    dims = sorted((s, n) for n, s in zip(spec.shape, spec.strides, strict=True) if n > 1)
    return all(s >= low_s * low_n for (low_s, low_n), (s, _) in pairwise(dims))


@pytest.mark.parametrize(
    ("out", "says"),
    [
        (TensorSpec.contiguous("float16", (2, 3)), r"out is float16\[2, 3\]; allowed: float32\[2, 3\]"),
        (TensorSpec.contiguous("float32", (3, 2)), r"out is float32\[3, 2\]"),
        (TensorSpec.contiguous("float32", (1, 2, 3)), "never resized"),
        (TensorSpec("float32", (2, 3), (0, 1)), "elements share memory"),
    ],
)
def test_an_unfit_out_is_refused(out: TensorSpec, says: str) -> None:
    """torch resizes such an out and writes outside of it."""
    with pytest.raises(InvalidArgument, match=says):
        plan_out(plans.plan_silu(TensorSpec.contiguous("float32", (2, 3))), out)


def test_out_needs_a_result() -> None:
    """The null op has none."""
    with pytest.raises(InvalidArgument, match="null has 0 results"):
        plan_out(plans.plan_null(), TensorSpec.contiguous("float32", ()))


# --- refusals


def t(*shape: int, dtype: Any = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def sdpa(*args: Any, **kwargs: Any) -> Tensor:
    return F.scaled_dot_product_attention(*args, **kwargs)


FUNCTIONS = {"attention": sdpa, "matmul": torch.matmul, "gelu": lambda x, how: F.gelu(x, approximate=how)}
Q = t(1, 4, 3, 8)
V = t(1, 4, 3, 7)  # with unequal head sizes torch takes the path that checks; its fused CPU kernel lets more pass

REFUSED_BY_TORCH_TOO = [
    ("attention", (t(8), t(8), t(8)), {}, r"q has shape \[8\]; allowed: 2 to 4 dimensions"),
    ("attention", (Q, Q.half(), Q), {}, "q is float32, k is float16, v is float32; allowed: one dtype"),
    ("attention", (Q.int(), Q.int(), Q.int()), {}, "q is int32; allowed: bfloat16, float16"),
    ("attention", (Q, t(1, 4, 5, 8), t(1, 4, 6, 7)), {}, "k has sequence length 5 and v 6"),
    ("attention", (Q, t(1, 4, 5, 7), t(1, 4, 5, 8)), {}, "q has head_dim 8 and k 7"),
    ("attention", (Q, t(1, 2, 5, 8), t(1, 2, 5, 8)), {}, "q has 4 heads and k 2; .* pass enable_gqa=True"),
    (
        "attention",
        (Q, t(1, 3, 5, 8), t(1, 3, 5, 8)),
        {"enable_gqa": True},
        "q has 4 heads and k 3; allowed: a multiple",
    ),
    ("attention", (t(3, 4, 3, 8), t(2, 4, 5, 8), t(2, 4, 5, 8)), {}, "q batch is 3, k batch is 2"),
    ("attention", (Q, Q, Q, t(3, 4, dtype=torch.bool)), {}, r"attn_mask has shape \[3, 4\]; .* = \[1, 4, 3, 3\]"),
    ("attention", (Q, Q, Q, t(2, 4, 3, 3)), {}, r"attn_mask has shape \[2, 4, 3, 3\]"),
    ("attention", (Q, Q, Q, t(2, 1, 1, 3, 3)), {}, "at most 4 dimensions, like q"),
    ("attention", (Q[0], Q[0], Q[0], t(1, 4, 3, 3)), {}, "at most 3 dimensions, like q"),
    (
        "attention",
        (Q, Q, Q, t(3, 3, dtype=torch.float64)),
        {},
        "attn_mask is float64; allowed: bool, or float32 like q",
    ),
    ("attention", (Q, Q, Q, t(3, 3, dtype=torch.int32)), {}, "attn_mask is int32"),
    ("attention", (Q, Q, Q), {"dropout_p": 1.5}, "dropout_p is 1.5"),
    ("attention", (Q, Q, Q), {"scale": "1"}, "scale is '1'; allowed: a number"),
    ("attention", (Q, Q, Q), {"is_causal": None}, "is_causal is None; allowed: True or False"),
    ("matmul", (t(3), t(4)), {}, r"a's last dimension \(3\) equal to b's only \(4\)"),
    ("matmul", (t(2, 3), t(4, 3)), {}, r"equal to b's second to last \(4\)"),
    ("matmul", (t(), t(3)), {}, "a has 0 dimensions and b 1; allowed: at least 1 each"),
    ("matmul", (t(5, 2, 3), t(6, 3, 4)), {}, r"leading dimensions \[5\] and \[6\]"),
    ("matmul", (t(2, 3), t(3, 4).half()), {}, "a is float32, b is float16"),
    ("matmul", (t(2, 3).bool(), t(3, 4).bool()), {}, "a is bool; allowed: numbers"),
    ("linear", (t(2, 3), t(4, 5)), {}, "allowed: 3 in_features"),
    ("linear", (t(), t(4, 3)), {}, "x has no dimensions"),
    ("linear", (t(2, 3), t(2, 4, 3)), {}, r"weight has shape \[2, 4, 3\]"),
    ("linear", (t(2, 3), t(4, 3), t(3)), {}, r"bias has shape \[3\]; allowed: \[4\]"),
    ("linear", (t(2, 3), t(4, 3), t(4).half()), {}, "bias is float16"),
    ("linear", (t(2, 3), t(4, 3), None, "tanh"), {}, "activation is 'tanh'; allowed: 'relu' or 'gelu' or 'gelu_tanh'"),
    ("linear", (t(2, 3).int(), t(4, 3).int(), None, "relu"), {}, "x is int32"),
    ("softmax", (t(2, 3), 2), {}, r"dim is 2 for shape \[2, 3\]; allowed: -2 to 1"),
    ("softmax", (t(2, 3), -3), {}, "dim is -3"),
    ("softmax", (t(), 1), {}, "allowed: -1 to 0"),
    ("softmax", (t(2, 3), True), {}, "dim is True; allowed: an integer"),
    ("softmax", (t(2, 3), 1.0), {}, r"dim is 1\.0"),
    ("softmax", (t(2, 3), [1]), {}, r"dim is \[1\]"),
    ("softmax", (t(3).int(), 0), {}, "x is int32"),
    ("softmax", (t(2, 3), 0), {"dtype": "int8"}, "dtype is .int8.; allowed: .bfloat16. or .float16. or"),
    ("log_softmax", (t(2, 3), 0), {"dtype": 1}, "dtype is 1"),
    ("gelu", (t(3), "erf"), {}, "approximate is 'erf'; allowed: 'none' or 'tanh'"),
    ("gelu", (t(3).int(), "none"), {}, "x is int32"),
    ("silu", (t(3).bool(),), {}, "x is bool"),
    ("layer_norm", (t(2, 3), 3), {}, "normalized_shape is 3; allowed: a tuple of integers"),
    ("layer_norm", (t(2, 3), ()), {}, r"normalized_shape is \[\] .* pass \[3\]"),
    ("layer_norm", (t(2, 3), (2,)), {}, r"normalized_shape is \[2\] and x has shape \[2, 3\]"),
    ("layer_norm", (t(2, 3), (1, 2, 3)), {}, "normalized_shape is"),
    ("layer_norm", (t(2, 3, 4), (3, 4), t(12)), {}, r"weight has shape \[12\]; allowed: normalized_shape, \[3, 4\]"),
    ("layer_norm", (t(2, 3), (3,), None, t(2)), {}, r"bias has shape \[2\]"),
    ("layer_norm", (t(2, 3), (3,), t(3).double()), {}, "x is float32, weight is float64"),
    ("layer_norm", (t(2, 3).int(), (3,)), {}, "x is int32"),
    ("rms_norm", (t(), ()), {}, "normalized_shape is"),
    ("rms_norm", (t(2, 3), (3,), t(2)), {}, r"weight has shape \[2\]"),
    ("rms_norm", (t(2, 3).int(), (3,)), {}, "x is int32"),
    ("embedding", (t(2), t(5, 3)), {}, "ids is float32; allowed: int32 or int64"),
    ("embedding", (t(2, dtype=torch.int16), t(5, 3)), {}, "ids is int16"),
    ("embedding", (t(2, dtype=torch.int64), t(5)), {}, r"weight has shape \[5\]"),
    ("embedding", (t(2, dtype=torch.int64), t(5, 3, 2)), {}, r"weight has shape \[5, 3, 2\]"),
]


@pytest.mark.parametrize(("op", "args", "options", "says"), REFUSED_BY_TORCH_TOO)
def test_what_torch_refuses_is_refused(op: str, args: tuple[Any, ...], options: dict[str, Any], says: str) -> None:
    """No backend could serve it, so it must not reach one."""
    function = FUNCTIONS.get(op) or getattr(F, op)
    with pytest.raises((RuntimeError, TypeError, IndexError, NotImplementedError)):
        function(*args, **options)
    with pytest.raises(InvalidArgument, match=says):
        planned(op, *args, **options)


@pytest.mark.parametrize(
    ("op", "args", "options", "says"),
    [
        ("attention", (t(2, 1, 4, 3, 8),) * 3, {}, r"q has shape \[2, 1, 4, 3, 8\]; .* q.flatten\(0, 1\)"),
        (
            "attention",
            (t(2, 4, 3, 8), t(1, 4, 3, 8), t(1, 4, 3, 8)),
            {},
            "q batch is 2, k batch is 1.*expand the smaller",
        ),
        ("attention", (Q, t(1, 1, 3, 8), t(1, 1, 3, 8)), {}, "pass enable_gqa=True"),
        ("attention", (Q, t(1, 2, 3, 8), t(1, 1, 3, 8)), {"enable_gqa": True}, "k has 2 heads and v 1"),
        ("attention", (Q[0], Q, Q), {}, "q, k and v have 3, 4 and 4 dimensions"),
        ("attention", (Q.half(), Q.half(), Q.half(), t(3, 3)), {}, "attn_mask is float32; allowed: bool, or float16"),
        (
            "attention",
            (Q, Q, Q),
            {"dropout_p": 0.5},
            r"dropout_p is 0\.5; allowed: 0\.0, because kernels draw no random numbers",
        ),
        ("attention", (Q, Q, Q), {"scale": math.nan}, "scale is nan; allowed: a finite number"),
        ("attention", (Q, Q, Q), {"scale": 10**400}, "allowed: a finite number"),
        ("attention", (Q, Q, Q), {"layout": "SBHD"}, "layout is 'SBHD'; allowed: 'BHSD' or 'BSHD'"),
        ("attention", (Q, Q, Q), {"causal_alignment": "left"}, "causal_alignment is 'left'"),
        ("linear", (t(2, 3), t(4, 3), t(1)), {}, r"bias has shape \[1\]; allowed: \[4\]"),
        ("linear", (t(2, 3), t(4, 3), t(2, 4)), {}, r"bias has shape \[2, 4\]"),
        ("softmax", (t(3), None), {}, "dim is None; allowed: an integer; pass dim=-1"),
        ("layer_norm", (t(2, 3).bfloat16(), (3,), t(3)), {}, "x is bfloat16, weight is float32"),
        ("layer_norm", (t(2, 3), (3,), None, None, -1.0), {}, r"eps is -1\.0; allowed: 0\.0 or more"),
        ("layer_norm", (t(2, 3), (3,), None, None, math.inf), {}, "eps is inf"),
        ("rms_norm", (t(2, 3).half(), (3,), t(3)), {}, "x is float16, weight is float32"),
        (
            "matmul",
            (t(1).expand(1 << 24, 1), t(1).expand(1, 1 << 24)),
            {},
            "has 1125899906842624 bytes; allowed: at most",
        ),
        ("embedding", (t(*(1,) * 16, dtype=torch.int64), t(5, 3)), {}, "17 dimensions; allowed: at most 16"),
    ],
)
def test_what_is_refused_beyond_torch(op: str, args: tuple[Any, ...], options: dict[str, Any], says: str) -> None:
    """Broadcasts that only torch's slow path knows, training options, values without meaning: see docs/ops.md."""
    with pytest.raises(InvalidArgument, match=says):
        planned(op, *args, **options)


def test_equal_calls_share_one_plan() -> None:
    """Routes are kept by plan; the steady state must find the same object."""
    a, b = (TensorSpec.contiguous("float32", (1, 2, 3, 4)) for _ in range(2))
    first = attention_plans.plan_attention(a, a, a, is_causal=True)
    assert attention_plans.plan_attention(b, b, b, is_causal=True) is first
    assert attention_plans.plan_attention(b, b, b, is_causal=False) is not first
    assert plan_out(first, a) is plan_out(first, b)
    assert plans.plan_layer_norm(a, (4,)) is plans.plan_layer_norm(a, [4])


def test_scalars_leave_in_wire_types() -> None:
    """NumPy scalars are numbers to Python and unknown to msgpack."""
    x = TensorSpec.contiguous("float32", (2, 4))
    attrs = [
        plans.plan_softmax(x, np.int64(-1)).attrs["dim"],
        plans.plan_layer_norm(x, (4,), eps=np.float32(0.5)).attrs["eps"],
        attention_plans.plan_attention(x, x, x, scale=np.float64(2)).attrs["scale"],
    ]
    assert [(type(a), a) for a in attrs] == [(int, 1), (float, 0.5), (float, 2.0)]
