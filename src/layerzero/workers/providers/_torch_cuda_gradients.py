"""Attention with the log-sum-exp of its rows, and its backward pass, by torch's three fused kernels for GPUs: those
that torch's own autograd calls. All of them give a natural log-sum-exp in float32.

Backward, each adds up the gradient of the queries in whatever order its blocks come to it, unless it is told to be
deterministic, which makes it another kernel: those can always be lifted, since a proof compares bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from layerzero.workers.provider import Call
from layerzero.workers.providers._torch_cuda import ALIGNMENT_BYTES, TorchCuda
from layerzero.workers.providers._torch_ops import Builder, Run, any_scale, any_scale_backward

# In what torch's efficient attention counts: the rows of its log-sum-exp, and the columns of what it adds to scores.
EFFICIENT_ROWS, EFFICIENT_COLUMNS = 32, 16
LEAST_ROWS = 2  # of queries, and of keys, that cuDNN takes where gradients are wanted


class _Rule(NamedTuple):
    """What says which keys a query sees, as the kernels take it."""

    is_causal: bool
    bias: Any = None


Forward = Callable[..., tuple[Any, Any]]  # q, k, v, rule, scale -> out, lse
Given = Callable[[Any, int], Callable[[], Any]]  # a tensor and a width -> how it is read
Backward = Callable[..., Sequence[Any]]  # grad_out, q, k, v, out, lse, rule, scale -> the gradients of q, k, v


class Gradients:
    """Two Builders for each implementation."""

    def __init__(self, torch: Any, gpu: TorchCuda) -> None:
        self.torch, self.gpu, self.aten = torch, gpu, torch.ops.aten

    def builders(self) -> Mapping[str, Builder]:
        found: dict[str, Builder] = {}
        for name in ("flash", "efficient", "cudnn"):
            forward, backward = getattr(self, f"{name}_forward"), getattr(self, f"{name}_backward")
            given = self._aligned_to_the_last if name == "efficient" else self._given
            found[f"attention_forward.{name}"] = self._forwards(forward, given)
            found[f"attention_backward.{name}"] = self._backwards(backward, given)
            if name != "cudnn":  # whose kernel says that it is, and is not (docs/torch.md)
                called = f"attention_backward.{name}_deterministic"
                found[called] = self._backwards(backward, given, is_deterministic=True)
        return found

    def flash_forward(self, q: Any, k: Any, v: Any, rule: _Rule, scale: float) -> tuple[Any, Any]:
        found = self.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, rule.is_causal, False, scale=scale)
        return found[0], found[1]

    def flash_backward(
        self, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, rule: _Rule, scale: float
    ) -> Sequence[Any]:
        no_starts, no_dropout = (None, None), (self._unused(q), self._unused(q))
        found: Sequence[Any] = self.aten._scaled_dot_product_flash_attention_backward(
            *(grad, q, k, v, out, lse.contiguous(), *no_starts, q.shape[2], k.shape[2], 0.0, rule.is_causal),
            *no_dropout,
            scale=scale,
        )
        return found

    def efficient_forward(self, q: Any, k: Any, v: Any, rule: _Rule, scale: float) -> tuple[Any, Any]:
        found = self.aten._scaled_dot_product_efficient_attention(
            q, k, v, rule.bias, True, 0.0, rule.is_causal, scale=scale
        )
        return found[0], found[1][:, :, : q.shape[2]]

    def efficient_backward(
        self, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, rule: _Rule, scale: float
    ) -> Sequence[Any]:
        rows = self.torch.nn.functional.pad(lse, (0, -lse.shape[2] % EFFICIENT_ROWS), value=math.inf).contiguous()
        out = out.transpose(1, 2).contiguous().transpose(1, 2)  # as forward makes it: its strides are taken for granted
        found: Sequence[Any] = self.aten._scaled_dot_product_efficient_attention_backward(
            *(grad, q, k, v, rule.bias, out, rows, self._unused(q), self._unused(q), 0.0, [True, True, True, False]),
            rule.is_causal,
            scale=scale,
        )
        return found[:3]

    def cudnn_forward(self, q: Any, k: Any, v: Any, rule: _Rule, scale: float) -> tuple[Any, Any]:
        queries, keys, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
        if keys == 1:  # every row sees it, under either rule, and its weight is 1
            k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
            scores = (q.float() * k.float()).sum(-1) * scale
            return v.expand(-1, -1, queries, -1), scores
        found = self.aten._scaled_dot_product_cudnn_attention(
            self._at_least(q), k, v, None, True, 0.0, rule.is_causal, False, scale=scale
        )
        return found[0][:, :, :queries], found[1].reshape(*q.shape[:2], -1)[:, :, :queries]

    def cudnn_backward(
        self, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, rule: _Rule, scale: float
    ) -> Sequence[Any]:
        """Of rows of zeros that are added: a query's gradient is 0, and so is what it gives to keys; a key is
        multiplied by 0 in those of queries."""
        at_least = self._at_least
        rows = at_least(lse.unsqueeze(-1)).contiguous()
        found = self.aten._scaled_dot_product_cudnn_attention_backward(
            *(at_least(grad), at_least(q), at_least(k), at_least(v), at_least(out), rows),
            *(self._unused(q), self._unused(q), None, None, None),
            *(max(q.shape[2], LEAST_ROWS), max(k.shape[2], LEAST_ROWS), 0.0, rule.is_causal),
            scale=scale,
        )
        return [grads[:, :, : of.shape[2]] for grads, of in zip(found, (q, k, v), strict=True)]

    def _forwards(self, forward: Forward, given: Given) -> Builder:
        forward = any_scale(forward)

        def build(views: Sequence[Any], call: Call) -> Run:
            q, k, v, mask, *_ = views
            if _is_empty(q, k, v):
                return lambda targets: _nothing(targets, k)
            hidden = _hidden(q, k, call)
            width = max(q.shape[3], v.shape[3])
            inputs = [given(tensor, width) for tensor in (q[:, :, hidden:], k, v)]

            def run(targets: Any) -> None:
                out, lse = targets
                rule = self._rule(q, k, mask, call)
                found, rows = forward(*(give() for give in inputs), rule, scale=call.attrs["scale"])
                out[:, :, hidden:].copy_(found[..., : out.shape[3]])
                lse[:, :, hidden:].copy_(rows)
                out[:, :, :hidden].zero_()
                lse[:, :, :hidden].fill_(-math.inf)
                if mask is not None:
                    sees_nothing = ~_seen(self.torch, mask).any(-1)
                    out.masked_fill_(sees_nothing.unsqueeze(-1), 0)
                    lse.masked_fill_(sees_nothing, -math.inf)

            return run

        return build

    def _backwards(self, backward: Backward, given: Given, *, is_deterministic: bool = False) -> Builder:
        backward = any_scale_backward(backward)

        def build(views: Sequence[Any], call: Call) -> Run:
            grad_out, q, k, v, output, lse, mask = views
            if _is_empty(q, k, v):
                return _zeros
            hidden = _hidden(q, k, call)
            width = max(q.shape[3], v.shape[3])
            grad, queries, out = (given(tensor[:, :, hidden:], width) for tensor in (grad_out, q, output))
            keys, values = (given(tensor, width) for tensor in (k, v))

            def run(targets: Any) -> None:
                rows = lse[:, :, hidden:]
                if mask is not None:  # the weights of a row that sees nothing are exp(-inf - 0) = 0
                    rows = rows.masked_fill(rows == -math.inf, 0.0)
                rule, scale = self._rule(q, k, mask, call), call.attrs["scale"]
                with self._determinism(is_deterministic):
                    found = backward(grad(), queries(), keys(), values(), out(), rows, rule, scale=scale)
                targets[0][:, :, :hidden].zero_()
                for target, made in zip((targets[0][:, :, hidden:], *targets[1:]), found, strict=True):
                    target.copy_(made[..., : target.shape[3]])

            return run

        return build

    @contextmanager
    def _determinism(self, is_wanted: bool) -> Iterator[None]:
        """As torch.use_deterministic_algorithms, for a while."""
        torch = self.torch
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        if before == (is_wanted, False):
            yield
            return
        is_filled = torch.utils.deterministic.fill_uninitialized_memory
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(is_wanted)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.utils.deterministic.fill_uninitialized_memory = is_filled

    def _rule(self, q: Any, k: Any, mask: Any, call: Call) -> _Rule:
        """The mask is what is added to scores, dense in rows that are a multiple of 16 apart."""
        torch, keys = self.torch, k.shape[2]
        if mask is None:
            return _Rule(bool(call.attrs["is_causal"]))
        width = keys + -keys % EFFICIENT_COLUMNS
        room = torch.zeros((*mask.shape[:2], q.shape[2], width), dtype=q.dtype, device=q.device)
        bias = room[..., :keys]
        if mask.dtype == torch.bool:
            bias.masked_fill_(~mask, -math.inf)
        else:
            bias.copy_(mask.expand(*mask.shape[:2], *bias.shape[2:]))
        return _Rule(False, bias.expand(*q.shape[:2], *bias.shape[2:]))

    def _at_least(self, tensor: Any) -> Any:
        """(B, H, S, D) with LEAST_ROWS rows, of which those that are added are 0."""
        missing = LEAST_ROWS - tensor.shape[2]
        return tensor if missing <= 0 else self.torch.nn.functional.pad(tensor, (0, 0, 0, missing))

    def _unused(self, like: Any) -> Any:
        """A seed or an offset of random numbers, which only dropout draws."""
        return self.torch.empty((), dtype=self.torch.int64, device=like.device)

    def _given(self, tensor: Any, width: int) -> Callable[[], Any]:
        """As TorchCuda.aligned, with elements of their own: kernels refuse rows that lie on each other, as gradients of
        sums do."""
        if all(n == 1 or stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            return self.gpu.aligned(tensor, width)
        return self._copied(tensor, width)

    def _aligned_to_the_last(self, tensor: Any, width: int) -> Callable[[], Any]:
        """For torch's efficient kernels, which look at the strides of single rows, too."""
        is_aligned = all(stride * tensor.element_size() % ALIGNMENT_BYTES == 0 for stride in tensor.stride()[:-1])
        return self._given(tensor, width) if is_aligned else self._copied(tensor, width)

    def _copied(self, tensor: Any, width: int) -> Callable[[], Any]:
        """One head_dim for all: zeros that are added to it change nothing."""
        pad, missing = self.torch.nn.functional.pad, width - tensor.shape[3]
        return lambda: pad(tensor.clone(memory_format=self.torch.contiguous_format), (0, missing))


def _is_empty(q: Any, k: Any, v: Any) -> bool:
    return not (q.shape[0] * q.shape[1] * q.shape[2] and k.shape[2] and max(q.shape[3], v.shape[3]))


def _nothing(targets: Any, k: Any) -> None:
    """out is 0; with keys of no width all scores are 0."""
    out, lse = targets
    out.zero_()
    lse.fill_(-math.inf if k.shape[2] == 0 else math.log(k.shape[2]))


def _zeros(targets: Any) -> None:
    for target in targets:
        target.zero_()


def _hidden(q: Any, k: Any, call: Call) -> int:
    """How many of the first queries see no key. They are left out: kernels are wrong in others with them."""
    is_bottom_right = call.attrs["is_causal"] and call.attrs["causal_alignment"] == "bottom_right"
    return max(q.shape[2] - k.shape[2], 0) if is_bottom_right else 0


def _seen(torch: Any, mask: Any) -> Any:
    return mask if mask.dtype == torch.bool else mask > -math.inf
