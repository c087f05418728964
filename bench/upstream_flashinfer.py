"""FlashInfer's functions and wrappers as calls of LayerZero, for its own tests.

The wrappers have its `plan` and `run`. Where a test compares a wrapper with one of the functions of a single sequence,
that function is attention in float32 here, written out in torch: neither side is the other's kernel. Its `warmup_jit`
fixtures, which compile its kernels for this process, are passed over: none of them runs here.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import flashinfer
import torch
from torch import Tensor
from upstream_common import Calls, unserved

from layerzero import rotary
from layerzero.engines import pages

calls = Calls()
TESTS = {
    "tests/utils/test_norm.py": (
        *("test_norm", "test_qknorm", "test_fused_add_rmsnorm", "test_gemma_norm", "test_gemma_fused_add_rmsnorm"),
        *(
            "test_layernorm",
            "test_rmsnorm_int64_stride",
            "test_qknorm_int64_stride",
            "test_fused_add_rmsnorm_int64_stride",
        ),
        *("test_rmsnorm_contiguous_overflow", "test_fused_add_rmsnorm_contiguous_overflow"),
    ),
    "tests/utils/test_activation.py": ("test_fused_silu_mul", "test_fused_gelu_tanh_mul", "test_fused_gelu_mul"),
    "tests/attention/test_rope.py": ("test_rope", "test_rope_pos_ids", "test_rope_cos_sin_cache"),
    "tests/attention/test_single_prefill.py": ("test_sinqle_prefill_with_paged_kv_cache",),
    "tests/attention/test_logits_cap.py": ("test_single_decode_logits_soft_cap", "test_single_prefill_logits_soft_cap"),
    "tests/attention/test_sliding_window.py": (
        *(
            "test_single_decode_sliding_window",
            "test_batch_decode_sliding_window",
            "test_single_prefill_sliding_window",
        ),
        *("test_single_decode_prefill_sliding_window_match", "test_batch_paged_prefill_sliding_window"),
        "test_batch_ragged_prefill_sliding_window",
    ),
    "tests/attention/test_alibi.py": ("test_single_decode_alibi", "test_single_prefill_alibi"),
    "tests/attention/test_decode_prefill_lse.py": ("test_mlc_failed_case",),
    "tests/attention/test_non_contiguous_decode.py": ("test_batch_paged_decode_packed_input",),
    "tests/attention/test_non_contiguous_prefill.py": (
        *("test_single_prefill_packed_input", "test_batch_ragged_prefill_packed_input"),
        "test_batch_paged_prefill_packed_input",
    ),
    "tests/attention/test_batch_decode_kernels.py": (
        *("test_batch_decode_with_paged_kv_cache", "test_batch_decode_with_tuple_paged_kv_cache"),
    ),
    "tests/attention/test_batch_prefill_kernels.py": (
        *("test_batch_prefill_with_paged_kv_cache", "test_batch_prefill_with_paged_kv_cache_head_dim_512"),
        *("test_batch_prefill_with_tuple_paged_kv_cache", "test_batch_prefill_with_ragged_kv_cache"),
        *("test_batch_prefill_with_ragged_kv_cache_head_dim_512", "test_batch_prefill_with_paged_kv_cache_custom_mask"),
        "test_batch_prefill_with_ragged_kv_cache_custom_mask",
    ),
}
"""Their files and the functions in them that test what some op of ours computes."""
OPS = (
    *("rms_norm", "add_rms_norm", "layer_norm", "swiglu", "geglu", "rope", "attention", "attention_forward"),
    *("attention_varlen", "attention_varlen_forward", "paged_attention", "paged_attention_forward"),
)
DTYPES = ("float16", "float32")
PYTEST = ("--noconftest",)  # theirs compiles kernels for this process
# Here functions of a single sequence are what wrappers are compared with.
WRAPPERS = ("test_batch_decode_kernels.py", "test_batch_prefill_kernels.py")
# Arguments on which no result depends.
INERT = frozenset(
    {
        *("enable_pdl", "backend", "use_tensor_cores", "use_fp16_qk_reduction", "non_blocking", "rope_scale"),
        *("rope_theta", "disable_split_kv", "fixed_split_size", "use_cuda_graph", "out", "lse", "q_data_type"),
        *("kv_data_type", "data_type", "max_token_per_sequence", "max_sequence_kv", "num_qo_heads", "num_kv_heads"),
        *("head_dim", "head_dim_qk", "head_dim_vo", "jit_args", "seq_lens", "seq_lens_q", "float_workspace_buffer"),
    }
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "window_left": (-1,),
    "logits_soft_cap": (0, 0.0),
    "pos_encoding_mode": ("NONE",),
    "token_pos_in_items_len": (0,),
    "q_len_per_req": (1,),
}


def given(original: Any, args: tuple[Any, ...], options: dict[str, Any], *served: str) -> dict[str, Any]:
    """The arguments of a call by name. Skips the test where one that is not `served` asks for something."""
    bound = inspect.signature(original).bind(*args, **options)
    bound.apply_defaults()
    found = dict(bound.arguments)
    found |= found.pop("kwargs", {})
    for name, value in found.items():
        if name in served or name in INERT or name == "self" or value is None or value is False or value == ():
            continue
        if isinstance(value, Tensor) or not (value in NEUTRAL.get(name, ()) or ("scale" in name and value == 1)):
            unserved(f"{original.__name__} with {name}" + ("" if isinstance(value, Tensor) else f" {value}"))
    return found


def into(target: Tensor | None, made: Tensor) -> Tensor:
    return made if target is None else target.copy_(made)


# --- norms and activations


def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: Any = None) -> Any:
    if out is None:
        return calls("rms_norm", input, tuple(weight.shape), weight, eps)
    return calls("rms_norm", input, tuple(weight.shape), weight, eps, out=out)


def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: Any = None
) -> None:
    made, total = calls("add_rms_norm", input, residual, tuple(weight.shape), weight, eps)
    input.copy_(made)
    residual.copy_(total)


def gemma_rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: Any = None
) -> Any:
    """In float32: weights that are rounded after 1 was added would be others."""
    made = calls("rms_norm", input.float(), tuple(weight.shape), weight.float() + 1, eps)
    return into(out, made.to(input.dtype))


def gemma_fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: Any = None
) -> None:
    residual.add_(input)
    gemma_rmsnorm(residual, weight, eps, input)


def layernorm(input: Tensor, gemma: Tensor, beta: Tensor, eps: float = 1e-6) -> Any:
    if gemma.dtype != input.dtype:
        unserved("layernorm with weights of another dtype")
    return calls("layer_norm", input, tuple(gemma.shape), gemma, beta, eps)


def gated(op: str, **attributes: Any) -> Callable[..., Any]:
    def function(input: Tensor, out: Tensor | None = None, enable_pdl: Any = None) -> Any:
        gate, up = input.chunk(2, -1)
        return into(out, calls(op, gate, up, **attributes))

    return function


# --- rotary positions


def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleave: bool) -> tuple[Tensor, Tensor]:
    """In float32, as FlashInfer computes it, whose tables are of that dtype; in q's where its backend is asked for,
    which takes no other."""
    wide = q.dtype if calls.backend and calls.backend.startswith("flashinfer") else torch.float32
    made = [calls("rope", x.to(wide), cos.to(wide), sin.to(wide), interleaved=interleave).to(x.dtype) for x in (q, k)]
    return made[0], made[1]


def rope(original: Any, *, by_ids: bool, in_place: bool) -> Callable[..., Any]:
    scaled = "llama31" in original.__name__
    served = ("q", "k", "pos_ids", "indptr", "offsets", "rotary_dim", "interleave", "rope_scale", "rope_theta")

    def function(*args: Any, **options: Any) -> Any:
        llama = ("low_freq_factor", "high_freq_factor", "old_context_len") if scaled else ()
        call = given(original, args, options, *served, *llama)
        q, k = call["q"], call["k"]
        if by_ids:
            positions = call["pos_ids"].cpu()
        else:
            counts = call["indptr"].diff().cpu()
            starts = call["offsets"].cpu()
            positions = torch.cat([torch.arange(int(n)) + int(at) for n, at in zip(counts, starts, strict=True)])
        dim = call["rotary_dim"] or q.shape[-1]
        parameters: dict[str, Any] = {"rope_type": "linear", "factor": call["rope_scale"]}
        if scaled:
            parameters = {
                "rope_type": "llama3",
                "factor": call["rope_scale"],
                "low_freq_factor": call["low_freq_factor"],
                "high_freq_factor": call["high_freq_factor"],
                "original_max_position_embeddings": int(call["old_context_len"]),
            }
        cos, sin = rotary.tables(positions.numpy(), dim, parameters, theta=call["rope_theta"], dtype="float32")
        of_cos, of_sin = (torch.from_numpy(table).to(q.device) for table in (cos, sin))
        made = turned(q, k, of_cos, of_sin, call["interleave"])
        if not in_place:
            return made
        q.copy_(made[0])
        k.copy_(made[1])
        return None

    return function


def rope_by_cache(original: Any, *, in_place: bool) -> Callable[..., Any]:
    def function(*args: Any, **options: Any) -> Any:
        call = given(original, args, options, "positions", "query", "key", "head_size", "cos_sin_cache", "is_neox")
        q, k = call["query"], call["key"]
        cos, sin = call["cos_sin_cache"][call["positions"].long()].float().chunk(2, -1)
        of_q, of_k = (x.reshape(x.shape[0], -1, call["head_size"]) for x in (q, k))
        made = turned(of_q, of_k, cos.contiguous(), sin.contiguous(), not call["is_neox"])
        shaped = [one.reshape(x.shape) for one, x in zip(made, (q, k), strict=True)]
        if not in_place:
            return tuple(shaped)
        q.copy_(shaped[0])
        k.copy_(shaped[1])
        return None

    return function


# --- attention


def options_of(call: dict[str, Any], heads: int, device: Any) -> dict[str, Any]:
    """What of a call the ops with options have."""
    found: dict[str, Any] = {}
    if call.get("window_left", -1) not in (-1, None):
        found["window_size"] = (call["window_left"], -1)
    if call.get("logits_soft_cap"):
        found["softcap"] = float(call["logits_soft_cap"])
    mode = call.get("pos_encoding_mode", "NONE")
    if mode == "ALIBI":
        found["alibi_slopes"] = slopes(heads).to(device)
    elif mode != "NONE":
        unserved(f"pos_encoding_mode {mode}")
    if call.get("sinks") is not None:
        found["sinks"] = call["sinks"]
    return found


def slopes(heads: int) -> Tensor:
    """Of ALiBi, for any number of heads: Press et al. 2022, as FlashInfer's kernels have them."""
    power = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return torch.tensor(first + [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)])


