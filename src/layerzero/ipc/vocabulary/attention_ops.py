"""Attention, and caches of keys and values, as ipc/vocabulary/ops.py has all ops."""

from __future__ import annotations

from layerzero.ipc.vocabulary.op import Op

_ATTRS = ("is_causal", "scale", "causal_alignment", "layout")
_INPUTS = ("q", "k", "v", "attn_mask", "sinks", "alibi_slopes")
_OF_HEADS = _INPUTS[4:]
SCALES = ("k_scale", "v_scale")
OPTIONS = ("window_left", "window_right", "softcap")
MASK_BLOCKS = ("mask_block_q", "mask_block_k")
MERGE_INPUTS = tuple(f"{name}{n}" for n in range(4) for name in ("out", "lse"))

ATTENTION_FAMILY = (
    # q (B,Hq,Sq,D), k (B,Hk,Sk,D), v (B,Hk,Sk,Dv) -> (B,Hq,Sq,Dv); Hq is a multiple of Hk.
    # attn_mask (1|B, 1|Hq, 1|Sq, 1|Sk): bool (True = attend) or q's dtype (added). scale is a float.
    # sinks (Hq), q's dtype: one more score of each row, whose value is 0. alibi_slopes float32 (1|B,Hq): minus the
    # slope times the distance of query and key is added to scores. window_left, window_right: integers from 0 on,
    # how many keys before and after its own place a query sees. softcap: a float above 0, c tanh(scores / c).
    # mask_block_q, mask_block_k: both or neither, integers from 1 on, of a bool mask: an element of it is for a block
    # of so many queries and keys, and its last extents are the numbers of blocks, the last of which may be shorter.
    # `layout` says how the caller's memory is ordered; the views are BHSD either way.
    Op(
        "attention",
        _INPUTS,
        optional=frozenset(_INPUTS[3:]),
        singles=frozenset({"alibi_slopes"}),
        attrs=(*_ATTRS, *OPTIONS, *MASK_BLOCKS),
        options=frozenset((*OPTIONS, *MASK_BLOCKS)),
    ),
    # attention, and the log-sum-exp of each row of scaled and masked scores, natural, float32 (B,Hq,Sq), sinks
    # among them; -inf where a row sees nothing.
    Op(
        "attention_forward",
        _INPUTS,
        ("out", "lse"),
        optional=frozenset(_INPUTS[3:]),
        singles=frozenset({"alibi_slopes"}),
        attrs=(*_ATTRS, *OPTIONS, *MASK_BLOCKS),
        options=frozenset((*OPTIONS, *MASK_BLOCKS)),
    ),
    # grad_out and output (B,Hq,Sq,Dv), lse float32 (B,Hq,Sq), the rest as attention -> the shapes of q, k and v.
    # output and lse are what attention_forward gives for these q, k, v and attn_mask; kernels may compute them
    # anew.
    Op(
        "attention_backward",
        ("grad_out", "q", "k", "v", "output", "lse", "attn_mask"),
        ("grad_q", "grad_k", "grad_v"),
        optional=frozenset({"attn_mask"}),
        singles=frozenset({"lse"}),
        attrs=_ATTRS,
    ),
    # Results of attention to parts of the keys, out (...,Dv), and the log-sum-exp of their rows, lse float32 (...)
    # -> those of attention to all of them. A part whose lse is -inf adds nothing, whatever its out holds. Parts
    # that are given come first.
    Op(
        "merge_attention",
        MERGE_INPUTS,
        ("out", "lse"),
        optional=frozenset(MERGE_INPUTS[4:]),
        singles=frozenset(MERGE_INPUTS[1::2]),
    ),
    # Sequences one after the other: q (Tq,Hq,D), k (Tk,Hk,D), v (Tk,Hk,Dv) -> (Tq,Hq,Dv). cu_seqlens_q and
    # cu_seqlens_k int32 (N+1): sequence n has the queries cu_seqlens_q[n] to cu_seqlens_q[n+1], and those keys.
    Op(
        "attention_varlen",
        ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"),
        indices=frozenset({"cu_seqlens_q", "cu_seqlens_k"}),
        attrs=("is_causal", "scale", "causal_alignment"),
    ),
    # As attention_forward, of sequences one after the other: tensors as attention_varlen has them, sinks and slopes
    # as attention, slopes (1|N,Hq) -> out (Tq,Hq,Dv), lse float32 (Tq,Hq).
    Op(
        "attention_varlen_forward",
        ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", *_OF_HEADS),
        ("out", "lse"),
        optional=frozenset(_OF_HEADS),
        indices=frozenset({"cu_seqlens_q", "cu_seqlens_k"}),
        singles=frozenset({"alibi_slopes"}),
        attrs=("is_causal", "scale", "causal_alignment", *OPTIONS),
        options=frozenset(OPTIONS),
    ),
    # One query a sequence: q (B,Hq,D), k_cache (N,P,Hk,D), v_cache (N,P,Hk,Dv) -> (B,Hq,Dv). Key j of sequence b is
    # in slot j % P of block block_tables[b, j // P], for j below seq_lens[b]. block_tables int32 (B,M), seq_lens
    # int32 (B). Slots and table entries that no key is in may hold anything. k_scale, v_scale float32 (1|Hk), both or
    # neither: of caches of 8 bits, one of SCALED_CACHES, which stand for their numbers times these; q has one of
    # SCALED_DTYPES then.
    Op(
        "paged_attention",
        ("q", "k_cache", "v_cache", "block_tables", "seq_lens", *SCALES),
        optional=frozenset(SCALES),
        indices=frozenset({"block_tables", "seq_lens"}),
        singles=frozenset(SCALES),
        attrs=("scale",),
    ),
    # As attention_forward, of queries to a paged cache: q (T,Hq,D), sequence b having the queries cu_seqlens_q[b]
    # to cu_seqlens_q[b+1], without cu_seqlens_q one each; caches, tables, lengths, scales as paged_attention has them.
    # The place of a sequence's last query is its last key -> out (T,Hq,Dv), lse float32 (T,Hq).
    Op(
        "paged_attention_forward",
        ("q", "k_cache", "v_cache", "block_tables", "seq_lens", "cu_seqlens_q", *_OF_HEADS, *SCALES),
        ("out", "lse"),
        optional=frozenset({"cu_seqlens_q", *_OF_HEADS, *SCALES}),
        indices=frozenset({"block_tables", "seq_lens", "cu_seqlens_q"}),
        singles=frozenset({"alibi_slopes", *SCALES}),
        attrs=("is_causal", "scale", *OPTIONS),
        options=frozenset(OPTIONS),
    ),
    # Multi-head latent attention, one query a sequence: q_nope (B,H,C), which the up-projection of keys is in already,
    # and q_pe (B,H,R), to latent vectors ckv_cache (N,P,C) and rotated keys kpe_cache (N,P,R), which all heads share:
    # the scores are scale (q_nope ckv + q_pe kpe), the values ckv. Tables and lengths as paged_attention -> out
    # (B,H,C), lse float32 (B,H), natural, -inf for a sequence of no keys.
    Op(
        "mla_decode",
        ("q_nope", "q_pe", "ckv_cache", "kpe_cache", "block_tables", "seq_lens"),
        ("out", "lse"),
        indices=frozenset({"block_tables", "seq_lens"}),
        attrs=("scale",),
    ),
    # key (T,Hk,D), value (T,Hk,Dv) into k_cache (N,P,Hk,D), v_cache (N,P,Hk,Dv): token t goes to slot slots[t] % P
    # of block slots[t] // P. slots int32|int64 (T). A negative slot stores nothing. One from N*P on is
    # InvalidArgument on the CPU and stores nothing on a GPU. Equal ones: one of their tokens. Idempotent: the same
    # values go to the same slots. With scales, as paged_attention has them, what quantize makes of each row: divided by
    # its head's in float32, rounded to nearest, ties to even, cut to the finite range; NaN stays, in int8 it is 0.
    Op(
        "append_kv",
        ("key", "value", "k_cache", "v_cache", "slots", *SCALES),
        ("k_cache", "v_cache"),
        optional=frozenset(SCALES),
        indices=frozenset({"slots"}),
        singles=frozenset(SCALES),
    ),
    # The reverse: key (T,Hk,D) and value (T,Hk,Dv) are what is in these slots, 0 for a negative one; for one from N*P
    # on InvalidArgument on the CPU and 0 on a GPU. With scales their product, of float32, in `dtype`, one of
    # SCALED_DTYPES; without there is no such attribute.
    Op(
        "gather_kv",
        ("k_cache", "v_cache", "slots", *SCALES),
        ("key", "value"),
        optional=frozenset(SCALES),
        indices=frozenset({"slots"}),
        singles=frozenset(SCALES),
        attrs=("dtype",),
        options=frozenset({"dtype"}),
    ),
    # Block sources[n] of both caches into block targets[n], int32|int64 (N) of one dtype. A pair with a negative number
    # copies nothing. One from the number of blocks on, and a target that is another pair's source, are InvalidArgument
    # on the CPU; on a GPU the first copies nothing. Equal targets: one of their sources. Idempotent: no source changes.
    Op(
        "copy_kv_blocks",
        ("k_cache", "v_cache", "sources", "targets"),
        ("k_cache", "v_cache"),
        indices=frozenset({"sources", "targets"}),
    ),
)
