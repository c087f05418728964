"""PyTorch on the CPU: every tensor op, all dtypes and strides. The reference that other backends are compared with."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from layerzero.ipc.errors import InvalidArgument
from layerzero.workers.provider import Block, Bound, Call, Loaded

# Ops whose kernels write any strides themselves; the others get a contiguous tensor, see _bind.
_WRITES_STRIDED = frozenset({"attention", "softmax"})


def load() -> Loaded:
    import torch

    torch.set_grad_enabled(False)
    library = _Torch(torch)
    builders: dict[str, Callable[..., Callable[[], Any]]] = {
        "attention": library.attention,
        "matmul": library.matmul,
        "linear": library.linear,
        "softmax": library.softmax,
        "layer_norm": library.layer_norm,
        "rms_norm": library.rms_norm,
        "gelu": library.gelu,
        "silu": library.silu,
        "embedding": library.embedding,
    }

    def bind(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        views = [None if block is None else library.view(block) for block in inputs]
        out = library.view(outputs[0])
        if out.numel() == 0:
            return lambda: None
        # With strides that do not collapse, the out= forms of gelu, linear and matmul fail or write the wrong
        # elements (torch 2.13).
        dense = out if out.is_contiguous() or call.op in _WRITES_STRIDED else torch.empty(out.shape, dtype=out.dtype)
        run = builders[call.op](views, dense, call.attrs)

        def bound() -> None:
            run()
            if dense is not out:
                out.copy_(dense)

        return bound

    return Loaded(
        versions={"torch": torch.__version__, "numpy": version("numpy")},
        kernels={f"torch.{op}": bind for op in builders},
    )


class _Torch:
    """One method per op: `(views, out, attrs) -> run`, where `run()` fills `out`."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def view(self, block: Block) -> Any:
        """The block's memory as a tensor, without a copy."""
        torch, spec = self.torch, block.spec
        dtype = getattr(torch, spec.dtype)
        if spec.numel == 0:
            return torch.empty(spec.shape, dtype=dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
            flat = torch.frombuffer(block.memory, dtype=dtype, count=spec.span_bytes // spec.itemsize)
        return flat.as_strided(spec.shape, spec.strides)

    def attention(self, views: Sequence[Any], out: Any, attrs: Mapping[str, Any]) -> Callable[[], Any]:
        q, k, v, mask = views
        queries, keys = q.shape[2], k.shape[2]
        if keys == 0:  # every row is fully masked
            return out.zero_
        is_causal = attrs["is_causal"]
        if is_causal and queries != keys and attrs["causal_alignment"] == "bottom_right":
            is_causal = False
            mask = self.torch.ones(queries, keys, dtype=self.torch.bool).tril_(keys - queries)
        scale, is_grouped = attrs["scale"], q.shape[1] != k.shape[1]
        sdpa = self.torch.nn.functional.scaled_dot_product_attention
        return lambda: out.copy_(sdpa(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=is_grouped))

    def matmul(self, views: Sequence[Any], out: Any, attrs: Mapping[str, Any]) -> Callable[[], Any]:
        a, b = views
        return lambda: self.torch.matmul(a, b, out=out)

    def linear(self, views: Sequence[Any], out: Any, attrs: Mapping[str, Any]) -> Callable[[], Any]:
        x, weight, bias = views
        return lambda: self.torch.ops.aten.linear.out(x, weight, bias, out=out)

    def softmax(self, views: Sequence[Any], out: Any, attrs: Mapping[str, Any]) -> Callable[[], Any]:
        (x,), dim = views, attrs["dim"]
        return lambda: self.torch.softmax(x, dim, out=out)

    def layer_norm(self, views: Sequence[Any], out: Any, attrs: Mapping[str, Any]) -> Callable[[], Any]:
        x, weight, bias = views
        shape, eps = x.shape[x.ndim - attrs["ndim"] :], attrs["eps"]
        return lambda: out.copy_(self.torch.nn.functional.layer_norm(x, shape, weight, bias, eps))

    def rms_norm(self, views: Sequence[Any], out: Any, attrs: Mapping[str, Any]) -> Callable[[], Any]:
        x, weight = views
        shape, eps = x.shape[x.ndim - attrs["ndim"] :], attrs["eps"]
        return lambda: out.copy_(self.torch.nn.functional.rms_norm(x, shape, weight, eps))

    def gelu(self, views: Sequence[Any], out: Any, attrs: Mapping[str, Any]) -> Callable[[], Any]:
        (x,), approximate = views, attrs["approximate"]
        return lambda: self.torch.ops.aten.gelu.out(x, approximate=approximate, out=out)

    def silu(self, views: Sequence[Any], out: Any, attrs: Mapping[str, Any]) -> Callable[[], Any]:
        (x,) = views
        return lambda: self.torch.ops.aten.silu.out(x, out=out)

    def embedding(self, views: Sequence[Any], out: Any, attrs: Mapping[str, Any]) -> Callable[[], Any]:
        ids, weight = views
        rows = weight.shape[0]
        flat_out = out.view(-1, weight.shape[1])

        def run() -> None:
            low, high = (int(bound) for bound in self.torch.aminmax(ids))
            if low < 0 or high >= rows:
                bad = low if low < 0 else high
                raise InvalidArgument(
                    f"embedding id {bad} is outside [0, {rows}), the rows of weight", id=bad, num_embeddings=rows
                )
            self.torch.index_select(weight, 0, ids.reshape(-1), out=flat_out)

        return run
