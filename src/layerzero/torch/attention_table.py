"""Entries of attention, of caches and of positions: a part of table.py."""

from __future__ import annotations

from layerzero.torch import attention, autocasting, batching, fakes, gradients
from layerzero.torch.op_entry import ANY, OpEntry

_TABLES = frozenset({"cos", "sin"})
_OPTIONS = "int[2] window_size=[-1, -1], float softcap=0.0"
_BLOCKS = "int[2]? mask_block_size=None"
_OF_HEADS = "Tensor? sinks=None, Tensor? alibi_slopes=None"
_SCALES = "Tensor? k_scale=None, Tensor? v_scale=None"
_RULE = (
    'bool is_causal=False, float? scale=None, bool enable_gqa=False, str layout="BHSD", str causal_alignment="top_left"'
)

ENTRIES: tuple[OpEntry, ...] = (
    OpEntry(
        "attention",
        "Tensor q, Tensor k, Tensor v, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, "
        f"float? scale=None, bool enable_gqa=False, {_OF_HEADS}, *, "
        f'str layout="BHSD", str causal_alignment="top_left", {_OPTIONS}, {_BLOCKS}',
        fakes.attention,
        gradients.attention,
        dict.fromkeys(("q", "k", "v", "attn_mask", "sinks", "alibi_slopes", "out", "lse"), ANY),
        autocasting.lower,
        batching.attention,
        singles=frozenset({"alibi_slopes"}),
        with_gradients="attention_forward",
        also_saved="lse",
        backward="attention_backward",
        by_torch=attention.with_dropout,
    ),
    OpEntry(
        "attention_forward",
        f"Tensor q, Tensor k, Tensor v, Tensor? attn_mask=None, {_OF_HEADS}, *, {_RULE}, {_OPTIONS}, {_BLOCKS}",
        fakes.attention_forward,
        autocast=autocasting.lower,
        singles=frozenset({"alibi_slopes"}),
        results=2,
        runs=attention.attention_forward,
    ),
    OpEntry(
        "attention_backward",
        "Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor output, Tensor lse, Tensor? attn_mask=None, *, " + _RULE,
        fakes.attention_backward,
        results=3,
        runs=attention.attention_backward,
    ),
    OpEntry(
        "merge_attention",
        "Tensor out0, Tensor lse0, Tensor out1, Tensor lse1, Tensor? out2=None, Tensor? lse2=None, "
        'Tensor? out3=None, Tensor? lse3=None, *, str layout="BHSD"',
        fakes.merge_attention,
        results=2,
    ),
    OpEntry(
        "attention_varlen",
        "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, *, bool is_causal=False, "
        'float? scale=None, str causal_alignment="top_left"',
        fakes.attention_varlen,
        autocast=autocasting.lower,
    ),
    OpEntry(
        "attention_varlen_forward",
        f"Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, {_OF_HEADS}, *, "
        f'bool is_causal=False, float? scale=None, str causal_alignment="top_left", {_OPTIONS}',
        fakes.attention_varlen_forward,
        autocast=autocasting.lower,
        singles=frozenset({"alibi_slopes"}),
        results=2,
    ),
    OpEntry(
        "paged_attention",
        f"Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor seq_lens, {_SCALES}, *, "
        'float? scale=None, str kv_layout="NHD"',
        fakes.paged_attention,
        singles=frozenset({"k_scale", "v_scale"}),
    ),
    OpEntry(
        "paged_attention_forward",
        "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor seq_lens, "
        f"Tensor? cu_seqlens_q=None, {_OF_HEADS}, {_SCALES}, *, bool is_causal=False, float? scale=None, "
        f'{_OPTIONS}, str kv_layout="NHD"',
        fakes.paged_attention_forward,
        singles=frozenset({"alibi_slopes", "k_scale", "v_scale"}),
        results=2,
    ),
    OpEntry(
        "mla_decode",
        "Tensor q_nope, Tensor q_pe, Tensor ckv_cache, Tensor kpe_cache, Tensor block_tables, Tensor seq_lens, *, "
        "float scale",
        fakes.mla_decode,
        results=2,
    ),
    OpEntry(
        "append_kv",
        f"Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, {_SCALES}, *, "
        'str kv_layout="NHD"',
        fakes.append_kv,
        singles=frozenset({"k_scale", "v_scale"}),
        mutates=True,
    ),
    OpEntry(
        "gather_kv",
        f'Tensor k_cache, Tensor v_cache, Tensor slots, {_SCALES}, *, str? dtype=None, str kv_layout="NHD"',
        fakes.gather_kv,
        singles=frozenset({"k_scale", "v_scale"}),
        results=2,
    ),
    OpEntry(
        "copy_kv_blocks",
        'Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor sources, Tensor targets, *, str kv_layout="NHD"',
        fakes.copy_kv_blocks,
        mutates=True,
    ),
    OpEntry(
        "rope",
        "Tensor x, Tensor cos, Tensor sin, *, bool interleaved=False",
        fakes.rope,
        gradients.rope,
        {"x": _TABLES, "cos": ANY, "sin": ANY},
        autocasting.first,
        batching.rope,
    ),
    OpEntry(
        "rope_qk",
        "Tensor q, Tensor k, Tensor cos, Tensor sin, *, bool interleaved=False",
        fakes.rope_qk,
        gradients.rope_qk,
        {"q": _TABLES, "k": _TABLES, "cos": ANY, "sin": ANY},
        autocasting.first,
        batching.rope_qk,
        results=2,
        outs=("q_out", "k_out"),
    ),
)
