"""Plans of attention with its options and the log-sum-exp of its rows, of sequences one after the other and of paged
caches, and of what moves rows and blocks of these. As client/planning/plans.py, whose rules hold here too."""

from __future__ import annotations

from layerzero.client.planning.attention_plans import checked_softcap, checked_window, of_heads
from layerzero.client.planning.checks import (
    attention_scale,
    choice,
    finite,
    flag,
    fresh,
    listed,
    refuse,
    same_dtype,
    same_float_dtype,
)
from layerzero.client.planning.plans import Plan, Scalar, refuse_overlapping, remember
from layerzero.client.planning.token_plans import (
    cache_views,
    check_cache_dtypes,
    check_heads,
    check_indices,
    plan_attention_varlen,
    scale_views,
)
from layerzero.ipc.vocabulary.quantized_shapes import SCALED_DTYPES
from layerzero.ipc.vocabulary.shapes import INDEX_DTYPES
from layerzero.ipc.vocabulary.tensors import TensorSpec


@remember
def plan_attention_varlen_forward(
    q: TensorSpec,
    k: TensorSpec,
    v: TensorSpec,
    cu_seqlens_q: TensorSpec,
    cu_seqlens_k: TensorSpec,
    sinks: TensorSpec | None = None,
    alibi_slopes: TensorSpec | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    causal_alignment: str = "top_left",
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Plan:
    """Attention of sequences of unequal lengths, and the log-sum-exp of its rows."""
    op = "attention_varlen_forward"
    plain = plan_attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, is_causal=is_causal, scale=scale, causal_alignment=causal_alignment, op=op
    )
    longest = max(q.shape[0], k.shape[0])
    attrs, beside = _options(op, plain, q, cu_seqlens_q.numel - 1, sinks, alibi_slopes, window_size, softcap, longest)
    # Without a rule about places both alignments say the same: one route serves them.
    has_places = attrs["is_causal"] or alibi_slopes is not None or not {"window_left", "window_right"}.isdisjoint(attrs)
    attrs["causal_alignment"] = causal_alignment if has_places else "top_left"
    return _with_sums(op, (*plain.inputs, *beside), attrs, plain)


@remember
def plan_paged_attention_forward(
    q: TensorSpec,
    k_cache: TensorSpec,
    v_cache: TensorSpec,
    block_tables: TensorSpec,
    seq_lens: TensorSpec,
    cu_seqlens_q: TensorSpec | None = None,
    sinks: TensorSpec | None = None,
    alibi_slopes: TensorSpec | None = None,
    k_scale: TensorSpec | None = None,
    v_scale: TensorSpec | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    kv_layout: str = "NHD",
) -> Plan:
    """Attention of the last tokens of sequences to the keys in a paged cache, and the log-sum-exp of its rows."""
    op = "paged_attention_forward"
    is_causal = flag(op, "is_causal", is_causal)
    check_cache_dtypes(op, k_cache, v_cache, k_scale, v_scale, q=q)
    if q.ndim != 3:
        refuse(op, f"q has shape {list(q.shape)}", "(tokens, heads, head_dim)", "pass queries one after the other")
    k_cache, v_cache = cache_views(op, k_cache, v_cache, kv_layout)
    check_indices(op, "block_tables", block_tables, 2)
    check_indices(op, "seq_lens", seq_lens, 1)
    sequences = seq_lens.numel
    if block_tables.shape[0] != sequences:
        rows = listed(("block_tables' first extent", "seq_lens'"), (block_tables.shape[0], sequences))
        refuse(op, rows, "one row of each for a sequence", "check the batch")
    if cu_seqlens_q is not None:
        check_indices(op, "cu_seqlens_q", cu_seqlens_q, 1)
        if cu_seqlens_q.numel != sequences + 1:
            text = f"{sequences + 1}, one more than there are sequences"
            refuse(op, f"cu_seqlens_q has {cu_seqlens_q.numel} entries", text, "begin it with 0")
    elif q.shape[0] != sequences:
        text = "one query for each sequence without cu_seqlens_q"
        refuse(op, f"q has {q.shape[0]} tokens and seq_lens {sequences} entries", text, "pass cu_seqlens_q")
    check_heads(op, ("q", q.shape[1:]), ("k_cache", k_cache.shape[2:]), ("v_cache", v_cache.shape[2:]))
    inputs = (q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q)
    # A query alone is at the last key: it sees all of them, by the causal rule, too.
    attrs: dict[str, Scalar] = {
        "is_causal": is_causal and cu_seqlens_q is not None,
        "scale": attention_scale(op, scale, q.shape[2]),
    }
    result = fresh(op, q.dtype, (*q.shape[:2], v_cache.shape[3]))
    plain = Plan(op, inputs, attrs, (result,), (result,))
    room = k_cache.shape[1] * block_tables.shape[1]
    attrs, beside = _options(op, plain, q, sequences, sinks, alibi_slopes, window_size, softcap, room)
    if cu_seqlens_q is None:
        attrs["is_causal"] = False
        attrs.pop("window_right", None)
    scales = scale_views(op, k_cache.shape[2], k_scale, v_scale)
    return _with_sums(op, (*inputs, *beside, *scales), attrs, plain)


