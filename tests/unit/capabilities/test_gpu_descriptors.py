"""The descriptors of GPU backends: refused on a CPU with a reason, accepted on the GPU they were written for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.descriptor import KernelCapability, load
from layerzero.capabilities.device import DeviceSpec
from layerzero.capabilities.match import match
from layerzero.capabilities.reasons import Reason
from layerzero.envs.manifest import discover
from layerzero.ipc.vocabulary.ops import GATED, OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.certify.cases import cases
from layerzero.workers.certify.problems import PROBLEMS

H200 = DeviceSpec(device_type="cuda", device_name="NVIDIA H200", device_vendor="nvidia", sm_version=90, cores=132)
T4 = DeviceSpec(device_type="cuda", device_name="Tesla T4", device_vendor="nvidia", sm_version=75, cores=40)
CAPABILITIES = [
    load(path)
    for path in sorted((Path(__file__).parents[3] / "src" / "layerzero" / "capabilities" / "descriptors").glob("*"))
]
GPU = [capability for capability in CAPABILITIES if capability.platform == "cuda"]
KERNELS = [
    pytest.param(op, kernel, id=kernel.kernel_id)
    for capability in GPU
    for op, listed in capability.ops.items()
    for kernel in listed
]


def call(op: str, kernel: KernelCapability, device: DeviceSpec) -> SelectionContext:
    """What a Llama-shaped layer asks for, in the dtype that the kernel names first."""
    dtype, head_dim = kernel.dtypes[0], max(64, kernel.min_head_dim or 0)

    def dense(*shape: int) -> TensorSpec:
        return TensorSpec.contiguous(dtype, shape)

    single = TensorSpec.contiguous("float32", (1,))
    inputs: dict[str, tuple[TensorSpec | None, ...]] = {
        "attention": (*[dense(2, 16, 256, head_dim)] * 3, None, None, None),
        "attention_forward": (*[dense(2, 16, 256, head_dim)] * 3, None, None, None),
        "attention_backward": (
            *[dense(2, 16, 256, head_dim)] * 5,
            *(TensorSpec.contiguous("float32", (2, 16, 256)), None),
        ),
        "merge_attention": (
            *(dense(2, 16, 256, 64), TensorSpec.contiguous("float32", (2, 16, 256))) * 2,
            *[None] * 4,
        ),
        "matmul": (dense(64, 128), dense(128, 64)),
        "addmm": (dense(1, 64), dense(64, 128), dense(128, 64)),
        "gated_mlp": (dense(64, 128), dense(512, 128), dense(128, 256)),
        "linear": (dense(64, 128), dense(256, 128), None),
        **dict.fromkeys(("conv", "conv_transpose"), (dense(2, 64, 16, 16), dense(64, 64, 3, 3), dense(64))),
        **dict.fromkeys(
            ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool", "interpolate"), (dense(2, 64, 16, 16),)
        ),
        "softmax": (dense(64, 128),),
        "layer_norm": (dense(64, 128), dense(128), dense(128)),
        "rms_norm": (dense(64, 128), dense(128)),
        "add_rms_norm": (dense(64, 128), dense(64, 128), dense(128)),
        **dict.fromkeys(("group_norm", "instance_norm"), (dense(2, 64, 8, 8), dense(64), dense(64))),
        "batch_norm": (dense(2, 64, 8, 8), *[dense(64)] * 4),
        **dict.fromkeys(("layer_norm_backward", "rms_norm_backward"), (dense(64, 128), dense(64, 128), dense(128))),
        **dict.fromkeys(("swiglu", *GATED), (dense(64, 128), dense(64, 128))),
        "cross_entropy": (dense(8, 128), TensorSpec.contiguous("int64", (8,)), dense(128)),
        "rope_qk": (dense(1, 64, 16, 128), dense(1, 64, 4, 128), dense(1, 64, 64), dense(1, 64, 64)),
        "rope": (dense(1, 64, 16, 128), dense(1, 64, 64), dense(1, 64, 64)),
        "attention_varlen": (*[dense(256, 16, 64)] * 3, *[TensorSpec.contiguous("int32", (5,))] * 2),
        "paged_attention": (
            *(dense(4, 16, 64), dense(32, 256, 16, 64), dense(32, 256, 16, 64)),
            *(TensorSpec.contiguous("int32", shape) for shape in ((4, 8), (4,))),
            *(None, None),
        ),
        "attention_varlen_forward": (
            *[dense(256, 16, 64)] * 3,
            *[TensorSpec.contiguous("int32", (5,))] * 2,
            *(None, None),
        ),
        "paged_attention_forward": (
            *(dense(40, 16, 64), dense(32, 256, 16, 64), dense(32, 256, 16, 64)),
            *(TensorSpec.contiguous("int32", shape) for shape in ((4, 8), (4,), (5,))),
            *[None] * 4,
        ),
        "mla_decode": (
            *(dense(4, 16, 512), dense(4, 16, 64), dense(32, 64, 512), dense(32, 64, 64)),
            *(TensorSpec.contiguous("int32", shape) for shape in ((4, 8), (4,))),
        ),
        "gather_kv": (*[dense(32, 256, 16, 64)] * 2, TensorSpec.contiguous("int64", (4,)), None, None),
        "copy_kv_blocks": (*[dense(32, 256, 16, 64)] * 2, *[TensorSpec.contiguous("int64", (4,))] * 2),
        "append_kv": (
            *(dense(4, 16, 64), dense(4, 16, 64), dense(32, 256, 16, 64), dense(32, 256, 16, 64)),
            *(TensorSpec.contiguous("int64", (4,)), None, None),
        ),
        **dict.fromkeys(("add", "mul"), (dense(64, 128), dense(128))),
        "where": (TensorSpec.contiguous("bool", (64, 1)), dense(64, 128), dense(128)),
        "cat": (dense(64, 64), dense(64, 64), *[None] * 6),
        **dict.fromkeys(("quantize", "dequantize"), (dense(64, 128), TensorSpec.contiguous("float32", (64, 1)), None)),
        "int_matmul": (dense(64, 128), dense(128, 64), None, None),
        "scaled_linear": (
            *(dense(64, 128), TensorSpec.contiguous("int8", (256, 128)), TensorSpec.contiguous("float32", (256, 1))),
            *[None] * 4,
        ),
        "grouped_linear": (dense(64, 128), dense(4, 32, 128), TensorSpec.contiguous("int32", (4,)), dense(4, 32)),
        "moe_route": (dense(64, 8), None),
        "moe_permute": (dense(64, 128), TensorSpec.contiguous("int64", (64, 2))),
        "moe_combine": (
            *(dense(128, 64), TensorSpec.contiguous("int64", (128,))),
            TensorSpec.contiguous("float32", (64, 2)),
        ),
        "moe_mlp": (
            *(dense(64, 128), dense(8, 64, 128), dense(8, 128, 32)),
            *(TensorSpec.contiguous("int64", (64, 2)), TensorSpec.contiguous("float32", (64, 2))),
        ),
        "penalize_logits": (dense(4, 512), TensorSpec.contiguous("int64", (4, 32)), *[single] * 3),
        "filter_logits": (dense(4, 512), single, TensorSpec.contiguous("int64", (1,)), single, single),
        "sample": (
            *(dense(4, 512), *[TensorSpec.contiguous("int64", (4,))] * 2),
            *(single, TensorSpec.contiguous("int64", (1,)), single, single),
        ),
        "speculative_verify": (
            *(dense(4, 5, 512), TensorSpec.contiguous("int64", (4, 4)), dense(4, 4, 512)),
            *[TensorSpec.contiguous("int64", (4,))] * 2,
        ),
        "tree_accept": (dense(4, 32), TensorSpec.contiguous("int64", (4, 32)), dense(4, 32)),
        "embedding": (TensorSpec.contiguous("int64", (7,)), dense(32, 16)),
    }
    attrs: dict[str, Any] = {
        "is_causal": True, "scale": 0.125, "layout": "BHSD", "interleaved": False,
        "causal_alignment": "bottom_right" if op == "attention_varlen" else "top_left",
        "dim": 1, "ndim": 1, "num_groups": 32, "eps": 1e-6, "approximate": "tanh", "activation": "gelu",
        "beta": 0.5, "alpha": 2.0,
        "stride": "1,1", "padding": "1,1,1,1", "dilation": "1,1", "output_padding": "0,0", "groups": 1,
        "kernel_size": "3,3", "ceil_mode": False, "count_include_pad": True, "divisor": 0, "output_size": "7,7",
        "size": "32,32", "mode": "linear", "align_corners": False, "antialias": True,
        "dtype": {"quantize": "int8", "dequantize": "float16", "cast": "bfloat16"}.get(op, ""),
        "format": "int8", "symmetric": True, "weight_format": "",
        "top_k": 2, "scoring": "softmax", "normalize": True, "top_groups": 1, "group_score": "max", "num_experts": 8,
        "min": -1.0, "max": None, "ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0,
        **({"scale": ""} if op == "interpolate" else {}),
    }  # fmt: skip
    given = {name: attrs[name] for name in OPS[op].attrs if name not in OPS[op].options}
    specs = inputs.get(op, (dense(64, 128),))
    if kernel.supports_kv_cache_dtypes:  # scales, and caches of the first of these dtypes
        kind, known = kernel.supports_kv_cache_dtypes[0], dict(zip(OPS[op].inputs, specs, strict=True))
        known |= {name: replace(one, dtype=kind) for name, one in known.items() if one and name.endswith("_cache")}
        specs = tuple(known.values())
        specs = (*specs[:-2], single, single)
        given |= {"dtype": "float16"} if "dtype" in OPS[op].options else {}
    return SelectionContext(op, tuple(specs), (dense(64, 128),), given, device)


@pytest.mark.parametrize(("op", "kernel"), KERNELS)
def test_kernel_of_a_gpu_is_refused_on_a_cpu_for_that_reason(op: str, kernel: KernelCapability) -> None:
    """On a machine without a GPU `lz explain` must say so, and nothing that would lead astray."""
    reasons = match(call(op, kernel, DeviceSpec()), kernel)
    assert [(r.code, r.detail) for r in reasons] == [
        (Reason.PLATFORM_MISMATCH, "the device is cpu; the kernel needs cuda")
    ]


@pytest.mark.parametrize(("op", "kernel"), KERNELS)
def test_kernel_of_a_gpu_serves_a_usual_call_on_an_h200(op: str, kernel: KernelCapability) -> None:
    """A constraint that refuses what the library is for would hide it for good."""
    assert match(call(op, kernel, H200), kernel) == []


@pytest.mark.parametrize(("op", "kernel"), KERNELS)
def test_kernel_that_needs_a_newer_gpu_says_which(op: str, kernel: KernelCapability) -> None:
    """Libraries do not check: their code object is missing, or the process dies."""
    codes = [reason.code for reason in match(call(op, kernel, T4), kernel)]
    needs_newer = kernel.min_sm is not None and kernel.min_sm > 75
    assert codes == [Reason.DEVICE_CAPABILITY_UNSUPPORTED] * needs_newer


@pytest.mark.parametrize(("op", "kernel"), KERNELS)
def test_probe_has_a_case_for_what_a_layer_asks_for(op: str, kernel: KernelCapability) -> None:
    """A kernel that no case fits is never certified, and so never serves."""
    claims = kernel.model_dump(mode="json", exclude_defaults=True)
    problems = list(PROBLEMS[op](claims))
    assert len({case.shape_class for case in cases(op, claims, problems, kernel.dtypes[0])}) >= 3


def test_every_gpu_backend_has_an_environment_and_no_other_variant_than_cuda() -> None:
    """`lz env build` on a machine without a GPU must not fetch gigabytes of CUDA."""
    manifests, problems = discover()
    assert problems == []
    for capability in GPU:
        manifest = manifests[capability.backend]
        assert manifest.variants.keys() <= {"cu12", "cu13"}
        assert manifest.descriptor == capability.backend
