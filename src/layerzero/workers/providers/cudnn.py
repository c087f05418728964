"""cuDNN's attention through its graph API, which stores results where it is told: torch's own call of it does not, and
its results have to be copied.

A plan is built for a signature when it is bound, which takes up to a second where cuDNN compiles a kernel for it. Plans
share none: with its cache of kernels (dynamic shapes, frontend 1.32, cuDNN 9.19) results for further shapes and strides
were wrong on an H200. Limits: cuDNN's support matrix for SDPA, and cudnn-frontend's sdpa_support_surface.h.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from layerzero.ipc.errors import BackendError
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.provider import Call, Loaded
from layerzero.workers.providers._torch_cuda import ALIGNMENT_BYTES, TorchCuda, is_aligned
from layerzero.workers.providers._torch_ops import Run, plain_scale, times

T = TypeVar("T")
KERNELS = ("cudnn.attention", "cudnn.attention.wide")
Q, K, V, OUT = UIDS = (1, 2, 3, 4)
CAPTURED = -1  # in place of a stream
MAX_KEPT = 256  # plans
PYTHON_ENGINES = ["sdpa_fwd_prefill"]  # kernels of the frontend's own; they would be compiled by another library


def load() -> Loaded:
    import torch

    gpu = TorchCuda(torch)
    import cudnn  # after torch: it takes the libcudnn that is loaded already

    attention = Attention(torch, cudnn)
    return Loaded(
        versions={
            "nvidia-cudnn-frontend": cudnn.__version__,
            "cudnn": cudnn.backend_version_string(),
            "torch": torch.__version__,
        },
        kernels=gpu.binds(dict.fromkeys(KERNELS, attention.build)),
        on_stream=gpu.on_stream,
    )


@dataclass(frozen=True)
class Operand:
    """An input as cuDNN gets it; `give` copies it where it does not lie so."""

    spec: TensorSpec
    give: Callable[[], Any]


@dataclass(frozen=True)
class Plan:
    graph: Any
    workspace_bytes: int


class Attention:
    """Plans by signature, and a handle for each thread."""

    def __init__(self, torch: Any, cudnn: Any) -> None:
        self.torch = torch
        self.cudnn = cudnn
        self.dtypes = {"bfloat16": cudnn.data_type.BFLOAT16, "float16": cudnn.data_type.HALF}
        self.names = {getattr(torch, name): name for name in self.dtypes}
        self.plans: OrderedDict[object, Plan] = OrderedDict()
        self.planning = threading.Lock()
        self.local = threading.local()

    def build(self, views: Sequence[Any], call: Call) -> Run:
        """A Builder. Masks of fewer combinations: what hides no key is no mask, and rows that see no key, which cuDNN
        refuses, are set to 0 here."""
        q, k, v, *_ = views
        if k.shape[2] == 0:
            return lambda out: out.zero_()
        is_causal = bool(call.attrs["is_causal"])
        is_bottom_right = is_causal and call.attrs["causal_alignment"] == "bottom_right"
        hidden = max(q.shape[2] - k.shape[2], 0) if is_bottom_right else 0
        q = q[:, :, hidden:]
        if is_causal and not is_bottom_right:
            k, v = (tensor[:, :, : q.shape[2]] for tensor in (k, v))
        queries, keys = q.shape[2], k.shape[2]
        factor, scale = plain_scale(call.attrs["scale"])
        alignment = None
        # Of one query and grouped heads, a causal mask gives wrong results (release notes of cuDNN 9.18).
        if is_causal and queries > 1 and keys > 1:
            alignment = "BOTTOM_RIGHT" if is_bottom_right and queries < keys else "TOP_LEFT"
        inputs = [self.operand(q, factor), *((self.twice if keys == 1 else self.operand)(tensor) for tensor in (k, v))]
        given = call.outputs[0]
        stored = TensorSpec(given.dtype, (*q.shape[:3], v.shape[3]), given.strides)
        is_direct = is_loadable(stored)
        if not is_direct:
            stored = TensorSpec.contiguous(stored.dtype, stored.shape)
        plan = self.plan((*(operand.spec for operand in inputs), stored), alignment, scale)
        workspaces: dict[int, Any] = {}  # by stream: two calls may run at the same time

        def run(out: Any) -> None:
            target = out[:, :, hidden:] if hidden else out
            result = target
            if not is_direct or target.data_ptr() % ALIGNMENT_BYTES:
                result = self.torch.empty_strided(stored.shape, stored.strides, dtype=out.dtype, device=out.device)
            self.execute(plan, [*(operand.give() for operand in inputs), result], workspaces)
            if result is not target:
                target.copy_(result)
            if hidden:
                out[:, :, :hidden].zero_()

        return run

    def operand(self, tensor: Any, factor: float = 1.0) -> Operand:
        spec = TensorSpec(self.names[tensor.dtype], tuple(tensor.shape), tensor.stride())
        if factor == 1.0 and is_aligned(tensor) and is_loadable(spec):
            return Operand(spec, lambda: tensor)
        dense = TensorSpec.contiguous(spec.dtype, spec.shape)
        return Operand(dense, lambda: times(tensor.clone(memory_format=self.torch.contiguous_format), factor))

    def twice(self, tensor: Any) -> Operand:
        """The only key two times, which changes no result: torch says that cuDNN does not take one."""
        shape = (*tensor.shape[:2], 2, tensor.shape[3])
        return Operand(TensorSpec.contiguous(self.names[tensor.dtype], shape), lambda: tensor.repeat(1, 1, 2, 1))

    def execute(self, plan: Plan, tensors: Sequence[Any], workspaces: dict[int, Any]) -> None:
        """Enqueue on torch's current stream."""
        torch = self.torch
        stream = torch.cuda.current_stream().cuda_stream
        workspace = None
        if plan.workspace_bytes:
            key = CAPTURED if torch.cuda.is_current_stream_capturing() else stream
            if key not in workspaces:
                workspaces[key] = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=tensors[0].device)
            workspace = workspaces[key]
        handle = self.handle()
        self.cudnn.set_stream(handle, stream)
        plan.graph.execute(tensors, workspace, handle, tensor_uids=UIDS)

    def handle(self) -> Any:
        """Of this thread: two may not share one."""
        if not hasattr(self.local, "handle"):
            self.local.handle = self.cudnn.create_handle()
        return self.local.handle

    def plan(self, specs: tuple[TensorSpec, ...], alignment: str | None, scale: float) -> Plan:
        """For q, k, v and a result that lie so. Raises BackendError where cuDNN has none."""
        refusal = self.cudnn.cudnnGraphNotSupportedError

        def build() -> Plan:
            graph = self.graph(specs, alignment, scale)
            return Plan(graph, graph.get_workspace_size())

        with self.planning:
            try:
                return recall(self.plans, (specs, alignment, scale), build)
            except refusal as exc:
                said = f"cuDNN {self.cudnn.backend_version_string()} refuses this call: {exc}"
                raise BackendError(said[:2000], exception="refused") from exc

    def graph(self, specs: tuple[TensorSpec, ...], alignment: str | None, scale: float) -> Any:
        """Built and ready to execute."""
        cudnn = self.cudnn
        *inputs, stored = specs
        dtype, single = self.dtypes[stored.dtype], cudnn.data_type.FLOAT
        graph = cudnn.pygraph(
            name="attention",
            io_data_type=dtype,
            intermediate_data_type=single,
            compute_data_type=single,
            handle=self.handle(),
            # Else a CUDA graph of it keeps it alive, and each launch takes 1.2 us longer (H200). A Run keeps its plan,
            # and graphs of a Bound do not outlive that.
            cuda_graph_retention=cudnn.cuda_graph_retention.NONE,
        )
        q, k, v = (
            graph.tensor(dim=list(spec.shape), stride=declared_strides(spec), data_type=dtype, name=name, uid=uid)
            for spec, name, uid in zip(inputs, ("q", "k", "v"), (Q, K, V), strict=True)
        )
        mask = {}
        if alignment is not None:
            rule = getattr(cudnn.diagonal_alignment, alignment)
            mask = {"diagonal_alignment": rule, "diagonal_band_right_bound": 0}
        out, _ = graph.sdpa(q=q, k=k, v=v, attn_scale=scale, generate_stats=False, name="sdpa", **mask)
        out.set_output(True).set_uid(OUT).set_data_type(dtype)
        out.set_dim(list(stored.shape)).set_stride(declared_strides(stored))
        graph.deselect_engines(PYTHON_ENGINES)
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        return graph


def recall(kept: OrderedDict[object, T], key: object, make: Callable[[], T]) -> T:
    """The value of a key, made where there is none. The one not asked for the longest is forgotten."""
    if key not in kept:
        kept[key] = make()
        if len(kept) > MAX_KEPT:
            kept.popitem(last=False)
    kept.move_to_end(key)
    return kept[key]


def is_loadable(spec: TensorSpec) -> bool:
    """Rows are without gaps and lie a multiple of 16 bytes apart, no two at one place."""
    rows = zip(spec.shape[:-1], spec.strides[:-1], strict=True)
    steps = [stride * spec.itemsize for extent, stride in rows if extent > 1]
    return spec.strides[-1] == 1 and all(step and step % ALIGNMENT_BYTES == 0 for step in steps)


def declared_strides(spec: TensorSpec) -> list[int]:
    """Those of extents of 1, which may be anything, are set as if outermost: cuDNN checks them, too."""
    pairs = list(zip(spec.shape, spec.strides, strict=True))
    span = max(extent * stride for extent, stride in pairs if extent > 1)
    return [stride if extent > 1 else span for extent, stride in pairs]
