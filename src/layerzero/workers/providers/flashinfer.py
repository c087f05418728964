"""FlashInfer: prefill attention by its fa2 and fa3 templates, causal as bottom_right, paged decoding, rms_norm, rope
and swiglu.

Its kernels are compiled by nvcc at the first call of a dtype and head_dim.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from layerzero.workers.provider import Call, Loaded
from layerzero.workers.providers._sequences import checked_lengths
from layerzero.workers.providers._torch_cuda import TorchCuda, is_aligned
from layerzero.workers.providers._torch_ops import Run, plain_scale, times

HEAD_DIMS = (64, 128, 256)  # that fa3 has templates for; others are padded with zeros, which change nothing
WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends; it holds partial results of a split sequence
GROUP_FOR_TENSOR_CORES = 4  # query heads for each key head; fewer leave most of a tile empty
MAX_FOLDED = 1 << 31  # elements: fa2 counts them in 32 bits
MAX_PLANS = 16  # each has 8 MiB on the GPU and as much pinned memory


def load() -> Loaded:
    import flashinfer
    import torch

    gpu = TorchCuda(torch)
    prefill = _Prefill(torch, flashinfer, gpu)
    paged = _Paged(torch, flashinfer, gpu, prefill.workspace)

    def rms_norm(views: Sequence[Any], call: Call) -> Run:
        x, weight = views
        columns, eps = math.prod(x.shape[x.ndim - call.attrs["ndim"] :]), call.attrs["eps"]

        def run(out: Any) -> None:
            rows, flat_weight, dense = x.reshape(-1, columns), weight.reshape(-1), out.view(-1, columns)
            if columns == 1:  # it looks at their strides all the same
                rows = rows.as_strided(rows.shape, (rows.stride(0), 1))
                flat_weight = flat_weight.as_strided((1,), (1,))
            # It loads and stores 16 bytes at a time, and checks no address.
            rows, flat_weight = (t if is_aligned(t) else t.clone() for t in (rows, flat_weight))
            target = dense if is_aligned(dense) else torch.empty_like(dense)
            flashinfer.norm.rmsnorm(rows, flat_weight, eps, out=target)
            if target is not dense:
                dense.copy_(target)

        return run

    def rope(views: Sequence[Any], call: Call) -> Run:
        x, cos, sin = views
        batch, sequence, heads, dim = x.shape
        width = template_width(dim)
        give = gpu.aligned(x, width)
        rows = torch.arange(sequence, device=x.device).repeat(batch)
        if cos.shape[0] > 1:
            rows = torch.arange(batch * sequence, device=x.device)
        torch.cuda.current_stream().synchronize()  # `run` is on other streams

        def run(out: Any) -> None:
            angles = torch.cat((cos, sin), -1).flatten(0, 1).float()
            angles = torch.nn.functional.pad(angles, (0, 0, 0, 1))  # interleaved, it loads past the last row's end
            flat = give().reshape(batch * sequence, heads * width)
            # It turns two tensors; nobody wants the second.
            turned, _ = flashinfer.rope.apply_rope_with_cos_sin_cache(
                rows, flat, flat[:, :width], width, angles, is_neox=not call.attrs["interleaved"]
            )
            out.copy_(turned.view(batch, sequence, heads, width)[..., :dim])

        return run

    def swiglu(views: Sequence[Any], call: Call) -> Run:
        gate, up = views
        columns = gate.shape[-1]
        width = -(-columns // 8) * 8  # it loads 16 bytes of either half at a time
        together = gpu.side_by_side(gate, up) if width == columns else None
        if together is not None and not is_aligned(together):
            together = None

        def run(out: Any) -> None:
            packed, dense = together, out
            if packed is None:
                packed = torch.zeros((*gate.shape[:-1], 2 * width), dtype=gate.dtype, device=gate.device)
                packed[..., :columns] = gate
                packed[..., width : width + columns] = up
            if width != columns or not is_aligned(out):
                dense = torch.empty((*gate.shape[:-1], width), dtype=gate.dtype, device=gate.device)
            flashinfer.activation.silu_and_mul(packed, out=dense)
            if dense is not out:
                out.copy_(dense[..., :columns])

        return run

    builders = {
        "flashinfer.attention_varlen.fa2": gpu.attention_varlen_on_host(
            functools.partial(prefill.ragged, "fa2"), template_width
        ),
        "flashinfer.attention_varlen.fa3": gpu.attention_varlen_on_host(
            functools.partial(prefill.ragged, "fa3"), template_width
        ),
        "flashinfer.paged_attention": paged.build,
        "flashinfer.rope": rope,
        "flashinfer.swiglu": swiglu,
        "flashinfer.attention.fa2": lambda views, call: prefill.build("fa2", views, call),
        "flashinfer.attention.fa3": lambda views, call: prefill.build("fa3", views, call),
        "flashinfer.rms_norm": rms_norm,
    }
    libraries = ("flashinfer-python", "apache-tvm-ffi")
    return Loaded(
        versions={**{name: version(name) for name in libraries}, "torch": torch.__version__},
        kernels=gpu.binds(builders),
        on_stream=gpu.on_stream,
    )


def template_width(dim: int) -> int:
    """The head_dim that fa2 and fa3 compute such heads with."""
    return next(known for known in HEAD_DIMS if known >= dim)


def tokens(tensor: Any, *, is_folded: bool) -> Any:
    """(batch, heads, tokens, head_dim) as (tokens, heads, head_dim) without a copy, None if it does not lie so: the
    batch's tokens in a row, or, folded, its heads."""
    batch, heads, count, dim = tensor.shape
    outer, *inner = tensor.stride()
    extent, stride = (heads, inner[0]) if is_folded else (count, inner[1])
    if batch > 1 and (outer != extent * stride or (is_folded and tensor.numel() > MAX_FOLDED)):
        return None
    shape = (count, batch * heads, dim) if is_folded else (batch * count, heads, dim)
    return tensor.as_strided(shape, (inner[1], inner[0], inner[2]))


