"""Linear layers split over the ranks of a group: each rank has a part of the weight, and the sums are placed.

up = ColumnParallelLinear(group, w_up, b_up)      # each rank: its columns of the result
down = RowParallelLinear(group, w_down, b_down)   # takes such columns; ends in one all_reduce
y = down(lz.gelu(up(x)))                          # the same on all ranks
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from layerzero.client.facade.memory import share
from layerzero.client.facade.ops import linear
from layerzero.groups.group import Group
from layerzero.ipc.errors import InvalidArgument


class ColumnParallelLinear:
    """`weight` (out, in) and `bias` (out,) are whole, and the same on all ranks; this one keeps its part of `out`, in
    shared memory. `gathers`: calls end in an all_gather, and give whole results."""

    def __init__(self, group: Group, weight: Any, bias: Any = None, *, gathers: bool = False) -> None:
        """Raises InvalidArgument."""
        part = _part(group, weight, 0)
        self.group, self.gathers = group, gathers
        self.weight = share(weight[part])
        self.bias = None if bias is None else share(bias[part])

    def __call__(self, x: Any) -> Any:
        """`x` whole. Raises as lz.linear and the group do."""
        y = linear(x, self.weight, self.bias)
        if not self.gathers:
            return y
        parts = self.group.all_gather(y[None])
        torch = sys.modules.get("torch")
        join = torch.cat if torch is not None and isinstance(y, torch.Tensor) else np.concatenate
        return join(list(parts), -1)


class RowParallelLinear:
    """As ColumnParallelLinear; this rank keeps its part of `in`, and takes that part of `x`. The bias is added once,
    by rank 0."""

    def __init__(self, group: Group, weight: Any, bias: Any = None) -> None:
        """Raises InvalidArgument."""
        self.group = group
        self.weight = share(weight[:, _part(group, weight, 1)])
        self.bias = None if bias is None or group.rank else share(bias)

    def __call__(self, x: Any) -> Any:
        """The whole result, the same bits on all ranks. Raises as lz.linear and the group do."""
        y = linear(x, self.weight, self.bias)
        return self.group.all_reduce(y, out=y)


def _part(group: Group, weight: Any, dim: int) -> slice:
    """This rank's part of a dimension. Raises InvalidArgument."""
    if len(weight.shape) != 2 or weight.shape[dim] % group.size:
        name = ("out", "in")[dim]
        raise InvalidArgument(
            f"weight has shape {list(weight.shape)}; allowed: (out, in) of which {group.size} ranks divide {name}"
        )
    share_of = weight.shape[dim] // group.size
    return slice(group.rank * share_of, (group.rank + 1) * share_of)
