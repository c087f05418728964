"""Attention with the log-sum-exp of its rows, and its backward pass, by torch's flash attention for CPUs; options of
attention that it lacks are composed of other kernels of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from layerzero.ipc.vocabulary.ops import OPS
from layerzero.workers.provider import Call
from layerzero.workers.providers._torch_ops import Builder, Run, any_scale, any_scale_backward

ROWS = 256  # queries at a time where each sees some of the keys
CHUNK = 1 << 22  # scores or biases at a time


def restore_nan(out: Any, q: Any, k: Any, mask: Any, *, is_causal: bool) -> Any:
    """torch's and ZenDNN's kernels for CPUs (2.13, 5.3) take a row of nothing but NaN scores for one that sees nothing,
    and give 0: what comes of NaN is NaN, unless the mask or the causal rule (top left) hides it."""
    lost = out[..., 0] == 0.0
    if lost.any():
        lost &= _has_nan(q, k, mask, is_causal=is_causal)
        out.masked_fill_(lost.unsqueeze(-1), math.nan)
    return out


def _has_nan(q: Any, k: Any, mask: Any, *, is_causal: bool) -> Any:
    """Of each query whether one of the scores that it may see is NaN, which finite numbers come to as well that are so
    large that their products are infinite."""
    seen = None if mask is None else mask > -math.inf if mask.is_floating_point() else mask
    if is_causal:
        rule = q.new_ones((q.shape[2], k.shape[2])).bool().tril_()
        seen = rule if seen is None else seen & rule
    found = q.isnan().any(-1)
    if seen is not None:
        found = found & seen.any(-1)
    largest = 3e38 if q.itemsize <= 4 else 1e308
    known = q.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)  # those with NaN are found
    if k.numel() and not float(known.abs().amax()) * float(k.abs().amax()) * q.shape[3] < largest:  # else none is
        wide = q.double() if q.itemsize > 4 else q.float()
        keys = k.to(wide.dtype).repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1)
        scores = (wide @ keys.mT).isnan()
        found = found | (scores if seen is None else scores & seen).any(-1)
    return found


def sdpa_with_nan(torch: Any) -> Any:
    """torch's scaled_dot_product_attention, with NaN for rows of NaN scores, and any scale."""
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def attend(q: Any, k: Any, v: Any, *, attn_mask: Any, is_causal: bool, **options: Any) -> Any:
        found = sdpa(q, k, v, attn_mask=attn_mask, is_causal=is_causal, **options)
        return restore_nan(found, q, k, attn_mask, is_causal=is_causal)

    return any_scale(attend)


