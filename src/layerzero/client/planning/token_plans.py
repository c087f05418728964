"""Plans of the ops that work on tokens one after the other, and on what a transformer layer does around attention. As
client/planning/plans.py, whose rules hold here too."""

from __future__ import annotations

from layerzero.client.planning.checks import (
    attention_scale,
    choice,
    flag,
    fresh,
    listed,
    refuse,
    same_dtype,
    same_float_dtype,
)
from layerzero.client.planning.plans import Plan, Scalar, refuse_overlapping, remember, same_shape
from layerzero.ipc.vocabulary.attention_shapes import CAUSAL_ALIGNMENTS, KV_LAYOUTS, SCALED_CACHES
from layerzero.ipc.vocabulary.quantized_shapes import QUANTIZED_DTYPES, SCALED_DTYPES
from layerzero.ipc.vocabulary.shapes import INDEX_DTYPES
from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES, TensorSpec


@remember
def plan_attention_varlen(
    q: TensorSpec,
    k: TensorSpec,
    v: TensorSpec,
    cu_seqlens_q: TensorSpec,
    cu_seqlens_k: TensorSpec,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    causal_alignment: str = "top_left",
    op: str = "attention_varlen",
) -> Plan:
    """Attention of sequences of unequal lengths. `op`: whose arguments these are."""
    is_causal = flag(op, "is_causal", is_causal)
    choice(op, "causal_alignment", causal_alignment, CAUSAL_ALIGNMENTS)
    same_float_dtype(op, q=q, k=k, v=v)
    for name, spec in (("q", q), ("k", k), ("v", v)):
        if spec.ndim != 3:
            refuse(
                op, f"{name} has shape {list(spec.shape)}", "(tokens, heads, head_dim)", "flatten batch and sequence"
            )
    for name, spec in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_indices(op, name, spec, 1)
        if not spec.numel:
            refuse(op, f"{name} is empty", "one more entry than there are sequences", "begin it with 0")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        refuse(
            op,
            f"cu_seqlens_q has {cu_seqlens_q.numel} entries and cu_seqlens_k {cu_seqlens_k.numel}",
            "equal numbers",
            "give a sequence without keys an entry that repeats the one before it",
        )
    if k.shape[0] != v.shape[0]:
        refuse(op, f"k has {k.shape[0]} tokens and v {v.shape[0]}", "equal numbers", "check what was packed")
    check_heads(op, ("q", q.shape[1:]), ("k", k.shape[1:]), ("v", v.shape[1:]))
    result = fresh(op, q.dtype, (*q.shape[:2], v.shape[2]))
    attrs: dict[str, Scalar] = {
        "is_causal": is_causal,
        "scale": attention_scale(op, scale, q.shape[2]),
        "causal_alignment": causal_alignment if is_causal else "top_left",
    }
    return Plan(op, (q, k, v, cu_seqlens_q, cu_seqlens_k), attrs, (result,), (result,))


@remember
def plan_paged_attention(
    q: TensorSpec,
    k_cache: TensorSpec,
    v_cache: TensorSpec,
    block_tables: TensorSpec,
    seq_lens: TensorSpec,
    k_scale: TensorSpec | None = None,
    v_scale: TensorSpec | None = None,
    *,
    scale: float | None = None,
    kv_layout: str = "NHD",
) -> Plan:
    """Attention of one query a sequence to the keys in a paged cache."""
    op = "paged_attention"
    check_cache_dtypes(op, k_cache, v_cache, k_scale, v_scale, q=q)
    if q.ndim != 3:
        refuse(op, f"q has shape {list(q.shape)}", "(sequences, heads, head_dim)", "pass one query for each sequence")
    k_cache, v_cache = cache_views(op, k_cache, v_cache, kv_layout)
    check_indices(op, "block_tables", block_tables, 2)
    check_indices(op, "seq_lens", seq_lens, 1)
    counts = (q.shape[0], block_tables.shape[0], seq_lens.shape[0])
    if len(set(counts)) > 1:
        rows = listed(("q's first extent", "block_tables'", "seq_lens'"), counts)
        refuse(op, rows, "one row of each for a sequence", "check the batch")
    check_heads(op, ("q", q.shape[1:]), ("k_cache", k_cache.shape[2:]), ("v_cache", v_cache.shape[2:]))
    result = fresh(op, q.dtype, (*q.shape[:2], v_cache.shape[3]))
    attrs: dict[str, Scalar] = {"scale": attention_scale(op, scale, q.shape[2])}
    scales = scale_views(op, k_cache.shape[2], k_scale, v_scale)
    return Plan(op, (q, k_cache, v_cache, block_tables, seq_lens, *scales), attrs, (result,), (result,))


