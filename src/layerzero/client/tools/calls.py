"""The calls that tools measure, warm up and explain: an op with specs for its arrays, the device that these are on, and
typical ones of each op."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from layerzero.client.arrays.recognition import CPU, Array, describe
from layerzero.client.connection.overlay import Scope, only
from layerzero.client.connection.report import SelectionReport
from layerzero.client.facade import api, default_session
from layerzero.client.gpu.arrays import device_name, named_device
from layerzero.client.gpu.memory import ordinal_of
from layerzero.client.tools.compiling import compile_ahead
from layerzero.client.tools.inputs import random_inputs, tensor_names
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.names import unknown_name
from layerzero.ipc.vocabulary.ops import ACTIVATIONS, GATED, OPS, PUBLIC_OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec


def _f32(*shape: int) -> TensorSpec:
    return TensorSpec.contiguous("float32", shape)


@dataclass(frozen=True)
class Call:
    """A call to measure: an op, the specs of its arrays, its other parameters, and the device that the arrays are on:
    "cpu", or a GPU of this process as "cuda:0" or by its UUID."""

    op: str
    arrays: Mapping[str, TensorSpec | None] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"

    @classmethod
    def of(cls, op: str | Callable[..., Any], *args: Any, device: str | None = None, **kwargs: Any) -> Call:
        """lz.Call.of("matmul", a, b): as the call would be made; a TensorSpec may stand for an array. device: where
        those are for which specs stand ("cpu", "cuda", "cuda:1" or a GPU's UUID); arrays say where they are, and must
        be on one device. Raises InvalidArgument."""
        return _bind(_name(op), args, kwargs, device)

    @property
    def function(self) -> Callable[..., Any]:
        return api.function_of(self.op)

    def explain(self, backend: str | None = None) -> SelectionReport:
        """As lz.explain, of the call pinned to `backend`."""
        pinned = {} if backend is None else {"backend": backend}
        return api.explain(self.function, device=self.device, **{**self.arrays, **self.params, **pinned})

    def signature(self) -> bytes:
        """What the broker knows it by."""
        return api.signature(self.function, device=self.device, **self.arrays, **self.params)

    def compile(self, backends: Iterable[str]) -> None:
        """Wait until their kernels are compiled for it, or could not be."""
        compile_ahead(default_session.session(), self.signature(), list(backends))

    def arguments(self) -> dict[str, Any]:
        """What to call `function` with: random arrays, on the device, and the parameters. Raises EnvError without
        NumPy, OutOfMemory."""
        return {**random_inputs(self.op, self.arrays, seed=0, device=ordinal_of(self.device)), **self.params}

    def run_on(self, kernel_id: str, backend: str, arguments: Mapping[str, Any]) -> SelectionReport:
        """Run it on this very kernel, and wait for the result, on a GPU too. There `kernel_us` is of an earlier run on
        that kernel, 0 when no new time is known: a worker measures some runs, and tells with a later one. Raises what
        the op raises; no other kernel answers, and no other call's failure is raised."""
        return self.result_on(kernel_id, backend, arguments)[1]

    def result_on(self, kernel_id: str, backend: str, arguments: Mapping[str, Any]) -> tuple[Any, SelectionReport]:
        """As `run_on`, with the result."""
        with Scope(only(kernel_id)):
            return api.run_apart(self.function, **arguments, backend=backend)

    @property
    def is_on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def label(self) -> str:
        arrays = [f"{'x'.join(map(str, spec.shape))}:{spec.dtype}" for spec in self.arrays.values() if spec is not None]
        params = [f"{name}={value!r:.24}" for name, value in self.params.items()]
        return f"{self.op}({', '.join((*arrays, *params))})" + ("" if self.device == "cpu" else f" on {self.device}")


def _prefill_and_decode() -> tuple[Call, ...]:
    q, one, kv = _f32(1, 8, 256, 64), _f32(1, 8, 1, 64), _f32(1, 8, 1024, 64)
    causal = Call("attention", {"q": q, "k": q, "v": q}, {"is_causal": True})
    return causal, Call("attention", {"q": one, "k": kv, "v": kv})


def _backward() -> Call:
    names = ("grad_out", "q", "k", "v", "output")
    arrays = {**{name: _f32(1, 8, 256, 64) for name in names}, "lse": _f32(1, 8, 256)}
    return Call("attention_backward", arrays, {"is_causal": True})


def _norm_backward(op: str) -> Call:
    arrays = {"grad_out": _f32(256, 512), "input": _f32(256, 512), "weight": _f32(512)}
    return Call(op, arrays, {"normalized_shape": 512})


def _int32(*shape: int) -> TensorSpec:
    return TensorSpec.contiguous("int32", shape)


def _int8(*shape: int) -> TensorSpec:
    return TensorSpec.contiguous("int8", shape)


def _rope(tokens: int) -> Call:
    return Call("rope", {"x": _f32(tokens, 8, 64), "cos": _f32(tokens, 32), "sin": _f32(tokens, 32)})


def _rope_qk(tokens: int) -> Call:
    tables = {name: _f32(tokens, 32) for name in ("cos", "sin")}
    return Call("rope_qk", {"q": _f32(tokens, 8, 64), "k": _f32(tokens, 2, 64), **tables})


_FILTERED = {"temperature": 0.75, "top_k": 50, "top_p": 0.875, "min_p": 0.0625}

# What an op is tuned with when nobody says: one token and a few hundred of a small transformer.
ADAPTIVE = ("adaptive_max_pool", "adaptive_avg_pool")
DEFAULTS: dict[str, tuple[Call, ...]] = {
    "attention": _prefill_and_decode(),
    "attention_forward": tuple(replace(call, op="attention_forward") for call in _prefill_and_decode()[:1]),
    "attention_backward": (_backward(),),
    "merge_attention": (
        Call(
            "merge_attention",
            {
                f"{name}{n}": _f32(*shape)
                for n in (0, 1)
                for name, shape in (("out", (1, 8, 256, 64)), ("lse", (1, 8, 256)))
            },
        ),
    ),
    "attention_varlen": (
        Call(
            "attention_varlen",
            {**{name: _f32(512, 8, 64) for name in "qkv"}, "cu_seqlens_q": _int32(5), "cu_seqlens_k": _int32(5)},
            {"is_causal": True},
        ),
    ),
    "attention_varlen_forward": (
        Call(
            "attention_varlen_forward",
            {**{name: _f32(512, 8, 64) for name in "qkv"}, "cu_seqlens_q": _int32(5), "cu_seqlens_k": _int32(5)},
            {"is_causal": True},
        ),
    ),
    "paged_attention": (
        Call(
            "paged_attention",
            {
                "q": _f32(8, 8, 64),
                **{name: _f32(256, 16, 8, 64) for name in ("k_cache", "v_cache")},
                "block_tables": _int32(8, 32),
                "seq_lens": _int32(8),
            },
        ),
    ),
    "paged_attention_forward": (
        Call(
            "paged_attention_forward",
            {
                "q": _f32(256, 8, 64),
                **{name: _f32(256, 16, 8, 64) for name in ("k_cache", "v_cache")},
                "block_tables": _int32(4, 32),
                "seq_lens": _int32(4),
                "cu_seqlens_q": _int32(5),
            },
            {"is_causal": True},
        ),
    ),
    "mla_decode": (
        Call(
            "mla_decode",
            {
                "q_nope": _f32(8, 16, 512),
                "q_pe": _f32(8, 16, 64),
                "ckv_cache": _f32(256, 16, 512),
                "kpe_cache": _f32(256, 16, 64),
                "block_tables": _int32(8, 32),
                "seq_lens": _int32(8),
            },
            {"scale": 0.0625},
        ),
    ),
    "append_kv": (
        Call(
            "append_kv",
            {
                **{name: _f32(256, 8, 64) for name in ("key", "value")},
                **{name: _f32(256, 16, 8, 64) for name in ("k_cache", "v_cache")},
                "slots": _int32(256),
            },
        ),
    ),
    "gather_kv": (
        Call("gather_kv", {**{name: _f32(256, 16, 8, 64) for name in ("k_cache", "v_cache")}, "slots": _int32(512)}),
    ),
    "copy_kv_blocks": (
        Call(
            "copy_kv_blocks",
            {
                **{name: _f32(256, 16, 8, 64) for name in ("k_cache", "v_cache")},
                **{name: _int32(32) for name in ("sources", "targets")},
            },
        ),
    ),
    "rope": (_rope(1), _rope(256)),
    "rope_qk": (_rope_qk(1), _rope_qk(256)),
    "matmul": (Call("matmul", {"a": _f32(256, 256), "b": _f32(256, 256)}),),
    "addmm": (Call("addmm", {"input": _f32(512), "a": _f32(256, 512), "b": _f32(512, 512)}),),
    "linear": tuple(Call("linear", {"input": _f32(n, 512), "weight": _f32(2048, 512)}) for n in (1, 256)),
    "gated_mlp": tuple(
        Call("gated_mlp", {"input": _f32(n, 512), "gate_up": _f32(2816, 512), "down": _f32(512, 1408)})
        for n in (1, 256)
    ),
    "grouped_linear": (
        Call("grouped_linear", {"input": _f32(256, 512), "weight": _f32(8, 1024, 512), "offsets": _int32(8)}),
    ),
    "moe_route": (Call("moe_route", {"logits": _f32(256, 64)}, {"top_k": 8}),),
    "moe_permute": (Call("moe_permute", {"x": _f32(256, 512), "ids": _int32(256, 2)}, {"num_experts": 8}),),
    "moe_combine": (Call("moe_combine", {"rows": _f32(512, 512), "order": _int32(512), "weights": _f32(256, 2)}),),
    "moe_mlp": (
        Call(
            "moe_mlp",
            {
                **{"input": _f32(64, 512), "gate_up": _f32(8, 1408, 512), "down": _f32(8, 512, 704)},
                **{"ids": _int32(64, 2), "weights": _f32(64, 2)},
            },
        ),
    ),
    "conv": (
        Call("conv", {"input": _f32(1, 64, 32, 32), "weight": _f32(64, 64, 3, 3), "bias": _f32(64)}, {"padding": 1}),
    ),
    "conv_transpose": (
        Call(
            "conv_transpose", {"input": _f32(1, 64, 16, 16), "weight": _f32(64, 32, 4, 4)}, {"stride": 2, "padding": 1}
        ),
    ),
    **{op: (Call(op, {"input": _f32(1, 64, 56, 56)}, {"kernel_size": 2}),) for op in ("max_pool", "avg_pool")},
    **{op: (Call(op, {"input": _f32(1, 256, 14, 14)}, {"output_size": 7}),) for op in ADAPTIVE},
    "interpolate": (Call("interpolate", {"input": _f32(1, 64, 32, 32)}, {"scale_factor": 2.0, "mode": "bilinear"}),),
    "softmax": (Call("softmax", {"input": _f32(8, 256, 256)}, {"dim": -1}),),
    "log_softmax": (Call("log_softmax", {"input": _f32(256, 8192)}, {"dim": -1}),),
    "add_rms_norm": (
        Call(
            "add_rms_norm",
            {"input": _f32(256, 512), "residual": _f32(256, 512), "weight": _f32(512)},
            {"normalized_shape": 512},
        ),
    ),
    "cross_entropy": (
        Call("cross_entropy", {"input": _f32(256, 8192), "target": TensorSpec.contiguous("int64", (256,))}),
    ),
    "group_norm": (
        Call(
            "group_norm",
            {"input": _f32(2, 320, 32, 32), "weight": _f32(320), "bias": _f32(320)},
            {"num_groups": 32},
        ),
    ),
    "instance_norm": (Call("instance_norm", {"input": _f32(2, 64, 64, 64)}),),
    "batch_norm": (
        Call(
            "batch_norm",
            {
                "input": _f32(8, 64, 32, 32),
                **{name: _f32(64) for name in ("running_mean", "running_var", "weight", "bias")},
            },
        ),
    ),
    "layer_norm": (
        Call(
            "layer_norm",
            {"input": _f32(256, 512), "weight": _f32(512), "bias": _f32(512)},
            {"normalized_shape": 512},
        ),
    ),
    "rms_norm": (Call("rms_norm", {"input": _f32(256, 512), "weight": _f32(512)}, {"normalized_shape": 512}),),
    "layer_norm_backward": (_norm_backward("layer_norm_backward"),),
    "rms_norm_backward": (_norm_backward("rms_norm_backward"),),
    "gelu": (Call("gelu", {"input": _f32(256, 2048)}),),
    "silu": (Call("silu", {"input": _f32(256, 2048)}),),
    "swiglu": (Call("swiglu", {"gate": _f32(256, 2048), "up": _f32(256, 2048)}),),
    **{op: (Call(op, {"gate": _f32(256, 2048), "up": _f32(256, 2048)}),) for op in GATED},
    **{op: (Call(op, {"input": _f32(256, 2048)}),) for op in ACTIVATIONS},
    **{op: (Call(op, {"input": _f32(256, 2048), "other": _f32(256, 2048)}),) for op in ("add", "mul")},
    "clamp": (Call("clamp", {"input": _f32(256, 2048)}, {"min": -1.0, "max": 1.0}),),
    "where": (
        Call(
            "where",
            {
                "condition": TensorSpec.contiguous("bool", (256, 2048)),
                **dict.fromkeys(("input", "other"), _f32(256, 2048)),
            },
        ),
    ),
    "cat": (Call("cat", {"t0": _f32(256, 512), "t1": _f32(256, 512)}, {"dim": -1}),),
    "cast": (Call("cast", {"input": _f32(256, 2048)}, {"dtype": "float16"}),),
    "embedding": (Call("embedding", {"input": TensorSpec.contiguous("int64", (256,)), "weight": _f32(8192, 512)}),),
    "quantize": (Call("quantize", {"x": _f32(256, 2048), "scale": _f32(256, 1)}, {"dtype": "int8"}),),
    "dequantize": (Call("dequantize", {"x": _int8(256, 2048), "scale": _f32(256, 1)}),),
    "dynamic_quantize": (Call("dynamic_quantize", {"x": _f32(256, 2048)}),),
    "int_matmul": (Call("int_matmul", {"a": _int8(256, 512), "b": _int8(512, 512)}),),
    "scaled_linear": (
        Call(
            "scaled_linear",
            {
                **{"x": _int8(256, 512), "weight": _int8(2048, 512)},
                **{"weight_scale": _f32(2048, 1), "x_scale": _f32(256, 1)},
            },
        ),
    ),
    "penalize_logits": (
        Call(
            "penalize_logits",
            {"logits": _f32(8, 32_768), "token_ids": TensorSpec.contiguous("int64", (8, 512))},
            {"repetition_penalty": 1.1, "frequency_penalty": 0.1},
        ),
    ),
    "filter_logits": (Call("filter_logits", {"logits": _f32(8, 32_768)}, _FILTERED),),
    "sample": (Call("sample", {"logits": _f32(8, 32_768)}, {"seed": 0, "offset": 0, **_FILTERED}),),
    "speculative_verify": (
        Call(
            "speculative_verify",
            {
                "target_probs": _f32(8, 5, 32_768),
                "draft_ids": TensorSpec.contiguous("int64", (8, 4)),
                "draft_probs": _f32(8, 4, 32_768),
            },
            {"seed": 0, "offset": 0},
        ),
    ),
    "tree_accept": (
        Call(
            "tree_accept",
            {name: TensorSpec.contiguous("int64", (8, 64)) for name in ("draft_ids", "parents", "target_ids")},
        ),
    ),
    "null": (Call("null"),),
}


def calls_of(
    what: str | Callable[..., Any] | Sequence[str | Callable[..., Any] | Call] | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: str | None = None,
) -> list[Call]:
    """The calls that are meant: one with its arguments, or typical ones of the ops named, or of all. `device`: of specs
    and typical calls. Raises InvalidArgument."""
    if isinstance(what, str) or callable(what):
        name = _name(what)
        return [_bind(name, args, kwargs, device)] if args or kwargs else list(default_calls(name, device))
    if args or kwargs:
        raise InvalidArgument("arguments of a call need its op: name it first, as in lz.tune(op, ...)")
    if what is None:
        return all_default_calls(device)
    found: list[Call] = []
    for one in what:
        if isinstance(one, Call) and device is not None:
            raise InvalidArgument(f"give lz.Call.of the device; {one.label} has one already")
        found += [one] if isinstance(one, Call) else default_calls(_name(one), device)
    return found


def default_calls(op: str, device: str | None = None) -> tuple[Call, ...]:
    """Typical calls of an op on a device, "cpu" when left out; on a GPU in half precision, which its kernels are for.
    Raises InvalidArgument for an op without any, and for one that does not run there."""
    calls = DEFAULTS.get(op)
    if calls is None:
        raise InvalidArgument(f"{op} has no typical shapes; give its arguments. Ops with some: {', '.join(DEFAULTS)}")
    ordinal = named_device(op, (), device)
    return calls if ordinal == CPU else tuple(on_gpu(call, ordinal, "float16") for call in calls)


def all_default_calls(device: str | None = None) -> list[Call]:
    """Typical calls of all ops that run on this device. Raises InvalidArgument."""
    is_gpu = device is not None and ordinal_of(device) != CPU
    return [call for op in DEFAULTS if not is_gpu or OPS[op].runs_on_gpus for call in default_calls(op, device)]


def on_gpu(call: Call, ordinal: int, dtype: str) -> Call:
    """A typical call with its float32 data in this dtype, on this GPU."""
    fixed = OPS[call.op].singles
    arrays = {
        name: spec
        if spec is None or spec.dtype != "float32" or name in fixed
        else TensorSpec(dtype, spec.shape, spec.strides)
        for name, spec in call.arrays.items()
    }
    return replace(call, arrays=arrays, device=device_name(ordinal))


def _name(op: str | Callable[..., Any]) -> str:
    """An op's name, checked. Raises InvalidArgument."""
    name = op if isinstance(op, str) else str(getattr(op, "__name__", op))
    if name in PUBLIC_OPS and (isinstance(op, str) or op is api.function_of(name)):
        return name
    raise InvalidArgument(unknown_name("op", name, PUBLIC_OPS))


def _bind(op: str, args: Sequence[Any], kwargs: Mapping[str, Any], device: str | None) -> Call:
    """A call as it would be made, with specs for its arrays. Raises InvalidArgument."""
    function = api.function_of(op)
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError as exc:
        raise InvalidArgument(f"{op}: {exc}") from exc
    refused = sorted({"out", "backend", "timeout_s"} & given.keys())
    if refused:
        raise InvalidArgument(f"every backend is tried, with outputs of its own; leave out {', '.join(refused)}")
    names = tensor_names(function)
    found = [_array(given.get(name)) for name in names]
    where = named_device(op, [one if isinstance(one, Array) else None for one in found], device)
    arrays = {
        name: one.spec if isinstance(one, Array) else one
        for name, one in zip(names, found, strict=True)
        if name in given
    }
    params = {name: value for name, value in given.items() if name not in arrays}
    return Call(op, arrays, params, device_name(where))


def _array(value: Any) -> Array | TensorSpec | None:
    return value if value is None or isinstance(value, TensorSpec) else describe(value)