class FlashAttention:
    """Two Builders. The kernels are aten::_scaled_dot_product_flash_attention_for_cpu and its backward, which torch's
    own autograd calls; both read grouped heads as ours, and align the causal rule top left."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self._forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        self._backward, self.attend = any_scale_backward(backward), any_scale(self._attend)

    def forward(self, views: Sequence[Any], call: Call) -> Run:
        """Targets: out and lse."""
        if has_options(call):
            return Composed(self.torch, self.attend, views, call).forward
        q, k, v, mask, *_ = views
        width, scale = max(q.shape[3], v.shape[3]), call.attrs["scale"]
        is_empty = not (q.shape[0] * q.shape[1] * q.shape[2] and k.shape[2] and width)

        def run(targets: Any) -> None:
            out, lse = targets
            if is_empty:
                out.zero_()
                lse.fill_(-math.inf if k.shape[2] == 0 else math.log(k.shape[2]))
                return
            is_causal, bias = self._rule(q, k, mask, call)
            found, rows = self.attend(q, k, v, bias, scale=scale, is_causal=is_causal)
            out.copy_(found)
            lse.copy_(rows)

        return run

    def _attend(self, q: Any, k: Any, v: Any, bias: Any, *, scale: float, is_causal: bool = False) -> tuple[Any, Any]:
        """Result and log-sum-exp. `bias`: in q's dtype or float32, dense in its last two dimensions."""
        width = max(q.shape[3], v.shape[3])
        found, rows = self._forward(
            *(self._wide(tensor, width) for tensor in (q, k, v)), 0.0, is_causal, attn_mask=bias, scale=scale
        )
        lost = rows == 0.0
        if lost.any():  # as restore_nan
            lost &= _has_nan(q, k, bias, is_causal=is_causal)
            found.masked_fill_(lost.unsqueeze(-1), math.nan)
            rows.masked_fill_(lost, math.nan)
        if bias is not None:  # the kernel gives 0 for a row that sees nothing
            rows.masked_fill_(~(bias > -math.inf).any(-1), -math.inf)
        return found[..., : v.shape[3]], rows

    def backward(self, views: Sequence[Any], call: Call) -> Run:
        """Targets: the gradients of q, k and v. In float64 forward runs again, for a log-sum-exp of that precision."""
        torch, (grad_out, q, k, v, output, lse, mask) = self.torch, views
        width, scale = max(q.shape[3], v.shape[3]), call.attrs["scale"]
        is_empty = not (q.shape[0] * q.shape[1] * q.shape[2] and k.shape[2] and width)

        def run(targets: Any) -> None:
            if is_empty:
                for target in targets:
                    target.zero_()
                return
            is_causal, bias = self._rule(q, k, mask, call)
            inputs = [self._wide(tensor, width) for tensor in (q, k, v)]
            if q.dtype == torch.float64:
                found, rows = self.attend(q, k, v, bias, scale=scale, is_causal=is_causal)
                out = self._wide(found, width)
            else:
                out, rows = self._wide(output, width), lse
            rows = rows.masked_fill(rows == -math.inf, 0.0)  # the weights there are exp(-inf - 0) = 0
            grad = self._wide(grad_out, width)
            found = self._backward(grad, *inputs, out, rows, 0.0, is_causal, attn_mask=bias, scale=scale)
            for target, made in zip(targets, found, strict=True):
                target.copy_(made[..., : target.shape[3]])

        return run

    def _wide(self, tensor: Any, width: int) -> Any:
        """As the kernels load it: one head_dim for all, since zeros that are added to it change nothing, rows without
        gaps, none of which overlap."""
        if tensor.shape[3] < width:
            return self.torch.nn.functional.pad(tensor, (0, width - tensor.shape[3]))
        is_plain = tensor.stride(3) == 1 and (tensor.shape[2] == 1 or tensor.stride(2) >= width)
        return tensor if is_plain else tensor.clone(memory_format=self.torch.contiguous_format)

    def _rule(self, q: Any, k: Any, mask: Any, call: Call) -> tuple[bool, Any]:
        """Whether the kernel applies its own causal rule, and the mask that it adds, dense in its last two
        dimensions."""
        torch, (queries, keys) = self.torch, (q.shape[2], k.shape[2])
        is_causal = call.attrs["is_causal"]
        shift = keys - queries if call.attrs["causal_alignment"] == "bottom_right" else 0
        if is_causal and (shift or mask is not None):
            seen = torch.ones(1, 1, queries, keys, dtype=torch.bool).tril_(shift)
            mask = seen if mask is None else both(mask, seen)
            is_causal = False
        if mask is None:
            return is_causal, None
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -math.inf)
        return False, mask.expand(*mask.shape[:2], queries, keys).contiguous()


def merge(torch: Any) -> Builder:
    """A Builder, of any device. Targets: out and lse."""

    def build(views: Sequence[Any], call: Call) -> Run:
        given = [view for view in views if view is not None]
        outs, sums = given[::2], given[1::2]
        wide = torch.float64 if outs[0].dtype == torch.float64 else torch.float32

        def run(targets: Any) -> None:
            out, lse = targets
            rows = torch.stack(sums).to(wide)
            total = torch.logsumexp(rows, 0)
            shares = (rows - total).exp_().masked_fill_(rows == -math.inf, 0.0).unsqueeze(-1)
            made: Any = 0.0
            for part, share in zip(outs, shares, strict=True):  # what has no weight may hold anything
                made = made + (part.to(wide) * share).masked_fill_(share == 0.0, 0.0)
            out.copy_(made)
            lse.copy_(total)

        return run

    return build


def has_options(call: Call) -> bool:
    """Whether a call asks for more than scaled_dot_product_attention has."""
    given = any(spec is not None for spec in call.inputs[4:]) or not OPS[call.op].options.isdisjoint(call.attrs)
    return given or bool(call.attrs["is_causal"] and call.inputs[3] is not None)