@remember
def plan_append_kv(
    key: TensorSpec,
    value: TensorSpec,
    k_cache: TensorSpec,
    v_cache: TensorSpec,
    slots: TensorSpec,
    k_scale: TensorSpec | None = None,
    v_scale: TensorSpec | None = None,
    *,
    kv_layout: str = "NHD",
) -> Plan:
    """Keys and values into a paged cache."""
    op = "append_kv"
    check_cache_dtypes(op, k_cache, v_cache, k_scale, v_scale, key=key, value=value)
    for name, spec in (("key", key), ("value", value)):
        if spec.ndim != 3:
            refuse(
                op, f"{name} has shape {list(spec.shape)}", "(tokens, heads, head_dim)", "flatten batch and sequence"
            )
    k_cache, v_cache = cache_views(op, k_cache, v_cache, kv_layout)
    for name, rows, cache in (("key", key, k_cache), ("value", value, v_cache)):
        if rows.shape[1:] != cache.shape[2:]:
            refuse(
                op,
                f"{name} has (heads, head_dim) {list(rows.shape[1:])} and {name[0]}_cache {list(cache.shape[2:])}",
                "equal ones",
                "check the layout",
            )
    if k_cache.shape[2] != v_cache.shape[2]:
        refuse(
            op, f"k_cache has {k_cache.shape[2]} heads and v_cache {v_cache.shape[2]}", "equal numbers", "check both"
        )
    if slots.dtype not in INDEX_DTYPES or slots.ndim != 1:
        refuse(op, f"slots is {slots}", f"(tokens,) of {' or '.join(INDEX_DTYPES)}", "convert or flatten it")
    counts = (key.shape[0], value.shape[0], slots.shape[0])
    if len(set(counts)) > 1:
        refuse(op, listed(("key's first extent", "value's", "slots'"), counts), "one row of each a token", "check them")
    for name, spec in (("k_cache", k_cache), ("v_cache", v_cache)):
        refuse_overlapping(op, name, spec)
    scales = scale_views(op, k_cache.shape[2], k_scale, v_scale)
    return Plan(op, (key, value, k_cache, v_cache, slots, *scales), {}, (k_cache, v_cache), ())


@remember
def plan_rope(x: TensorSpec, cos: TensorSpec, sin: TensorSpec, *, interleaved: bool = False) -> Plan:
    """Rotary position embedding."""
    op = "rope"
    interleaved = flag(op, "interleaved", interleaved)
    same_float_dtype(op, x=x, cos=cos, sin=sin)
    x4, tables = _rotated(op, "x", x, cos, sin)
    output = TensorSpec.contiguous(x.dtype, x4.shape)
    return Plan(op, (x4, *tables), {"interleaved": interleaved}, (output,), (fresh(op, x.dtype, x.shape),))


