"""The public ops. Names, argument order and meaning follow torch.nn.functional where it has the op; docs/ops.md has
formulas and tolerances.

For type checkers a result is of the type of the first array: an NDArray gives an NDArray, a torch.Tensor a Tensor.

All of them take `out=` (write the result there; zero-copy when it comes from lz.empty or lz.share), `backend=` (pin one
backend: its failure is then raised instead of falling back) and `timeout_s=` (how long one attempt may run before its
worker is killed and the next candidate takes over). Arrays are NumPy, torch, DLPack or buffer objects of one dtype; the
result is of the kind of the first one, new, and owned by the caller.

All raise InvalidArgument for calls that make no sense, NoBackend when no kernel accepts the call, BackendError when
every kernel tried has failed (DeadlineExceeded when the last one was too slow), Poison for inputs that killed two
workers, BrokerLost when the broker goes away meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeVar, overload

from layerzero.client.arrays.array_types import ArrayT
from layerzero.client.connection.call import Request
from layerzero.client.facade.running import perform
from layerzero.client.planning import attention_plans, plans, token_plans
from layerzero.ipc.vocabulary.tensors import TensorSpec

if TYPE_CHECKING:
    from numpy import generic
    from numpy.typing import NDArray

    from layerzero.client.arrays.array_types import AnyArray

    ScalarT = TypeVar("ScalarT", bound=generic)

ResultT = TypeVar("ResultT")


def attention(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    attn_mask: AnyArray | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    sinks: AnyArray | None = None,
    alibi_slopes: AnyArray | None = None,
    *,
    layout: str = "BHSD",
    causal_alignment: str = "top_left",
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    mask_block_size: Sequence[int] | None = None,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """Softmax attention: softmax(cap(q k^T * scale) + mask) v, cap(s) being softcap tanh(s / softcap), or s without.

    q: (batch, heads, seq_q, head_dim), k: (batch, kv_heads, seq_k, head_dim), v: (batch, kv_heads, seq_k, value_dim),
    or with layout="BSHD" heads and sequence exchanged; leading dimensions may be left out.
    attn_mask: broadcastable to (batch, heads, seq_q, seq_k); bool (True: attend) or the dtype of q (added).
    scale: multiplies q k^T, default 1/sqrt(head_dim). enable_gqa: heads may be a multiple of kv_heads.
    causal_alignment: for is_causal with seq_q != seq_k: row i sees columns up to i ("top_left", as in torch) or up to
    i + seq_k - seq_q ("bottom_right", as in FlashAttention): that column is the row's place. Rows that see nothing are
    zero. dropout_p must be 0.
    mask_block_size: (rows, columns): attn_mask, bool, has an element for each block of so many.
    window_size: (left, right), how many columns before and after its place a row sees, -1 for all. softcap: 0 for none.
    sinks: (heads,) of q's dtype: a further score of each row, which takes weight and has no value. alibi_slopes:
    float32 (heads,) or (batch, heads): minus the slope times |column - place| is added to scores.
    Returns: shaped like q with value_dim for head_dim.
    Source: Vaswani et al. 2017, eq. 1; of the options docs/ops.md.
    """
    params = {
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "layout": layout,
        "causal_alignment": causal_alignment,
        "window_size": extents_of(window_size),
        "softcap": softcap,
        "mask_block_size": None if mask_block_size is None else extents_of(mask_block_size),
    }
    args = (q, k, v, attn_mask, sinks, alibi_slopes)
    return perform(Request("attention", args, params, attention_plans.plan_attention, out, backend, timeout_s))


def attention_varlen(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    causal_alignment: str = "top_left",
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """Softmax attention within sequences of unequal lengths that lie one after the other.

    q: (tokens_q, heads, head_dim), k: (tokens_k, kv_heads, head_dim), v: (tokens_k, kv_heads, value_dim); heads is a
    multiple of kv_heads. cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1), from 0 up to the number of tokens: sequence
    n has the queries cu_seqlens_q[n] to cu_seqlens_q[n + 1] and sees those keys. scale, is_causal and causal_alignment
    are those of attention, within a sequence. Queries that see no key give 0.
    The kernel reads cu_seqlens, not the client: on the CPU bad ones are InvalidArgument, on a GPU whatever it does.
    Returns: (tokens_q, heads, value_dim). Source: Dao et al. 2022, as flash_attn_varlen_func.
    """
    params = {"is_causal": is_causal, "scale": scale, "causal_alignment": causal_alignment}
    args = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    planner = token_plans.plan_attention_varlen
    return perform(Request("attention_varlen", args, params, planner, out, backend, timeout_s))


def paged_attention(
    q: ArrayT,
    k_cache: AnyArray,
    v_cache: AnyArray,
    block_tables: AnyArray,
    seq_lens: AnyArray,
    k_scale: AnyArray | None = None,
    v_scale: AnyArray | None = None,
    *,
    scale: float | None = None,
    kv_layout: str = "NHD",
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """Softmax attention of one query for each sequence to the keys that a paged cache holds of it: a decoding step.

    q: (sequences, heads, head_dim), k_cache: (blocks, block_size, kv_heads, head_dim), with kv_layout="HND" (blocks,
    kv_heads, block_size, head_dim), v_cache: the same with value_dim; heads is a multiple of kv_heads. block_tables:
    int32 (sequences, max_blocks), seq_lens: int32 (sequences): key j below seq_lens[b] is in slot j % block_size of
    block block_tables[b, j // block_size]. Slots and table entries that no key is in may hold anything. A sequence of
    length 0 gives 0. scale: default 1/sqrt(head_dim). k_scale, v_scale: of caches that append_kv filled with them.
    The kernel reads tables and lengths, not the client: on the CPU bad ones are InvalidArgument, on a GPU whatever it
    does. Returns: (sequences, heads, value_dim). Source: Kwon et al. 2023, eq. 4.
    """
    args = (q, k_cache, v_cache, block_tables, seq_lens, k_scale, v_scale)
    planner = token_plans.plan_paged_attention
    params = {"scale": scale, "kv_layout": kv_layout}
    return perform(Request("paged_attention", args, params, planner, out, backend, timeout_s))


def append_kv(
    key: AnyArray,
    value: AnyArray,
    k_cache: AnyArray,
    v_cache: AnyArray,
    slots: AnyArray,
    k_scale: AnyArray | None = None,
    v_scale: AnyArray | None = None,
    *,
    kv_layout: str = "NHD",
    backend: str | None = None,
    timeout_s: float | None = None,
) -> None:
    """Write keys and values of new tokens into a paged cache, which is changed in place.

    key: (tokens, kv_heads, head_dim), k_cache: (blocks, block_size, kv_heads, head_dim), with kv_layout="HND" (blocks,
    kv_heads, block_size, head_dim), value and v_cache: the same with value_dim; one dtype for all, if there are no
    scales. slots: int32 or int64 (tokens): token t goes to slot slots[t] % block_size of block slots[t] // block_size.
    Key j of sequence b as paged_attention finds it has the slot
    block_tables[b, j // block_size] * block_size + j % block_size. A negative slot stores nothing, as padding needs it;
    of tokens with equal slots any may stay. One from blocks * block_size on is InvalidArgument on the CPU, before
    anything is written; on a GPU, where nobody waits for slots, it stores nothing.
    k_scale, v_scale: float32, one number or (kv_heads,): caches of int8, float8_e4m3fn or float8_e5m2 get what quantize
    makes of float32, float16 or bfloat16 with these scales: key / k_scale, rounded, cut to the finite range.
    Caches that workers do not reach as they lie are copied there and back, which the report says: use lz.empty or
    lz.share. A call that fails may have written some of its slots, and no other.
    Raises InvalidArgument for caches that cannot be written, such as JAX arrays. Returns None.
    """
    args = (key, value, k_cache, v_cache, slots, k_scale, v_scale)
    params, planner = {"kv_layout": kv_layout}, token_plans.plan_append_kv
    return perform(Request("append_kv", args, params, planner, None, backend, timeout_s))  # type: ignore[return-value]


def rope(
    x: ArrayT,
    cos: AnyArray,
    sin: AnyArray,
    *,
    interleaved: bool = False,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """Rotary position embedding: pairs (a, b) of elements of each head become (a cos - b sin, b cos + a sin).

    x: (batch, sequence, heads, head_dim) or (sequence, heads, head_dim), as a projection gives it. cos, sin: of the
    angle of each position and pair, (sequence, pairs) or (1 or batch, sequence, pairs). Pair i is of the elements i and
    i + pairs, or with interleaved=True 2i and 2i + 1. Elements from 2 * pairs on stay as they are.
    Source: Su et al. 2021, eq. 34 (interleaved); in halves as GPT-NeoX and Llama checkpoints have it.
    """
    params = {"interleaved": interleaved}
    return perform(Request("rope", (x, cos, sin), params, token_plans.plan_rope, out, backend, timeout_s))


@overload
def matmul(
    a: NDArray[ScalarT],
    b: AnyArray,
    *,
    out: NDArray[ScalarT] | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> NDArray[ScalarT]: ...


@overload
def matmul(
    a: ArrayT, b: AnyArray, *, out: ArrayT | None = None, backend: str | None = None, timeout_s: float | None = None
) -> ArrayT: ...


def matmul(
    a: ArrayT, b: AnyArray, *, out: ArrayT | None = None, backend: str | None = None, timeout_s: float | None = None
) -> ArrayT:
    """Matrix product as torch.matmul: (..., M, K) @ (..., K, N) -> (..., M, N), leading dimensions broadcast; a 1-D
    operand is a row on the left and a column on the right."""
    return perform(Request("matmul", (a, b), {}, plans.plan_matmul, out, backend, timeout_s))


def linear(
    input: ArrayT,
    weight: AnyArray,
    bias: AnyArray | None = None,
    activation: str | None = None,
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """input @ weight^T + bias, and the activation of that.

    input: (..., in_features), weight: (out_features, in_features), bias: (out_features); any dtype but bool.
    activation: "relu", "gelu" (by erf), "gelu_tanh" or "silu", of floating-point dtypes; None: none.
    """
    params = {"activation": activation}
    return perform(Request("linear", (input, weight, bias), params, plans.plan_linear, out, backend, timeout_s))


def softmax(
    input: ArrayT,
    dim: int,
    *,
    dtype: str | None = None,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """exp(x - max) / sum(exp(x - max)) along `dim`.

    input: any shape and float dtype; dim: from -input.ndim on. dtype: "float64", "float32", "bfloat16" or "float16",
    what input is converted to before, and the result's; None for input's own. Source: torch.nn.functional.softmax.
    """
    params = {"dim": dim, "dtype": dtype}
    return perform(Request("softmax", (input,), params, plans.plan_softmax, out, backend, timeout_s))


def log_softmax(
    input: ArrayT,
    dim: int,
    *,
    dtype: str | None = None,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """x - max - log(sum(exp(x - max))) along `dim`, the logarithm of softmax without its underflow.

    input: any shape and float dtype; dim: from -input.ndim on; dtype as in softmax. Along a line with a NaN, with
    positive infinity, or of nothing but negative infinity all are NaN. Source: torch.nn.functional.log_softmax.
    """
    params = {"dim": dim, "dtype": dtype}
    return perform(Request("log_softmax", (input,), params, plans.plan_log_softmax, out, backend, timeout_s))


def layer_norm(
    input: ArrayT,
    normalized_shape: int | Sequence[int],
    weight: AnyArray | None = None,
    bias: AnyArray | None = None,
    eps: float = 1e-5,
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimensions, which must equal normalized_shape.

    var is the biased variance. weight and bias have that shape. Source: Ba, Kiros and Hinton 2016, eq. 4.
    """
    params = {"normalized_shape": extents_of(normalized_shape), "eps": eps}

    def plan(x: TensorSpec, w: TensorSpec | None, b: TensorSpec | None, *, normalized_shape: Any, eps: float) -> Any:
        return plans.plan_layer_norm(x, normalized_shape, w, b, eps)

    return perform(Request("layer_norm", (input, weight, bias), params, plan, out, backend, timeout_s))


def rms_norm(
    input: ArrayT,
    normalized_shape: int | Sequence[int],
    weight: AnyArray | None = None,
    eps: float | None = None,
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimensions, which must equal normalized_shape.

    eps: default is the machine epsilon of the type that is computed in. Source: Zhang and Sennrich 2019, eq. 4.
    """
    params = {"normalized_shape": extents_of(normalized_shape), "eps": eps}

    def plan(x: TensorSpec, w: TensorSpec | None, *, normalized_shape: Any, eps: float | None) -> Any:
        return plans.plan_rms_norm(x, normalized_shape, w, eps)

    return perform(Request("rms_norm", (input, weight), params, plan, out, backend, timeout_s))


def gelu(
    input: ArrayT,
    approximate: str = "none",
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """x * Phi(x); approximate="tanh" uses tanh for the Gaussian's Phi. Source: Hendrycks and Gimpel 2016."""
    params = {"approximate": approximate}
    return perform(Request("gelu", (input,), params, plans.plan_gelu, out, backend, timeout_s))


def silu(
    input: ArrayT, *, out: ArrayT | None = None, backend: str | None = None, timeout_s: float | None = None
) -> ArrayT:
    """x / (1 + exp(-x)). Source: Elfwing, Uchibe and Doya 2017."""
    return perform(Request("silu", (input,), {}, plans.plan_silu, out, backend, timeout_s))


def swiglu(
    gate: ArrayT, up: AnyArray, *, out: ArrayT | None = None, backend: str | None = None, timeout_s: float | None = None
) -> ArrayT:
    """silu(gate) * up; equal shapes. Halves of one (..., 2 * n) tensor, which a fused projection gives, need no copy.

    Source: Shazeer 2020, eq. 5.
    """
    return perform(Request("swiglu", (gate, up), {}, token_plans.plan_swiglu, out, backend, timeout_s))


@overload
def embedding(
    input: NDArray[Any],
    weight: NDArray[ScalarT],
    *,
    out: NDArray[ScalarT] | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> NDArray[ScalarT]: ...


@overload
def embedding(
    input: ArrayT,
    weight: AnyArray,
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT: ...


def embedding(
    input: ArrayT,
    weight: AnyArray,
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """Rows of `weight` (num_embeddings, dim) at the int32 or int64 indices `input` (...) -> (..., dim).

    The result is of the kind of `input`. An index outside [0, num_embeddings) is InvalidArgument.
    """
    return perform(Request("embedding", (input, weight), {}, plans.plan_embedding, out, backend, timeout_s))


def null(*, backend: str | None = None, timeout_s: float | None = None) -> None:
    """Nothing, in a worker: what remains is the cost of a dispatch."""
    return perform(Request("null", (), {}, plans.plan_null, None, backend, timeout_s))  # type: ignore[return-value]


def extents_of(value: Any) -> Any:
    """As a tuple of Python's own integers, so that it can be part of a call's key; plans.py refuses anything else."""
    if type(value) is tuple and {*map(type, value)} == {int}:  # most are; asking for Integral takes 2 us
        return value
    if isinstance(value, Integral):
        return (int(value),)
    dtype = getattr(value, "dtype", None)
    if dtype is not None and getattr(dtype, "kind", "f") not in "iu":
        return value
    try:
        return value if isinstance(value, str) else tuple(int(n) if isinstance(n, Integral) else n for n in value)
    except TypeError:  # it has no elements
        return value
