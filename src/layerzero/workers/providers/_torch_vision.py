"""Convolutions, pooling and interpolation by torch, on every device. Used by torch_cpu.py and torch_cuda.py."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from layerzero.ipc.vocabulary import resampling, windows
from layerzero.workers.provider import Call
from layerzero.workers.providers._torch_ops import Builder, Run, in_place


class Vision:
    """Builders. torch has no out= for them: results are copied to the caller."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def builders(self) -> Mapping[str, Builder]:
        return {
            "conv": self.conv,
            "conv_transpose": self.conv_transpose,
            "max_pool": self.max_pool,
            "interpolate": self.interpolate,
            "avg_pool": self.avg_pool,
            "adaptive_max_pool": functools.partial(self.adaptive, name="adaptive_max_pool"),
            "adaptive_avg_pool": functools.partial(self.adaptive, name="adaptive_avg_pool"),
        }

    def conv(self, views: Sequence[Any], call: Call) -> Run:
        """What is padded before and after by different numbers is padded by a kernel of its own."""
        x, weight, bias = views
        pads: Sequence[tuple[int, int]] = windows.pads(call.attrs["padding"])
        stride: Sequence[int] = windows.known(call.attrs["stride"])
        dilation = windows.known(call.attrs["dilation"])
        if x.dtype is self.torch.bfloat16:
            stride, pads = _without_idle_strides(call, stride, pads, dilation)
        is_even = all(before == after for before, after in pads)
        padding = [before if is_even else 0 for before, _ in pads]
        more = self._at_the_ends(pads)
        convolve = (self.torch.conv1d, self.torch.conv2d, self.torch.conv3d)[len(pads) - 1]

        def run(out: Any) -> None:
            given = x if is_even else self.torch.nn.functional.pad(x, more)
            self._give(out, convolve(given, weight, bias, stride, padding, dilation, call.attrs["groups"]), call)

        return run

    def conv_transpose(self, views: Sequence[Any], call: Call) -> Run:
        """Of what is cut off before and after, torch takes the lesser number; the rest is cut off its result."""
        x, weight, bias = views
        functional = self.torch.nn.functional
        stride, dilation = (windows.known(call.attrs[name]) for name in ("stride", "dilation"))
        cuts = windows.cut(call.attrs)
        padding = [min(cut.before, cut.after) for cut in cuts]
        first = [cut.before - least for cut, least in zip(cuts, padding, strict=True)]
        more, zeros = [cut.more for cut in cuts], self._at_the_ends([(0, cut.zeros) for cut in cuts])
        convolve = getattr(functional, f"conv_transpose{len(cuts)}d")
        sizes = call.outputs[0].shape[2:]

        def run(out: Any) -> None:
            given = functional.pad(x, zeros) if any(zeros) else x
            made = convolve(given, weight, bias, stride, padding, more, call.attrs["groups"], dilation)
            for dim, (start, size) in enumerate(zip(first, sizes, strict=True), 2):
                made = made.narrow(dim, start, size)
            self._give(out, made, call)

        return run

    def max_pool(self, views: Sequence[Any], call: Call) -> Run:
        """What is padded unevenly is padded by a kernel of its own."""
        (x,), functional = views, self.torch.nn.functional
        kernel, stride, dilation = (windows.known(call.attrs[name]) for name in ("kernel_size", "stride", "dilation"))
        pads, more, is_ceiled = self._padded(call)
        pool = getattr(functional, f"max_pool{len(pads)}d")

        def run(out: Any) -> None:
            given = functional.pad(x, more, value=-math.inf) if any(more) else x
            out.copy_(pool(given, kernel, stride, pads, dilation, is_ceiled))

        return run

    def avg_pool(self, views: Sequence[Any], call: Call) -> Run:
        """Of what is padded unevenly the sums, and their shares."""
        (x,), functional, attrs = views, self.torch.nn.functional, call.attrs
        kernel, stride = (windows.known(attrs[name]) for name in ("kernel_size", "stride"))
        pads, more, is_ceiled = self._padded(call)
        is_half = x.itemsize == 2 and x.device.type == "cpu"
        is_small = any(n > size for n, size in zip(kernel, x.shape[2:], strict=True))
        is_lacking = x.ndim == 5 and (is_half or is_small)  # torch 2.13 has no avg_pool3d of those
        if any(more) or (attrs["divisor"] and x.ndim == 3) or is_lacking:  # avg_pool1d has no divisor
            return self._sums(x, call)
        pool, options = getattr(functional, f"avg_pool{len(pads)}d"), {}
        if attrs["divisor"]:
            options["divisor_override"] = attrs["divisor"]
        return lambda out: out.copy_(pool(x, kernel, stride, pads, is_ceiled, attrs["count_include_pad"], **options))

    def _sums(self, x: Any, call: Call) -> Run:
        torch, functional, attrs = self.torch, self.torch.nn.functional, call.attrs
        kernel, stride = (list(windows.known(attrs[name])) for name in ("kernel_size", "stride"))
        sizes, pads = call.outputs[0].shape[2:], windows.pads(attrs["padding"])
        dims = list(zip(x.shape[2:], sizes, kernel, stride, pads, strict=True))
        ends = [(one[4][0], one[4][1] + windows.beyond(*one)) for one in dims]
        factor = torch.full((), 1 / (attrs["divisor"] or 1), dtype=torch.float64)
        if not attrs["divisor"]:
            for one in dims:
                counts = windows.shares(*one, counts_padding=attrs["count_include_pad"])
                factor = factor.unsqueeze(-1) / torch.tensor(counts, dtype=torch.float64)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        factor = factor.to(x.device, wide)
        is_line = len(sizes) == 1  # as one row: avg_pool1d has no divisor
        pool = functional.avg_pool2d if is_line else getattr(functional, f"avg_pool{len(sizes)}d")
        window = ([1, *kernel], [1, *stride]) if is_line else (kernel, stride)
        more = self._at_the_ends(ends)

        def run(out: Any) -> None:
            padded = functional.pad(x.to(wide), more)
            sums = pool(padded.unsqueeze(2) if is_line else padded, *window, divisor_override=1)
            sums = sums.squeeze(2) if is_line else sums
            cut = sums[(..., *(slice(size) for size in sizes))]
            out.copy_(cut * factor)

        return run

    def _padded(self, call: Call) -> tuple[list[int], list[int], bool]:
        """What torch pads itself, or what is padded before, with all that the last window sees beyond."""
        x, pads = call.inputs[0], windows.pads(call.attrs["padding"])
        assert x is not None
        if all(before == after for before, after in pads):
            return [before for before, _ in pads], [], call.attrs["ceil_mode"]
        sizes = call.outputs[0].shape[2:]
        numbers = (windows.known(call.attrs[name]) for name in ("kernel_size", "stride"))
        gaps = windows.known(call.attrs["dilation"]) if call.op == "max_pool" else [1] * len(pads)
        dims = zip(x.shape[2:], sizes, *numbers, pads, gaps, strict=True)
        ends = [(one[4][0], one[4][1] + windows.beyond(*one)) for one in dims]
        return [0] * len(pads), self._at_the_ends(ends), False

    def adaptive(self, views: Sequence[Any], call: Call, name: str) -> Run:
        (x,), sizes = views, windows.known(call.attrs["output_size"])
        pool = getattr(self.torch.nn.functional, f"{name}{len(sizes)}d")
        return lambda out: out.copy_(pool(x, sizes))

    def interpolate(self, views: Sequence[Any], call: Call) -> Run:
        """In float32 for half precision. torch computes coordinates in float32, which now and then finds another
        nearest element than there is: then they are taken one dimension after the other."""
        torch, (x,), attrs = self.torch, views, call.attrs
        mode, dims = attrs["mode"], x.ndim - 2
        scales = resampling.scales_of(attrs["scale"]) or ()
        sizes = windows.known(attrs["size"])
        if mode.startswith("nearest"):
            return self._nearest(x, sizes, scales, mode)
        names = {"linear": ("linear", "bilinear", "trilinear")[dims - 1], "cubic": "bicubic"}
        options = {"mode": names[mode], "align_corners": attrs["align_corners"], "antialias": attrs["antialias"]}
        options |= {"scale_factor": scales} if scales else {"size": sizes}

        def run(out: Any) -> None:
            wide = x if x.dtype == torch.float64 else x.float()
            out.copy_(torch.nn.functional.interpolate(wide, **options))

        return run

    def _nearest(self, x: Any, sizes: Sequence[int], scales: Sequence[float], mode: str) -> Run:
        torch = self.torch
        factors = scales or (None,) * len(sizes)
        half = 0.5 if mode == "nearest_exact" else 0.0
        found, is_same = [], True
        for size, made, scale in zip(x.shape[2:], sizes, factors, strict=True):
            right = [one[0][0] for one in resampling.taps(size, made, scale, mode, is_aligned=False, is_smoothed=False)]
            step = torch.tensor(1 / scale if scale else size, dtype=torch.float32) / (1 if scale else made)
            theirs = ((torch.arange(made, dtype=torch.float32) + half) * step).floor_().clamp_(max=size - 1)
            is_same = is_same and theirs.tolist() == right
            found.append(torch.tensor(right).to(x.device))
        options = {"scale_factor": scales} if scales else {"size": sizes}
        theirs = {"nearest": "nearest", "nearest_exact": "nearest-exact"}[mode]

        def run(out: Any) -> None:
            if is_same:
                out.copy_(torch.nn.functional.interpolate(x, mode=theirs, **options))
                return
            made = x
            for dim, places in enumerate(found, 2):
                made = made.index_select(dim, places)
            out.copy_(made)

        return run

    def _give(self, out: Any, made: Any, call: Call) -> None:
        if call.attrs["activation"]:
            in_place(self.torch, call.attrs["activation"])(made)
        out.copy_(made)

    def _at_the_ends(self, pads: Sequence[tuple[int, int]]) -> list[int]:
        """As torch.nn.functional.pad has it: from the last dimension on."""
        return [number for pad in reversed(pads) for number in pad]


def _without_idle_strides(
    call: Call, stride: Sequence[int], pads: Sequence[tuple[int, int]], dilation: Sequence[int]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Strides and padding of the same convolution, where a dimension in which one element comes out has no stride, and
    of the input what that element is made of. oneDNN 3.12 (torch 2.13) with AMX gives a row of one element in bfloat16
    that is wrong, if the stride is more than 1."""
    x, weight, _ = call.inputs
    assert x is not None
    assert weight is not None
    strides, ends = list(stride), list(pads)
    for dim, count in enumerate(call.outputs[0].shape[2:]):
        if count == 1 and strides[dim] > 1:
            reach = windows.reach(weight.shape[2 + dim], dilation[dim])
            before = min(ends[dim][0], reach)
            strides[dim], ends[dim] = 1, (before, reach - before - x.shape[2 + dim])
    return strides, ends