@remember
def plan_mla_decode(
    q_nope: TensorSpec,
    q_pe: TensorSpec,
    ckv_cache: TensorSpec,
    kpe_cache: TensorSpec,
    block_tables: TensorSpec,
    seq_lens: TensorSpec,
    *,
    scale: float,
) -> Plan:
    """Latent attention of one query a sequence, and the log-sum-exp of its rows."""
    op = "mla_decode"
    same_float_dtype(op, q_nope=q_nope, q_pe=q_pe, ckv_cache=ckv_cache, kpe_cache=kpe_cache)
    for name, query in (("q_nope", q_nope), ("q_pe", q_pe)):
        if query.ndim != 3:
            text = f"(sequences, heads, {'latent' if name == 'q_nope' else 'rope'}_dim)"
            refuse(op, f"{name} has shape {list(query.shape)}", text, "pass one query for each sequence")
    for name, cache in (("ckv_cache", ckv_cache), ("kpe_cache", kpe_cache)):
        if cache.ndim != 3:
            text = f"(blocks, block_size, {'latent' if name == 'ckv_cache' else 'rope'}_dim)"
            refuse(op, f"{name} has shape {list(cache.shape)}", text, "all heads share it: leave out their dimension")
    check_indices(op, "block_tables", block_tables, 2)
    check_indices(op, "seq_lens", seq_lens, 1)
    counts = (q_nope.shape[0], q_pe.shape[0], block_tables.shape[0], seq_lens.shape[0])
    if len(set(counts)) > 1:
        rows = listed(("q_nope's first extent", "q_pe's", "block_tables'", "seq_lens'"), counts)
        refuse(op, rows, "one row of each for a sequence", "check the batch")
    if q_nope.shape[1] != q_pe.shape[1]:
        refuse(op, f"q_nope has {q_nope.shape[1]} heads and q_pe {q_pe.shape[1]}", "equal numbers", "check both")
    if ckv_cache.shape[:2] != kpe_cache.shape[:2]:
        given = (
            f"ckv_cache has (blocks, block_size) {list(ckv_cache.shape[:2])} and kpe_cache {list(kpe_cache.shape[:2])}"
        )
        refuse(op, given, "equal ones", "check both")
    if q_nope.shape[2] != ckv_cache.shape[2]:
        given = f"q_nope has latent_dim {q_nope.shape[2]} and ckv_cache {ckv_cache.shape[2]}"
        refuse(op, given, "equal ones", "multiply queries by the up-projection of keys first")
    if q_pe.shape[2] != kpe_cache.shape[2]:
        given = f"q_pe has rope_dim {q_pe.shape[2]} and kpe_cache {kpe_cache.shape[2]}"
        refuse(op, given, "equal ones", "check both")
    attrs: dict[str, Scalar] = {
        "scale": finite(op, "scale", scale, "pass the model's own, 1/sqrt(nope_dim + rope_dim)")
    }
    results = (fresh(op, q_nope.dtype, q_nope.shape), fresh(op, "float32", q_nope.shape[:2]))
    return Plan(op, (q_nope, q_pe, ckv_cache, kpe_cache, block_tables, seq_lens), attrs, results, results)


