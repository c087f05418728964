"""The ops of torch.ops.layerzero: one entry each, with all that torch is told of it. registration.py does the telling.

A new op is an entry here, its fake function in fakes.py, and where it has them a formula in gradients.py and a batch
rule in batching.py."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import layerzero as lz
from layerzero.torch import (
    activations,
    attention,
    autocasting,
    batching,
    channel_norms,
    elementwise,
    experts,
    fakes,
    gradients,
    losses,
    norms,
    quantized,
    vision,
)
from layerzero.torch.op_entry import ANY, OpEntry


def _sample(logits: Tensor, seed: Tensor, offset: Tensor, *settings: Tensor | None, **options: Any) -> Tensor:
    """lz.sample, whose seed and offset come last."""
    found: Tensor = lz.sample(logits, *settings, **options, seed=seed, offset=offset)  # type: ignore[misc]
    return found


_TABLES = frozenset({"cos", "sin"})
_OPTIONS = "int[2] window_size=[-1, -1], float softcap=0.0"
_OF_HEADS = "Tensor? sinks=None, Tensor? alibi_slopes=None"
_RULE = (
    'bool is_causal=False, float? scale=None, bool enable_gqa=False, str layout="BHSD", str causal_alignment="top_left"'
)

TABLE: dict[str, OpEntry] = {
    entry.name: entry
    for entry in (
        OpEntry(
            "attention",
            "Tensor q, Tensor k, Tensor v, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, "
            f"float? scale=None, bool enable_gqa=False, {_OF_HEADS}, *, "
            f'str layout="BHSD", str causal_alignment="top_left", {_OPTIONS}',
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
            f"Tensor q, Tensor k, Tensor v, Tensor? attn_mask=None, {_OF_HEADS}, *, {_RULE}, {_OPTIONS}",
            fakes.attention_forward,
            autocast=autocasting.lower,
            singles=frozenset({"alibi_slopes"}),
            results=2,
            runs=attention.attention_forward,
        ),
        OpEntry(
            "attention_backward",
            "Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor output, Tensor lse, Tensor? attn_mask=None, *, "
            + _RULE,
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
            "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor seq_lens, *, float? scale=None, "
            'str kv_layout="NHD"',
            fakes.paged_attention,
        ),
        OpEntry(
            "paged_attention_forward",
            "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor seq_lens, "
            f"Tensor? cu_seqlens_q=None, {_OF_HEADS}, *, bool is_causal=False, float? scale=None, {_OPTIONS}, "
            'str kv_layout="NHD"',
            fakes.paged_attention_forward,
            results=2,
        ),
        OpEntry(
            "append_kv",
            'Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, *, str kv_layout="NHD"',
            fakes.append_kv,
            mutates=True,
        ),
        OpEntry(
            "gather_kv",
            'Tensor k_cache, Tensor v_cache, Tensor slots, *, str kv_layout="NHD"',
            fakes.gather_kv,
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
        OpEntry(
            "matmul",
            "Tensor a, Tensor b",
            fakes.matmul,
            gradients.matmul,
            {"a": frozenset({"b"}), "b": frozenset({"a"})},
            autocasting.lower,
            batching.matmul,
        ),
        OpEntry(
            "addmm",
            "Tensor input, Tensor a, Tensor b, *, float beta=1.0, float alpha=1.0",
            fakes.addmm,
            gradients.addmm,
            {"a": frozenset({"b"}), "b": frozenset({"a"})},
            autocasting.lower,
            batching.addmm,
        ),
        OpEntry(
            "linear",
            "Tensor input, Tensor weight, Tensor? bias=None, str? activation=None",
            fakes.linear,
            gradients.linear,
            {
                "input": frozenset({"weight", "activation"}),
                "weight": frozenset({"input", "activation"}),
                "bias": frozenset({"activation"}),
            },
            autocasting.lower,
            batching.linear,
        ),
        OpEntry(
            "gated_mlp",
            'Tensor input, Tensor gate_up, Tensor down, str activation="silu"',
            fakes.gated_mlp,
            gradients.gated_mlp,
            {"input": ANY, "gate_up": ANY, "down": frozenset({"input", "gate_up"})},
            autocasting.lower,
            batching.gated_mlp,
        ),
        *experts.ENTRIES,
        *losses.ENTRIES,
        OpEntry(
            "conv",
            vision.CONV_ARGUMENTS,
            vision.conv_fake,
            vision.conv_gradients,
            {"input": ANY, "weight": ANY, "bias": frozenset({"activation"})},
            autocasting.lower,
            vision.conv_batch,
            runs=vision.conv,
        ),
        OpEntry(
            "conv_transpose",
            vision.CONV_TRANSPOSE_ARGUMENTS,
            vision.conv_transpose_fake,
            vision.conv_transpose_gradients,
            {"input": ANY, "weight": ANY, "bias": frozenset({"activation"})},
            autocasting.lower,
            vision.conv_transpose_batch,
            runs=vision.conv_transpose,
        ),
        OpEntry(
            "max_pool",
            "Tensor input, int[1] kernel_size, int[1] stride=[], int[1] padding=0, int[1] dilation=1, "
            "bool ceil_mode=False",
            vision.pool_fake("max_pool"),
            vision.max_pool_gradients,
            {"input": ANY},
            batch=vision.pool_batch("max_pool"),
            runs=vision.max_pool,
        ),
        OpEntry(
            "avg_pool",
            "Tensor input, int[1] kernel_size, int[1] stride=[], int[1] padding=0, bool ceil_mode=False, "
            "bool count_include_pad=True, int? divisor_override=None",
            vision.pool_fake("avg_pool"),
            vision.avg_pool_gradients,
            batch=vision.pool_batch("avg_pool"),
            runs=vision.avg_pool,
        ),
        *(
            OpEntry(name, "Tensor input, int[1] output_size", fake, formula, dict.fromkeys(saves, ANY), batch=batch)
            for name, fake, formula, saves, batch in vision.ADAPTIVE
        ),
        OpEntry(
            "interpolate",
            'Tensor input, int[1]? size=None, float[]? scale_factor=None, str mode="nearest", '
            "bool? align_corners=None, bool? recompute_scale_factor=None, bool antialias=False",
            vision.interpolate_fake,
            vision.interpolate_gradients,
            batch=vision.pool_batch("interpolate"),
        ),
        *(
            OpEntry(
                name,
                "Tensor input, int dim, *, str? dtype=None",
                fakes.softmax(name),
                formula,
                {"out": ANY},
                autocasting.single,
                batching.softmax(name),
            )
            for name, formula in (("softmax", gradients.softmax), ("log_softmax", gradients.log_softmax))
        ),
        OpEntry(
            "add_rms_norm",
            "Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None",
            fakes.add_rms_norm,
            gradients.add_rms_norm,
            {"summed": frozenset({"input", "residual", "weight"}), "weight": frozenset({"input", "residual"})},
            autocasting.single,
            batching.add_rms_norm,
            results=2,
            outs=("out", "summed"),
            also_saved="summed",
            backward="rms_norm_backward",
        ),
        OpEntry(
            "group_norm",
            "Tensor input, int num_groups, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, "
            "str? activation=None",
            fakes.group_norm,
            channel_norms.group_norm_gradients,
            {
                "input": frozenset({"input", "weight", "activation"}),
                "weight": frozenset({"input", "activation"}),
                "bias": frozenset({"activation"}),
            },
            autocasting.single,
            batching.group_norm,
        ),
        OpEntry(
            "instance_norm",
            "Tensor input, Tensor? weight=None, Tensor? bias=None, float eps=1e-05",
            fakes.instance_norm,
            channel_norms.group_norm_gradients,
            {"input": frozenset({"input", "weight"}), "weight": frozenset({"input"})},
            autocasting.single,
            batching.instance_norm,
            runs=channel_norms.instance_norm,
        ),
        OpEntry(
            "batch_norm",
            "Tensor input, Tensor running_mean, Tensor running_var, Tensor? weight=None, Tensor? bias=None, "
            "bool training=False, float momentum=0.1, float eps=1e-05",
            fakes.batch_norm,
            channel_norms.batch_norm_gradients,
            {
                "input": frozenset({"weight", "running_var"}),
                "running_mean": frozenset({"weight", "running_var"}),
                "running_var": frozenset({"input", "weight", "running_mean", "running_var"}),
                "weight": frozenset({"input", "running_mean", "running_var"}),
            },
            autocasting.single,
            batching.batch_norm,
        ),
        OpEntry(
            "layer_norm",
            "Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05",
            fakes.layer_norm,
            gradients.layer_norm,
            {"input": ANY, "weight": frozenset({"input"})},
            autocasting.single,
            batching.layer_norm,
            backward="layer_norm_backward",
        ),
        OpEntry(
            "rms_norm",
            "Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None",
            fakes.rms_norm,
            gradients.rms_norm,
            {"input": ANY, "weight": frozenset({"input"})},
            autocasting.single,
            batching.rms_norm,
            backward="rms_norm_backward",
        ),
        OpEntry(
            "layer_norm_backward",
            "Tensor grad_out, Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float eps=1e-05",
            fakes.layer_norm_backward,
            results=3,
            runs=norms.layer_norm_backward,
        ),
        OpEntry(
            "rms_norm_backward",
            "Tensor grad_out, Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None",
            fakes.rms_norm_backward,
            results=2,
            runs=norms.rms_norm_backward,
        ),
        OpEntry(
            "gelu",
            'Tensor input, str approximate="none"',
            fakes.gelu,
            gradients.gelu,
            {"input": ANY},
            batch=batching.gelu,
        ),
        OpEntry("silu", "Tensor input", fakes.silu, gradients.silu, {"input": ANY}, batch=batching.silu),
        OpEntry(
            "swiglu",
            "Tensor gate, Tensor up",
            fakes.gated("swiglu"),
            gradients.swiglu,
            {"gate": ANY, "up": frozenset({"gate"})},
            autocasting.widest,
            batching.gated("swiglu"),
        ),
        *(
            OpEntry(name, "Tensor input", fakes.silu, formula, {"input": ANY}, batch=batching.each(name))
            for name, formula in activations.FORMULAS.items()
        ),
        OpEntry(
            "geglu",
            'Tensor gate, Tensor up, str approximate="none"',
            fakes.gated("geglu"),
            activations.geglu,
            {"gate": ANY, "up": frozenset({"gate"})},
            autocasting.widest,
            batching.gated("geglu"),
        ),
        OpEntry(
            "reglu",
            "Tensor gate, Tensor up",
            fakes.gated("reglu"),
            activations.reglu,
            {"gate": ANY, "up": frozenset({"gate"})},
            autocasting.widest,
            batching.gated("reglu"),
        ),
        OpEntry(
            "add",
            "Tensor input, Tensor other",
            elementwise.pair_fake("add"),
            elementwise.add_gradients,
            autocast=autocasting.widest,
            batch=elementwise.by_elements("add", 2),
        ),
        OpEntry(
            "mul",
            "Tensor input, Tensor other",
            elementwise.pair_fake("mul"),
            elementwise.mul_gradients,
            {"input": frozenset({"other"}), "other": frozenset({"input"})},
            autocasting.widest,
            elementwise.by_elements("mul", 2),
        ),
        OpEntry(
            "clamp",
            "Tensor input, Scalar? min=None, Scalar? max=None",
            elementwise.clamp_fake,
            elementwise.clamp_gradients,
            {"input": ANY},
            batch=elementwise.by_elements("clamp", 1),
        ),
        OpEntry(
            "where",
            "Tensor condition, Tensor input, Tensor other",
            elementwise.where_fake,
            elementwise.where_gradients,
            {"condition": ANY},
            autocasting.widest,
            elementwise.by_elements("where", 3),
        ),
        OpEntry(
            "cat",
            elementwise.CAT_ARGUMENTS,
            elementwise.cat_fake,
            elementwise.cat_gradients,
            autocast=autocasting.widest,
            batch=elementwise.cat_batch,
            runs=elementwise.cat,
        ),
        OpEntry(
            "cast",
            "Tensor input, str dtype",
            elementwise.cast_fake,
            elementwise.cast_gradients,
            batch=elementwise.by_elements("cast", 1),
        ),
        OpEntry(
            "quantize",
            'Tensor x, Tensor scale, Tensor? zero_point=None, *, str dtype="float8_e4m3fn"',
            quantized.quantize_fake,
            batch=quantized.quantize_batch,
        ),
        OpEntry(
            "dequantize",
            'Tensor x, Tensor scale, Tensor? zero_point=None, *, str dtype="float32"',
            quantized.dequantize_fake,
            batch=quantized.dequantize_batch,
        ),
        OpEntry(
            "dynamic_quantize",
            'Tensor x, *, str dtype="int8", int group_size=-1, bool symmetric=True',
            quantized.dynamic_quantize_fake,
            results=3,
        ),
        OpEntry(
            "int_matmul",
            "Tensor a, Tensor b, Tensor? a_zero_point=None, Tensor? b_zero_point=None",
            quantized.int_matmul_fake,
        ),
        OpEntry(
            "scaled_linear",
            "Tensor x, Tensor weight, Tensor weight_scale, Tensor? x_scale=None, Tensor? bias=None, "
            "Tensor? x_zero_point=None, Tensor? weight_zero_point=None, *, str? dtype=None, "
            'str weight_format=""',
            quantized.scaled_linear_fake,
        ),
        OpEntry(
            "embedding",
            "Tensor input, Tensor weight, *, int padding_idx=-1, bool scale_grad_by_freq=False, bool sparse=False",
            fakes.embedding,
            gradients.embedding,
            {"input": ANY},
            batch=batching.embedding,
            only_here=frozenset({"padding_idx", "scale_grad_by_freq", "sparse"}),
        ),
        OpEntry(
            "penalize_logits",
            "Tensor logits, Tensor token_ids, Tensor? repetition_penalty=None, Tensor? presence_penalty=None, "
            "Tensor? frequency_penalty=None",
            fakes.like_logits("penalize_logits"),
        ),
        OpEntry(
            "filter_logits",
            "Tensor logits, Tensor? temperature=None, Tensor? top_k=None, Tensor? top_p=None, Tensor? min_p=None",
            fakes.like_logits("filter_logits"),
        ),
        OpEntry(
            "sample",
            "Tensor logits, Tensor seed, Tensor offset, Tensor? temperature=None, Tensor? top_k=None, "
            "Tensor? top_p=None, Tensor? min_p=None",
            fakes.sample,
            runs=_sample,
        ),
        OpEntry(
            "speculative_verify",
            "Tensor target_probs, Tensor draft_ids, Tensor? draft_probs, Tensor seed, Tensor offset",
            fakes.speculative_verify,
            results=2,
        ),
        OpEntry("tree_accept", "Tensor draft_ids, Tensor parents, Tensor target_ids", fakes.tree_accept, results=3),
    )
}