class _Prefill:
    """Attention over ragged tensors, here of equal lengths. What is planned depends on extents alone, so calls of one
    signature share a plan."""

    def __init__(self, torch: Any, flashinfer: Any, gpu: TorchCuda) -> None:
        self.torch = torch
        self.wrapper = flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper
        self.gpu = gpu
        self.workspaces: dict[int, Any] = {}  # one for each stream: calls on two may run at the same time
        self.plans: OrderedDict[tuple[object, ...], Any] = OrderedDict()
        self.ragged_wrappers: dict[tuple[str, int], Any] = {}

    def build(self, backend: str, views: Sequence[Any], call: Call) -> Run:
        q, k, v, *_ = views
        queries, keys, wide = q.shape[2], k.shape[2], v.shape[3]
        if keys == 0:  # every row is fully masked
            return lambda out: out.zero_()
        is_causal = bool(call.attrs["is_causal"])
        hidden = max(queries - keys, 0) if is_causal and call.attrs["causal_alignment"] == "bottom_right" else 0
        width = template_width(max(q.shape[3], wide))
        inputs = [self.gpu.aligned(tensor, width) for tensor in (q[:, :, hidden:], k, v)]
        # A batch whose heads lie one after the other is one of more heads: its tokens are in no order of their own.
        is_folded = len(q) > 1 and all(tokens(give(), is_folded=True) is not None for give in inputs)
        batch, fold = (1, len(q)) if is_folded else (len(q), 1)
        heads, kv_heads = fold * q.shape[1], fold * k.shape[1]
        factor, scale = plain_scale(call.attrs["scale"])
        plan = self.plan(backend, q.dtype, (batch, heads, kv_heads, queries - hidden, keys), width, is_causal, scale)

        def run(out: Any) -> None:
            plan._float_workspace_buffer = self.workspace()  # plans hold offsets into it, no address
            given = [give() for give in inputs]
            given[0] = times(given[0], factor)
            rows = [tokens(t, is_folded=is_folded) for t in given]
            rows = [t.transpose(1, 2).flatten(0, 1) if r is None else r for r, t in zip(rows, given, strict=True)]
            target = out[:, :, hidden:]
            dense = tokens(target, is_folded=is_folded)
            # fa3 writes to any rows, fa2 to dense ones.
            is_direct = dense is not None and wide == width and is_aligned(dense)
            is_direct = is_direct and (backend == "fa3" or dense.is_contiguous())
            if not is_direct:
                dense = self.torch.empty((*rows[0].shape[:2], width), dtype=q.dtype, device=q.device)
            plan.run(*rows, out=dense)
            if not is_direct:
                result = dense[..., :wide]
                if is_folded:
                    target.copy_(result.transpose(0, 1).unflatten(0, target.shape[:2]))
                else:
                    target.copy_(result.unflatten(0, (len(q), target.shape[2])).transpose(1, 2))
            if hidden:
                out[:, :, :hidden].zero_()

        return run

    def ragged(
        self, backend: str, q: Any, k: Any, v: Any, ends_q: list[int], ends_k: list[int], call: Call, scale: float
    ) -> Any:
        """Sequences of unequal lengths. Planned at each call, in memory that is planned anew only when the calls before
        have been read from it: on one stream, whose calls begin with a wait for the ends."""
        torch = self.torch
        key = (backend, torch.cuda.current_stream().cuda_stream)
        if key not in self.ragged_wrappers:
            self.ragged_wrappers[key] = self.wrapper(self.workspace(), "NHD", backend=backend)
        plan = self.ragged_wrappers[key]
        plan.plan(
            *(torch.tensor(ends, dtype=torch.int32) for ends in (ends_q, ends_k)),
            q.shape[1],
            k.shape[1],
            q.shape[2],
            head_dim_vo=v.shape[2],
            causal=bool(call.attrs["is_causal"]),
            sm_scale=scale,
            q_data_type=q.dtype,
            kv_data_type=q.dtype,
        )
        return plan.run(q, k, v)

    def workspace(self) -> Any:
        stream = self.torch.cuda.current_stream().cuda_stream
        if stream not in self.workspaces:
            self.workspaces[stream] = self.torch.zeros(WORKSPACE_BYTES, dtype=self.torch.uint8, device="cuda")
        return self.workspaces[stream]

    def plan(
        self,
        backend: str,
        dtype: Any,
        extents: tuple[int, int, int, int, int],
        width: int,
        is_causal: bool,
        scale: float,
    ) -> Any:
        """A planned wrapper for such tensors. Compiles its kernels if need be. `extents`: batch, heads of queries and
        of keys, queries, keys."""
        batch, heads, kv_heads, queries, keys = extents
        key = (backend, dtype, extents, width, is_causal, scale)
        if key in self.plans:
            self.plans.move_to_end(key)
            return self.plans[key]
        torch = self.torch
        steps = torch.arange(batch + 1, dtype=torch.int32)
        wrapper = self.wrapper(self.workspace(), "NHD", backend=backend)
        wrapper.plan(
            steps * queries,
            steps * keys,
            heads,
            kv_heads,
            width,
            head_dim_vo=width,
            causal=is_causal,
            sm_scale=scale,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        torch.cuda.current_stream().synchronize()  # the plan is used on other streams than it was copied on
        self.plans[key] = wrapper
        if len(self.plans) > MAX_PLANS:
            self.plans.popitem(last=False)  # calls that are bound to it keep it
        return wrapper


class _Paged:
    """Decoding with a paged cache. Planned at each call on the lengths, for which it waits."""

    def __init__(self, torch: Any, flashinfer: Any, gpu: TorchCuda, workspace: Callable[[], Any]) -> None:
        self.torch = torch
        self.wrapper = flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper
        self.gpu = gpu
        self.workspace = workspace
        self.wrappers: dict[tuple[bool, int], Any] = {}  # by use of tensor cores, and by stream as in _Prefill.ragged

    def build(self, views: Sequence[Any], call: Call) -> Run:
        q, k_cache, v_cache, tables, lengths, *_ = views
        (held_blocks, page, kv_heads, dim), room = k_cache.shape, tables.shape[1] * k_cache.shape[1]
        is_grouped = q.shape[1] >= GROUP_FOR_TENSOR_CORES * kv_heads
        inputs = [self.gpu.aligned(tensor) for tensor in (k_cache, v_cache)]
        factor, scale = plain_scale(call.attrs["scale"])

        def run(out: Any) -> None:
            torch = self.torch
            counts = torch.tensor(checked_lengths(lengths.tolist(), room if held_blocks else 0), dtype=torch.int32)
            rows = counts.nonzero().flatten()  # a sequence without keys has no softmax
            if not len(rows):
                out.zero_()
                return
            is_whole = len(rows) == len(q)
            blocks = (counts[rows] + page - 1) // page
            used = (torch.arange(tables.shape[1]) < blocks.unsqueeze(1)).to(q.device)
            chosen = rows.to(q.device)
            queries, held = (q, tables) if is_whole else (q.index_select(0, chosen), tables.index_select(0, chosen))
            plan = self.planner(use_tensor_cores=is_grouped)
            plan.plan(
                torch.nn.functional.pad(blocks.cumsum(0), (1, 0)).to(torch.int32),
                held[used].clamp_(0, held_blocks - 1),  # entries that lead outside read other keys of the caller's
                counts[rows] - (blocks - 1) * page,
                q.shape[1],
                kv_heads,
                dim,
                page,
                sm_scale=scale,
                q_data_type=q.dtype,
                kv_data_type=q.dtype,
            )
            result = plan.run(self.gpu.aligned(times(queries, factor))(), tuple(give() for give in inputs))
            if is_whole:
                out.copy_(result)
            else:
                out.zero_()
                out[chosen] = result

        return run

    def planner(self, *, use_tensor_cores: bool) -> Any:
        key = (use_tensor_cores, self.torch.cuda.current_stream().cuda_stream)
        if key not in self.wrappers:
            self.wrappers[key] = self.wrapper(self.workspace(), "NHD", use_tensor_cores=use_tensor_cores)
        return self.wrappers[key]