@remember
def plan_rope_qk(q: TensorSpec, k: TensorSpec, cos: TensorSpec, sin: TensorSpec, *, interleaved: bool = False) -> Plan:
    """Rotary position embedding of queries and keys, by the same tables."""
    op = "rope_qk"
    interleaved = flag(op, "interleaved", interleaved)
    same_float_dtype(op, q=q, k=k, cos=cos, sin=sin)
    q4, tables = _rotated(op, "q", q, cos, sin)
    is_fit = k.ndim == q.ndim and (*k.shape[:-2], k.shape[-1]) == (*q.shape[:-2], q.shape[-1])
    if not is_fit:
        refuse(
            op,
            f"q has shape {list(q.shape)} and k {list(k.shape)}",
            "shapes that differ in their heads alone, the second to last extent",
            "check the layout; of other tokens call lz.rope on each",
        )
    k4 = k if k.ndim == 4 else k.unsqueeze(0)
    outputs = tuple(TensorSpec.contiguous(q.dtype, spec.shape) for spec in (q4, k4))
    results = tuple(fresh(op, q.dtype, spec.shape) for spec in (q, k))
    return Plan(op, (q4, k4, *tables), {"interleaved": interleaved}, outputs, results)


@remember
def plan_swiglu(gate: TensorSpec, up: TensorSpec) -> Plan:
    """silu(gate) * up."""
    op = "swiglu"
    same_float_dtype(op, gate=gate, up=up)
    if gate.shape != up.shape:
        refuse(op, f"gate has shape {list(gate.shape)} and up {list(up.shape)}", "equal shapes", "expand the smaller")
    return same_shape(op, (gate, up), {})


def _rotated(
    op: str, name: str, x: TensorSpec, cos: TensorSpec, sin: TensorSpec
) -> tuple[TensorSpec, tuple[TensorSpec, TensorSpec]]:
    """x with a batch, and tables with one."""
    if x.ndim not in (3, 4):
        allowed = "(sequence, heads, head_dim) or (batch, sequence, heads, head_dim)"
        refuse(
            op,
            f"{name} has shape {list(x.shape)}",
            allowed,
            f"move the heads behind the sequence: {name}.transpose(1, 2)",
        )
    if cos.shape != sin.shape:
        refuse(op, f"cos has shape {list(cos.shape)} and sin {list(sin.shape)}", "equal shapes", "check both")
    x4 = x if x.ndim == 4 else x.unsqueeze(0)
    batch, sequence, _, head_dim = x4.shape
    is_fit = cos.ndim == 2 or (cos.ndim == 3 and x.ndim == 4 and cos.shape[0] in (1, batch))
    if not is_fit or cos.shape[-2] != sequence:
        refuse(
            op,
            f"cos has shape {list(cos.shape)} and {name} {list(x.shape)}",
            f"({sequence}, pairs){f' or (1 or {batch}, {sequence}, pairs)' if x.ndim == 4 else ''} for cos and sin",
            f"pass the rows of {name}'s positions",
        )
    if not 2 <= 2 * cos.shape[-1] <= head_dim:
        refuse(
            op,
            f"cos has {cos.shape[-1]} columns, one for each pair of elements, and {name} a head_dim of {head_dim}",
            f"1 to {head_dim // 2} columns",
            "where the columns are given twice, pass the first half: cos[..., : cos.shape[-1] // 2]",
        )
    return x4, (cos, sin) if cos.ndim == 3 else (cos.unsqueeze(0), sin.unsqueeze(0))


