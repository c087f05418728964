"""Windows that slide over the last dimensions of a tensor, of convolutions and of pooling: what attributes say of each
dimension, and the extents that come out.

Attributes are scalars, so numbers for several dimensions are a text, "2,1"; padding has those before all dimensions,
then those after them, as ONNX has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

_NUMBERS = re.compile(r"(0|[1-9][0-9]{0,8})(,(0|[1-9][0-9]{0,8})){0,5}")
MAX_DIMS = 3


def text_of(numbers: Iterable[int]) -> str:
    """As an attribute."""
    return ",".join(map(str, numbers))


def numbers_of(text: object) -> tuple[int, ...] | None:
    """What an attribute says, None where it says no numbers."""
    if type(text) is not str or not _NUMBERS.fullmatch(text):
        return None
    return tuple(map(int, text.split(",")))


def known(text: str) -> tuple[int, ...]:
    """The numbers of an attribute that was checked."""
    return tuple(map(int, text.split(",")))


def pads(text: str) -> tuple[tuple[int, int], ...]:
    """Before and after each dimension."""
    numbers = known(text)
    count = len(numbers) // 2
    return tuple(zip(numbers[:count], numbers[count:], strict=True))


def reach(kernel: int, dilation: int) -> int:
    """From the first element that a window reads to the last one."""
    return dilation * (kernel - 1) + 1


def count(
    size: int, kernel: int, stride: int, pad: tuple[int, int], dilation: int = 1, *, is_ceiled: bool = False
) -> int:
    """How many windows there are; none where one does not fit. `is_ceiled`: the last one may reach beyond the padding,
    if it begins before that at the end."""
    room = size + sum(pad) - reach(kernel, dilation)
    if room < 0:
        return 0
    made = (-(-room // stride) if is_ceiled else room // stride) + 1
    return made - 1 if is_ceiled and (made - 1) * stride >= size + pad[0] else made


def spread(size: int, kernel: int, stride: int, pad: tuple[int, int], dilation: int, more: int) -> int:
    """The extent that a transposed convolution gives: the one whose windows are `size`, and `more`."""
    return (size - 1) * stride + reach(kernel, dilation) - sum(pad) + more


class Cut(NamedTuple):
    """Of one dimension of a transposed convolution: what is cut off its result, what is added at its end, and how many
    zeros x gets at its end before."""

    before: int
    after: int
    more: int
    zeros: int


def cut(attrs: Mapping[str, Any]) -> list[Cut]:
    """For libraries that compute something else where as much is added as a stride or more (torch 2.13 and ONNX Runtime
    1.18 do, on CPUs): there x gets zeros, which make the result longer and change nothing of it, and what is added is
    not cut off."""
    found = []
    for (before, after), stride, more in zip(
        pads(attrs["padding"]), known(attrs["stride"]), known(attrs["output_padding"]), strict=True
    ):
        if more < stride:
            found.append(Cut(before, after, more, 0))
        else:
            zeros = max(-((after - more) // stride), 0)
            found.append(Cut(before, after - more + zeros * stride, 0, zeros))
    return found


def adapted(size: int, made: int) -> list[tuple[int, int]]:
    """Of one dimension, where each window of adaptive pooling begins and ends."""
    return [(o * size // made, -(-(o + 1) * size // made)) for o in range(made)]


def beyond(size: int, made: int, kernel: int, stride: int, pad: tuple[int, int], dilation: int = 1) -> int:
    """How far the last window reaches beyond the padding."""
    return max((made - 1) * stride + reach(kernel, dilation) - size - sum(pad), 0)


def shares(size: int, made: int, kernel: int, stride: int, pad: tuple[int, int], *, counts_padding: bool) -> list[int]:
    """Of one dimension, how many elements each window of avg_pool has."""
    found = []
    for o in range(made):
        start = o * stride - pad[0]
        end = min(start + kernel, size + pad[1])
        found.append(end - start if counts_padding else min(end, size) - max(start, 0))
    return found