@remember
def plan_gather_kv(
    k_cache: TensorSpec,
    v_cache: TensorSpec,
    slots: TensorSpec,
    k_scale: TensorSpec | None = None,
    v_scale: TensorSpec | None = None,
    *,
    dtype: str | None = None,
    kv_layout: str = "NHD",
) -> Plan:
    """Keys and values out of a paged cache."""
    op = "gather_kv"
    k, v = _caches(op, k_cache, v_cache, kv_layout)
    check_cache_dtypes(op, k, v, k_scale, v_scale)
    _places(op, "slots", slots)
    scales = scale_views(op, k.shape[2], k_scale, v_scale)
    attrs: dict[str, Scalar] = {}
    if scales[0] is not None:
        attrs["dtype"] = dtype or "float32"
        choice(op, "dtype", attrs["dtype"], SCALED_DTYPES)
    elif dtype is not None:
        refuse(op, f"dtype is {dtype!r} without scales", "None: rows are of the caches' dtype", "leave it out")
    given = str(attrs.get("dtype", k.dtype))
    results = tuple(fresh(op, given, (*slots.shape, *cache.shape[2:])) for cache in (k, v))
    return Plan(op, (k, v, slots, *scales), attrs, results, results)


@remember
def plan_copy_kv_blocks(
    k_cache: TensorSpec, v_cache: TensorSpec, sources: TensorSpec, targets: TensorSpec, *, kv_layout: str = "NHD"
) -> Plan:
    """Blocks of a paged cache into other ones."""
    op = "copy_kv_blocks"
    k, v = _caches(op, k_cache, v_cache, kv_layout)
    for name, spec in (("sources", sources), ("targets", targets)):
        _places(op, name, spec)
    if (sources.dtype, sources.shape) != (targets.dtype, targets.shape):
        refuse(
            op, f"sources is {sources} and targets {targets}", "one dtype and length", "pass a target for each source"
        )
    for name, spec in (("k_cache", k), ("v_cache", v)):
        refuse_overlapping(op, name, spec)
    return Plan(op, (k, v, sources, targets), {}, (k, v), ())


def _caches(op: str, k_cache: TensorSpec, v_cache: TensorSpec, kv_layout: str) -> tuple[TensorSpec, TensorSpec]:
    same_dtype(op, k_cache=k_cache, v_cache=v_cache)
    k, v = cache_views(op, k_cache, v_cache, kv_layout)
    if k.shape[2] != v.shape[2]:
        refuse(op, f"k_cache has {k.shape[2]} heads and v_cache {v.shape[2]}", "equal numbers", "check both")
    return k, v


def _places(op: str, name: str, spec: TensorSpec) -> None:
    if spec.dtype not in INDEX_DTYPES or spec.ndim != 1:
        refuse(op, f"{name} is {spec}", f"1 dimension of {' or '.join(INDEX_DTYPES)}", "convert or flatten it")


def _options(
    op: str,
    plain: Plan,
    q: TensorSpec,
    sequences: int,
    sinks: TensorSpec | None,
    slopes: TensorSpec | None,
    window_size: tuple[int, int],
    softcap: float,
    longest: int,
) -> tuple[dict[str, Scalar], tuple[TensorSpec | None, TensorSpec | None]]:
    """The attributes with those of options, and sinks and slopes. No sequence has more than `longest` tokens."""
    attrs = dict(plain.attrs)
    left, right = checked_window(op, window_size)
    if right == 0:  # the causal rule by another name
        attrs["is_causal"] = True
    if 0 <= left < longest - 1:
        attrs["window_left"] = left
    if 0 < right < q.shape[0] + longest - 1 and not attrs["is_causal"]:
        attrs["window_right"] = right
    cap = checked_softcap(op, softcap)
    if cap:
        attrs["softcap"] = cap
    return attrs, of_heads(op, q.dtype, (sequences, q.shape[1]), sinks, slopes)


def _with_sums(op: str, inputs: tuple[TensorSpec | None, ...], attrs: dict[str, Scalar], plain: Plan) -> Plan:
    (out,) = plain.results
    results = (out, fresh(op, "float32", out.shape[:2]))
    return Plan(op, inputs, attrs, results, results)