def both(mask: Any, seen: Any) -> Any:
    """A mask that hides what `seen`, which is bool, hides, too."""
    return mask & seen if mask.dtype == seen.dtype else mask.masked_fill(~seen, -math.inf)


class Composed:
    """Attention with options, so many queries at a time that neither their scores nor their biases take much memory;
    of windows and causal rules only the keys that these queries may see. `attend(q, k, v, bias, scale=)` gives a result
    and its log-sum-exp; without one, and with a soft cap, they are composed."""

    def __init__(
        self, torch: Any, attend: Callable[..., tuple[Any, Any]] | None, views: Sequence[Any], call: Call
    ) -> None:
        self.torch = torch
        self.q, self.k, self.v, self.mask, self.sinks, self.slopes = views
        attrs = call.attrs
        self.scale, self.cap = attrs["scale"], attrs.get("softcap")
        is_wide = self.q.shape[3] or self.v.shape[3]
        self.attend = attend if attend is not None and self.cap is None and is_wide else self._composed
        queries, keys = self.q.shape[2], self.k.shape[2]
        self.shift = keys - queries if attrs["causal_alignment"] == "bottom_right" else 0
        rows = attrs.get("mask_block_q")
        # Keys of blocks that no query sees are left out on a CPU; on a GPU nobody waits to know which.
        self.blocks = None if rows is None else (rows, attrs["mask_block_k"])
        self.is_sparse = rows is not None and self.mask.device.type == "cpu"
        self.left = attrs.get("window_left")
        self.right = 0 if attrs["is_causal"] else attrs.get("window_right")
        self.wide = torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def forward(self, targets: Any) -> None:
        """Fills out and lse."""
        out, lse = targets
        if not lse.numel():
            return
        for rows in self._chunks():
            found, total = self._rows(rows)
            out[:, :, rows].copy_(found)
            lse[:, :, rows].copy_(total)

    def attention(self, out: Any) -> None:
        """Fills out."""
        for rows in self._chunks():
            out[:, :, rows].copy_(self._rows(rows)[0])

    def _chunks(self) -> Iterator[slice]:
        batch, heads, queries, _ = self.q.shape
        reach = self.k.shape[2]
        if self.left is not None and self.right is not None:
            reach = min(reach, self.left + self.right + ROWS)
        rows = min(queries, ROWS if self.left is not None or self.right is not None else queries)
        if self.attend == self._composed or self.slopes is not None:
            rows = max(1, min(rows, CHUNK // (batch * heads * max(reach, 1))))
        if self.is_sparse and self.blocks is not None:  # so many that they are of whole blocks
            rows = max(min(rows, ROWS) // self.blocks[0], 1) * self.blocks[0]
        for start in range(0, queries, rows):
            yield slice(start, min(start + rows, queries))

    def _rows(self, rows: slice) -> tuple[Any, Any]:
        """What these queries get, and its log-sum-exp."""
        first, last = rows.start + self.shift, rows.stop - 1 + self.shift
        low = 0 if self.left is None else max(first - self.left, 0)
        high = self.k.shape[2] if self.right is None else min(last + self.right + 1, self.k.shape[2])
        q, seen = self.q[:, :, rows], None
        if self.is_sparse and low < high:
            seen = self._seen(rows, low, high)
        if low >= high or (seen is not None and not seen.numel()):
            out = q.new_zeros((*q.shape[:3], self.v.shape[3]))
            lse = q.new_full(q.shape[:3], -math.inf, dtype=self.wide)
        else:
            bias = self._bias(rows, low, high)
            k, v = self.k[:, :, low:high], self.v[:, :, low:high]
            if seen is not None and seen.numel() < high - low:
                k, v = k.index_select(2, seen), v.index_select(2, seen)
                bias = None if bias is None else bias.index_select(3, seen)
            out, lse = self.attend(q, k, v, bias, scale=self.scale)
        if self.sinks is None:
            return out, lse
        sink = self.sinks.to(lse.dtype)[:, None]
        total = self.torch.logaddexp(lse, sink)
        share = (lse - total).exp_().masked_fill_(lse == -math.inf, 0.0)  # of the weight, what keys have
        return out.to(self.wide) * share.unsqueeze(-1), total

    def _seen(self, rows: slice, low: int, high: int) -> Any:
        """Which keys from `low` to `high` are in a block that one of these queries sees, in any batch or head."""
        assert self.blocks is not None
        of_rows, of_keys = self.blocks
        mask = self.mask
        if mask.shape[2] > 1:
            mask = mask[:, :, rows.start // of_rows : -(-rows.stop // of_rows)]
        known = mask.any(0).any(0).any(0)
        places = self.torch.arange(low, high) // of_keys if len(known) > 1 else self.torch.zeros(high - low).long()
        return known[places].nonzero().flatten()

    def _masked(self, rows: slice, low: int, high: int) -> Any:
        """The mask of these queries and keys; None where blocks hide none of what `_seen` gives."""
        torch, mask = self.torch, self.mask
        if self.blocks is None:
            return mask.expand(*mask.shape[:2], self.q.shape[2], self.k.shape[2])[:, :, rows, low:high]
        of_rows, of_keys = self.blocks
        first = 0
        if mask.shape[2] > 1:
            first = rows.start // of_rows
            mask = mask[:, :, first : -(-rows.stop // of_rows)]
        if self.is_sparse and bool((mask == mask[:1, :1, :1]).all()):
            return None  # all queries see the same blocks
        if mask.shape[2] > 1:
            number = torch.arange(rows.start, rows.stop, device=mask.device) // of_rows
            mask = mask.index_select(2, number - first)
        if mask.shape[3] > 1:
            mask = mask.index_select(3, torch.arange(low, high, device=mask.device) // of_keys)
        return mask.expand(*mask.shape[:2], rows.stop - rows.start, high - low)

    def _bias(self, rows: slice, low: int, high: int) -> Any:
        """What is added to scores: (1 or batch, 1 or heads, queries, keys), or None."""
        torch, bias = self.torch, None
        place = {"device": self.q.device}
        distance = torch.arange(low, high, **place) - torch.arange(rows.start, rows.stop, **place)[:, None] - self.shift
        if self.slopes is not None:
            bias = -self.slopes.to(self.wide)[:, :, None, None] * distance.abs()
        mask = None if self.mask is None else self._masked(rows, low, high)
        if mask is not None:
            if mask.dtype == torch.bool:
                mask = torch.zeros(mask.shape, dtype=self.wide, **place).masked_fill_(~mask, -math.inf)
            bias = mask.to(self.wide) if bias is None else bias + mask
        if self.left is not None or self.right is not None:
            hidden = torch.zeros((), dtype=torch.bool, **place)
            if self.left is not None:
                hidden = hidden | (distance < -self.left)
            if self.right is not None:
                hidden = hidden | (distance > self.right)
            if bias is None:
                bias = torch.zeros((1, 1, *distance.shape), dtype=self.wide, **place)
            bias = bias.masked_fill(hidden, -math.inf)
        return None if bias is None else bias.contiguous()

    def _composed(self, q: Any, k: Any, v: Any, bias: Any, scale: float) -> tuple[Any, Any]:
        """As `attend`, with the soft cap if there is one."""
        torch, cap = self.torch, self.cap
        batch, heads, rows, _ = q.shape
        shape = (batch, k.shape[1], heads // k.shape[1] * rows, -1)  # heads that share keys are rows of one product
        wide_q, wide_k, wide_v = (tensor.to(self.wide) for tensor in (q, k, v))
        scores = torch.matmul(wide_q.reshape(shape), wide_k.mT).reshape(batch, heads, rows, -1)
        scores = scores.mul_(scale) if cap is None else scores.mul_(scale / cap).tanh_().mul_(cap)
        if bias is not None:
            scores = scores + bias
        top = scores.amax(-1, keepdim=True)
        top = top.masked_fill(top == -math.inf, 0.0)
        weights = (scores - top).exp_()
        total = weights.sum(-1, keepdim=True)
        out = torch.matmul(weights.reshape(shape), wide_v).reshape(*q.shape[:3], -1)
        return out / total.masked_fill(total == 0.0, 1.0), (total.log() + top).squeeze(-1)