def cache_views(op: str, k_cache: TensorSpec, v_cache: TensorSpec, kv_layout: str) -> tuple[TensorSpec, TensorSpec]:
    """Of a paged cache in either layout, as kernels see it: (blocks, block_size, heads, extent)."""
    choice(op, "kv_layout", kv_layout, KV_LAYOUTS)
    order = {"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3)}[kv_layout]
    names = "(blocks, block_size, heads, head_dim)" if kv_layout == "NHD" else "(blocks, heads, block_size, head_dim)"
    for name, spec in (("k_cache", k_cache), ("v_cache", v_cache)):
        if spec.ndim != 4:
            refuse(op, f"{name} has shape {list(spec.shape)}", names, "reshape it")
    k, v = k_cache.permute(*order), v_cache.permute(*order)
    if k.shape[:2] != v.shape[:2]:
        refuse(
            op,
            f"k_cache has shape {list(k_cache.shape)} and v_cache {list(v_cache.shape)}",
            f"as many blocks of the same size, {names}",
            "check kv_layout",
        )
    return k, v


def check_cache_dtypes(
    op: str,
    k_cache: TensorSpec,
    v_cache: TensorSpec,
    k_scale: TensorSpec | None,
    v_scale: TensorSpec | None,
    **data: TensorSpec,
) -> None:
    """One dtype for caches and `data`, which attention wants to be floats; with scales one for each, that of the caches
    a quantized one."""
    if k_scale is None and v_scale is None:
        for name, spec in (("k_cache", k_cache), ("v_cache", v_cache)):
            first, one = next(iter(data.items()), ("", None))
            if one is not None and spec.dtype in QUANTIZED_DTYPES and one.dtype in FLOAT_DTYPES:
                remedy = "pass k_scale and v_scale"
                if op == "append_kv":
                    remedy += ", or what lz.dynamic_quantize makes, with its scales in caches of their own"
                refuse(op, f"{first} is {one.dtype} and {name} {spec.dtype}", "one dtype without scales", remedy)
        same = same_dtype if op in ("append_kv", "gather_kv") else same_float_dtype
        same(op, **data, k_cache=k_cache, v_cache=v_cache)
        return
    same_dtype(op, k_cache=k_cache, v_cache=v_cache)
    if k_cache.dtype not in SCALED_CACHES:
        allowed = f"{' or '.join(SCALED_CACHES)} with scales"
        refuse(
            op, f"k_cache is {k_cache.dtype}", allowed, "leave k_scale and v_scale out: it holds numbers as they are"
        )
    for name, spec in data.items():
        if spec.dtype not in SCALED_DTYPES:
            refuse(op, f"{name} is {spec.dtype}", f"{' or '.join(SCALED_DTYPES)} with scales", "convert it")
    if len(data) > 1:
        same_dtype(op, **data)


def scale_views(
    op: str, heads: int, k_scale: TensorSpec | None, v_scale: TensorSpec | None
) -> tuple[TensorSpec | None, TensorSpec | None]:
    """Scales of caches with so many heads as kernels see them: (1,) or (heads,), or none."""
    if k_scale is None and v_scale is None:
        return None, None
    made = []
    for name, spec in (("k_scale", k_scale), ("v_scale", v_scale)):
        if spec is None:
            refuse(op, f"{name} is None", "both scales or neither", "pass it: of 1 where the numbers are as they are")
        if spec.dtype != "float32" or spec.shape not in ((), (1,), (heads,)):
            allowed = f"float32, one number or one for each of {heads} heads"
            refuse(op, f"{name} is {spec}", allowed, "convert or flatten it")
        made.append(spec if spec.ndim else spec.unsqueeze(0))
    return made[0], made[1]


def check_heads(op: str, *tensors: tuple[str, tuple[int, ...]]) -> None:
    """Names, and (heads, head_dim), of queries, keys and values."""
    (q, (heads_q, dim_q)), (k, (heads_k, dim_k)), (v, (heads_v, _)) = tensors
    if dim_q != dim_k:
        refuse(op, f"{q} has head_dim {dim_q} and {k} {dim_k}", "equal sizes", "check the layout")
    if heads_k != heads_v:
        refuse(op, f"{k} has {heads_k} heads and {v} {heads_v}", "equal numbers", "expand the smaller")
    if heads_q != heads_k and (heads_k == 0 or heads_q % heads_k):
        refuse(op, f"{q} has {heads_q} heads and {k} {heads_k}", f"a multiple of {k}'s heads", "check the layout")


def check_indices(op: str, name: str, spec: TensorSpec, ndim: int) -> None:
    if spec.dtype != "int32":
        refuse(op, f"{name} is {spec.dtype}", "int32, which all libraries take", "convert it")
    if spec.ndim != ndim:
        refuse(op, f"{name} has shape {list(spec.shape)}", f"{ndim} dimension{'s' * (ndim > 1)}", "reshape it")
