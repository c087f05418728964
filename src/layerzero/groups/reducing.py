"""Sums and their like of what the ranks gave, element by element, in the order of the ranks.

    ((x0 + x1) + x2) + x3

16-bit floats are added in float32 and rounded once, at the end; all others in their own dtype. Each element is computed
by one rank, or by all of them in the same order, so that all have the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from layerzero.ipc.errors import InvalidArgument

OPS = ("sum", "mean", "prod", "min", "max")
_UFUNCS: dict[str, Any] = {"sum": np.add, "mean": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
_WIDENED = ("float16", "bfloat16")
_FLOATS = (*_WIDENED, "float32", "float64")
_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_BLOCK = 1 << 14  # elements: what is added up stays in the cache


def demand(op: str, dtype: str) -> None:
    """Raises InvalidArgument."""
    if op not in OPS:
        raise InvalidArgument(f"op is {op!r:.40}; allowed: {', '.join(OPS)}")
    allowed = _FLOATS if op == "mean" else (*_FLOATS, *_INTEGERS)
    if dtype not in allowed and not (dtype == "bool" and op in ("min", "max")):
        raise InvalidArgument(f"{op} of {dtype}; allowed: {', '.join(allowed)}; convert it, or gather and compute")


def reduce_into(out: Any, parts: Sequence[Any], op: str, dtype: str) -> None:
    """`out`, `parts`: bytes of equally many elements, row-major; `parts` in the order of the ranks. `out` may be one of
    them."""
    if dtype == "bfloat16" and "torch" in sys.modules and "ml_dtypes" not in sys.modules:
        _by_torch(out, parts, op)
        return
    kind = _numpy_dtype(dtype)
    target = out.view(kind)
    given = [part.view(kind) for part in parts]
    function = _UFUNCS[op]
    if len(given) == 2 and dtype not in _WIDENED:
        function(*given, out=target)
        if op == "mean":
            np.divide(target, 2, out=target)
        return
    wide = np.empty(min(_BLOCK, len(target)), np.float32 if dtype in _WIDENED else kind)
    for start in range(0, len(target), _BLOCK):
        rows = [one[start : start + _BLOCK] for one in given]
        total = wide[: len(rows[0])]
        np.copyto(total, rows[0])
        for row in rows[1:]:
            function(total, row.astype(np.float32) if dtype in _WIDENED else row, out=total)
        if op == "mean":
            np.divide(total, len(rows), out=total)
        target[start : start + _BLOCK] = total


def _numpy_dtype(name: str) -> Any:
    return getattr(sys.modules["ml_dtypes"], name) if name == "bfloat16" else np.dtype(name)


def _by_torch(out: Any, parts: Sequence[Any], op: str) -> None:
    """bfloat16, which NumPy alone does not have, of torch tensors."""
    torch = sys.modules["torch"]
    functions = {
        "sum": torch.add,
        "mean": torch.add,
        "prod": torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
    }
    bits = [torch.from_numpy(part if part.flags.writeable else part.copy()) for part in parts]
    given = [one.view(torch.bfloat16) for one in bits]
    total = given[0].float()
    for one in given[1:]:
        functions[op](total, one.float(), out=total)
    if op == "mean":
        total /= len(given)
    torch.from_numpy(out).view(torch.bfloat16).copy_(total)
