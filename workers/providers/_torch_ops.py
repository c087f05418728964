"""Ops in PyTorch that are the same on every device. Used by torch_cpu.py and torch_cuda.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerzero.ipc.errors import InvalidArgument
from layerzero.workers.provider import Bind, Block, Bound, Call

Run = Callable[[Any], Any]  # fills the tensor it is given
Builder = Callable[[Sequence[Any], Call], Run]  # of the inputs' views, None where one is left out

# Ops whose kernels write any strides themselves; the others get a contiguous tensor, see binder().
_WRITES_STRIDED = frozenset({"attention", "softmax"})


def binder(torch: Any, view: Callable[[Block], Any], build: Builder) -> Bind:
    """A Bind that gives `build` the blocks as tensors, and its run an output that it can write."""

    def bind(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        views = [None if block is None else view(block) for block in inputs]
        out = view(outputs[0])
        if out.numel() == 0:
            return lambda: None
        run = build(views, call)
        # With strides that do not collapse, the out= forms of gelu, linear and matmul fail or write the wrong
        # elements (torch 2.13).
        is_direct = call.op in _WRITES_STRIDED or out.is_contiguous()

        def bound() -> None:
            if is_direct:
                run(out)
                return
            dense = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            run(dense)
            out.copy_(dense)

        return bound

    return bind


class TorchOps:
    """One method per op, each a Builder."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def builders(self) -> Mapping[str, Builder]:
        """Every op but attention, by name."""
        return {
            "matmul": self.matmul,
            "linear": self.linear,
            "softmax": self.softmax,
            "layer_norm": self.layer_norm,
            "rms_norm": self.rms_norm,
            "gelu": self.gelu,
            "silu": self.silu,
            "embedding": self.embedding,
        }

    def matmul(self, views: Sequence[Any], call: Call) -> Run:
        a, b = views
        return lambda out: self.torch.matmul(a, b, out=out)

    def linear(self, views: Sequence[Any], call: Call) -> Run:
        x, weight, bias = views
        return lambda out: self.torch.ops.aten.linear.out(x, weight, bias, out=out)

    def softmax(self, views: Sequence[Any], call: Call) -> Run:
        (x,), dim = views, call.attrs["dim"]
        return lambda out: self.torch.softmax(x, dim, out=out)

    def layer_norm(self, views: Sequence[Any], call: Call) -> Run:
        x, weight, bias = views
        shape, eps = x.shape[x.ndim - call.attrs["ndim"] :], call.attrs["eps"]
        return lambda out: out.copy_(self.torch.nn.functional.layer_norm(x, shape, weight, bias, eps))

    def rms_norm(self, views: Sequence[Any], call: Call) -> Run:
        x, weight = views
        shape, eps = x.shape[x.ndim - call.attrs["ndim"] :], call.attrs["eps"]
        return lambda out: out.copy_(self.torch.nn.functional.rms_norm(x, shape, weight, eps))

    def gelu(self, views: Sequence[Any], call: Call) -> Run:
        (x,), approximate = views, call.attrs["approximate"]
        return lambda out: self.torch.ops.aten.gelu.out(x, approximate=approximate, out=out)

    def silu(self, views: Sequence[Any], call: Call) -> Run:
        (x,) = views
        return lambda out: self.torch.ops.aten.silu.out(x, out=out)

    def embedding(self, views: Sequence[Any], call: Call) -> Run:
        """Reads the ids' range on the host, because a bad id is the caller's error: on a GPU it waits for them."""
        ids, weight = views
        rows, columns = weight.shape

        def run(out: Any) -> None:
            low, high = (int(bound) for bound in self.torch.aminmax(ids))
            if low < 0 or high >= rows:
                bad = low if low < 0 else high
                raise InvalidArgument(
                    f"embedding id {bad} is outside [0, {rows}), the rows of weight", id=bad, num_embeddings=rows
                )
            self.torch.index_select(weight, 0, ids.reshape(-1), out=out.view(-1, columns))

        return run