ATTENTION = ("q", "k", "v", "kv_layout", "sm_scale", "causal", "custom_mask", "window_left", "logits_soft_cap")
ALSO = ("return_lse", "pos_encoding_mode", "o_dtype", "sinks")


def single(original: Any, *, is_decode: bool) -> Callable[..., Any]:
    def function(*args: Any, **options: Any) -> Any:
        call = given(original, args, options, *ATTENTION, *ALSO)
        q = call["q"][None] if is_decode else call["q"]
        k, v = ((t if call["kv_layout"] == "NHD" else t.transpose(0, 1)) for t in (call["k"], call["v"]))
        if not q.dtype == k.dtype == v.dtype or call.get("o_dtype") not in (None, q.dtype):
            unserved("caches or results of another dtype")
        found = options_of(call, q.shape[1], q.device)
        if call.get("custom_mask") is not None:
            mask = call["custom_mask"].reshape(q.shape[0], k.shape[0])
            found["attn_mask"] = mask.bool() if mask.dtype == torch.uint8 else mask
        causal = bool(call.get("causal"))
        if "alibi_slopes" in found and not causal and q.shape[0] > 1:
            unserved("ALiBi that favours keys behind a query")
        if calls.file in WRAPPERS:
            out, lse = plain(q, k, v, causal, call["sm_scale"], found)
        else:
            found |= {"layout": "BSHD", "causal_alignment": "bottom_right", "enable_gqa": q.shape[1] != k.shape[1]}
            found |= {"is_causal": causal, "scale": call["sm_scale"]}
            tensors = (q[None], k[None], v[None])
            if call["return_lse"]:
                out, lse = calls("attention_forward", *tensors, **found)
                out, lse = out[0], lse[0].transpose(0, 1) / math.log(2)
            else:
                out, lse = calls("attention", *tensors, **found)[0], None
        made = (out[0] if is_decode else out).to(call["q"].dtype)
        return (made, lse[0] if is_decode else lse) if call["return_lse"] and lse is not None else made

    return function


def plain(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Attention in float32 by torch, one step after the other: what wrappers are compared with."""
    group, (queries, keys) = q.shape[1] // k.shape[1], (q.shape[0], k.shape[0])
    k, v = (t.float().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if "softcap" in options:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    places = torch.arange(queries, device=q.device)[:, None] + keys - queries
    at = torch.arange(keys, device=q.device)[None]
    if "alibi_slopes" in options:
        scores = scores - options["alibi_slopes"][:, None, None] * (places - at).abs()
    seen = at <= places if causal else torch.ones_like(at <= places)
    if "window_size" in options:
        seen = seen & (at >= places - options["window_size"][0])
    if "attn_mask" in options:
        seen = seen & options["attn_mask"]
    scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.softmax(scores, -1).nan_to_num()
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T / math.log(2)


class Wrapper:
    """What FlashInfer's wrappers share: a plan's arguments, and results where the caller wants them."""

    original: Any
    planned: tuple[str, ...]
    ran: tuple[str, ...] = ("q", "paged_kv_cache", "k", "v", "return_lse", "window_left", "sinks")

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *args: Any, **options: Any) -> None:
        given(self.original.__init__, (self, float_workspace_buffer, kv_layout, *args), options, "kv_layout")
        self.kv_layout = kv_layout

    def plan(self, *args: Any, **options: Any) -> None:
        found = given(self.original.plan, (self, *args), options, *self.planned, *ATTENTION, *ALSO)
        self.call = {"sm_scale": None, "causal": False, **found}
        wanted, made = self.call.get("o_data_type"), self.call.get("q_data_type")
        if wanted not in (None, made):
            unserved("results of another dtype")

    def run(self, *args: Any, **options: Any) -> Any:
        call = given(self.original.run, (self, *args), options, *self.ran)
        q = call["q"]
        found = options_of({**self.call, **{k: v for k, v in call.items() if v is not None}}, q.shape[1], q.device)
        made, lse = self.served(q, call, found)
        out = into(call.get("out"), made.to(q.dtype))
        if not call["return_lse"]:
            return out
        assert lse is not None
        return out, into(call.get("lse"), lse / math.log(2))

    def served(self, q: Tensor, call: dict[str, Any], options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError

    def paged(self, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
        cache = call["paged_kv_cache"]
        k, v = cache.unbind(1) if isinstance(cache, Tensor) else cache
        if k.dtype != call["q"].dtype and k.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            unserved(f"caches of {k.dtype}")
        return k, v

    def scales(self, k: Tensor, q: Tensor) -> dict[str, Any]:
        if k.dtype == q.dtype:
            return {}
        heads = k.shape[1] if self.kv_layout == "HND" else k.shape[2]
        ones = torch.ones(heads, device=q.device)
        return {"k_scale": ones, "v_scale": ones}

    def tables(self, k: Tensor, indptr: str) -> tuple[Tensor, Tensor]:
        names = (
            ("indices", "last_page_len") if "indices" in self.call else ("paged_kv_indices", "paged_kv_last_page_len")
        )
        indices, last = (self.call[name].to(k.device) for name in names)
        return pages.tables(self.call[indptr].to(k.device), indices, last, self.call["page_size"])


class PagedDecode(Wrapper):
    original = flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper
    planned = ("indptr", "indices", "last_page_len", "page_size")

    def served(self, q: Tensor, call: dict[str, Any], options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        k, v = self.paged(call)
        blocks, lengths = self.tables(k, "indptr")
        options |= {"scale": self.call["sm_scale"], "kv_layout": self.kv_layout, **self.scales(k, q)}
        if not call["return_lse"] and not {"window_size", "softcap", "alibi_slopes", "sinks"} & set(options):
            return calls("paged_attention", q.contiguous(), k, v, blocks, lengths, **options), None
        made: tuple[Tensor, Tensor] = calls("paged_attention_forward", q.contiguous(), k, v, blocks, lengths, **options)
        return made


class PagedPrefill(Wrapper):
    original = flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper
    planned = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "page_size")

    def served(self, q: Tensor, call: dict[str, Any], options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        if self.call.get("custom_mask") is not None:
            unserved("a mask of pages")
        k, v = self.paged(call)
        blocks, lengths = self.tables(k, "paged_kv_indptr")
        starts = self.call["qo_indptr"].to(q.device, torch.int32)
        options |= {"scale": self.call["sm_scale"], "is_causal": bool(self.call["causal"]), "kv_layout": self.kv_layout}
        options |= self.scales(k, q)
        made: tuple[Tensor, Tensor] = calls("paged_attention_forward", q, k, v, blocks, lengths, starts, **options)
        return made


class RaggedPrefill(Wrapper):
    original = flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper
    planned = ("qo_indptr", "kv_indptr")

    def served(self, q: Tensor, call: dict[str, Any], options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        if self.call.get("custom_mask") is not None:
            unserved("a mask of ragged sequences")
        if self.kv_layout != "NHD":
            unserved(f"ragged keys as {self.kv_layout}")
        starts = (self.call[name].to(q.device, torch.int32) for name in ("qo_indptr", "kv_indptr"))
        given_tensors = (q, call["k"], call["v"], *starts)
        options |= {"scale": self.call["sm_scale"], "is_causal": bool(self.call["causal"])}
        options["causal_alignment"] = "bottom_right"
        if not call["return_lse"] and not {"window_size", "softcap", "alibi_slopes", "sinks"} & set(options):
            return calls("attention_varlen", *given_tensors, **options), None
        made: tuple[Tensor, Tensor] = calls("attention_varlen_forward", *given_tensors, **options)
        return made


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    natural = (s * math.log(2) for s in (s_a, s_b))
    first, second = natural
    made, lse = calls("merge_attention", v_a, first, v_b, second)
    return made, lse / math.log(2)


def patch() -> None:
    """Puts the calls in the functions' places, in every module of the library that has their names."""
    flashinfer.utils.has_flashinfer_jit_cache = lambda: True
    made: dict[str, Any] = {
        "rmsnorm": rmsnorm,
        "fused_add_rmsnorm": fused_add_rmsnorm,
        "gemma_rmsnorm": gemma_rmsnorm,
        "gemma_fused_add_rmsnorm": gemma_fused_add_rmsnorm,
        "layernorm": layernorm,
        "silu_and_mul": gated("swiglu"),
        "gelu_and_mul": gated("geglu"),
        "gelu_tanh_and_mul": gated("geglu", approximate="tanh"),
        "single_prefill_with_kv_cache": single(flashinfer.prefill.single_prefill_with_kv_cache, is_decode=False),
        "single_decode_with_kv_cache": single(flashinfer.decode.single_decode_with_kv_cache, is_decode=True),
        "BatchDecodeWithPagedKVCacheWrapper": PagedDecode,
        "BatchPrefillWithPagedKVCacheWrapper": PagedPrefill,
        "BatchPrefillWithRaggedKVCacheWrapper": RaggedPrefill,
        "merge_state": merge_state,
    }
    for name in ("apply_rope", "apply_llama31_rope"):
        for by_ids in (False, True):
            for in_place in (False, True):
                full = name + ("_pos_ids" if by_ids else "") + ("_inplace" if in_place else "")
                made[full] = rope(getattr(flashinfer.rope, full), by_ids=by_ids, in_place=in_place)
    for in_place in (False, True):
        full = "apply_rope_with_cos_sin_cache" + ("_inplace" if in_place else "")
        made[full] = rope_by_cache(getattr(flashinfer.rope, full), in_place=in_place)
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "flashinfer"]:
        for name, function in made.items():
            if hasattr(module, name):
                setattr(module, name, function)
