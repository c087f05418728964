"""Weights of 4 bits, packed once: from the layouts that libraries store, kept in shared memory under an id."""

from __future__ import annotations

import hashlib
import sys
import weakref
from typing import TYPE_CHECKING, Any

from layerzero.client.arrays import fp4_layouts, int4_layouts
from layerzero.client.arrays.array_types import ArrayT
from layerzero.client.connection.call import Request
from layerzero.client.facade.memory import empty
from layerzero.client.facade.running import perform
from layerzero.client.planning.quantized_plans import plan_scaled_linear
from layerzero.ipc.errors import InvalidArgument

if TYPE_CHECKING:
    from layerzero.client.arrays.array_types import AnyArray


class PackedWeight:
    """What pack_weight gives, in shared memory, as scaled_linear takes it.

    weight: uint8 (out_features, in_features / 2) where weight_format is "int4", or packed fp4 of torch where it is "";
    scale: float32, and zero_point: int32 or None, (out_features, groups); order: which inputs the columns are for, None
    where they are in order. id: the SHA-256 of all of it, in hexadecimal."""

    __slots__ = ("__weakref__", "_bytes", "id", "order", "scale", "weight", "weight_format", "zero_point")

    def __init__(self, made: int4_layouts.Packed, weight_format: str) -> None:
        self._bytes, self.scale = _shared(made.weight), _shared(made.scale)
        self.zero_point = None if made.zero_point is None else _shared(made.zero_point)
        self.order, self.weight_format = made.order, weight_format
        self.weight = self._bytes
        if not weight_format:
            torch = sys.modules["torch"]  # which its tensors came from
            self.weight = torch.from_numpy(self._bytes).view(torch.float4_e2m1fn_x2)
        self.id = self._digest()

    @property
    def in_features(self) -> int:
        """How many numbers a row has."""
        return 2 * int(self._bytes.shape[1])

    @property
    def out_features(self) -> int:
        """How many rows there are."""
        return int(self._bytes.shape[0])

    @property
    def group_size(self) -> int:
        """So many numbers of a row share a scale."""
        return self.in_features // int(self.scale.shape[1])

    def check(self) -> None:
        """Raises InvalidArgument where its numbers are no longer those that the id says."""
        found = self._digest()
        if found != self.id:
            raise InvalidArgument(
                f"packed weight {self.id:.12} has changed: its numbers are those of {found:.12} now; pack it again"
            )

    def __repr__(self) -> str:
        shape = f"{self.out_features} x {self.in_features}"
        return f"PackedWeight({self.id:.12}, {shape} in groups of {self.group_size})"

    def _digest(self) -> str:
        found = hashlib.sha256(
            repr((self.weight_format, self._bytes.shape, self.scale.shape, self.order is None)).encode()
        )
        for array in (self._bytes, self.scale, self.zero_point, self.order):
            if array is not None:
                found.update(array.tobytes())
        return found.hexdigest()


_kept: weakref.WeakValueDictionary[str, PackedWeight] = weakref.WeakValueDictionary()


def pack_weight(
    qweight: AnyArray,
    scales: AnyArray,
    qzeros: AnyArray | None = None,
    g_idx: AnyArray | None = None,
    *,
    layout: str,
    global_scale: float | None = None,
) -> PackedWeight:
    """A weight of 4 bits for packed_linear, from the tensors that a library stores of a layer; on the CPU.

    layout: "gptq", of int32 qweight (in_features / 8, out_features), eight rows in a word, qzeros (groups,
    out_features / 8), each less 1, scales (groups, out_features), and g_idx (in_features,), the group of each input,
    where those are not in order; "gptq_v2", the same with zero points as they are; "awq", of int32 qweight
    (in_features, out_features / 8), eight columns in a word in the order 0, 2, 4, 6, 1, 3, 5, 7, qzeros likewise, and
    scales; "int4", as scaled_linear takes it; or, of tensors of torch, "mxfp4" and "nvfp4", of uint8 qweight
    (out_features, in_features / 2), two numbers in a byte, the first in its low bits, with scales (out_features, groups
    of 32) that are exponents in uint8, 2 ** (scale - 127), or floats (out_features, groups of 16), which are multiplied
    by global_scale. Without qzeros zero points of integers are 8. Equal weights are packed once in a process: the one
    that is kept is returned. Raises InvalidArgument. Sources: Frantar et al. 2023 (GPTQ) and AutoGPTQ's QuantLinear;
    Lin et al. 2024 (AWQ) and AutoAWQ's WQLinear_GEMM; OCP microscaling formats 1.0, 5.4 and 6.3; NVIDIA's NVFP4.
    """
    known = (*int4_layouts.LAYOUTS, *fp4_layouts.LAYOUTS)
    if layout not in known:
        allowed = " or ".join(map(repr, known))
        raise InvalidArgument(f"pack_weight: layout is {layout!r}; allowed: {allowed}; pass one of them")
    if layout in fp4_layouts.LAYOUTS:
        made = PackedWeight(fp4_layouts.converted(layout, qweight, scales, qzeros, g_idx, global_scale), "")
    elif global_scale is not None:
        text = f"pack_weight: global_scale is given for layout {layout!r}; allowed: None; leave it out"
        raise InvalidArgument(text)
    else:
        made = PackedWeight(int4_layouts.converted(layout, qweight, scales, qzeros, g_idx), "int4")
    kept = _kept.get(made.id)
    if kept is None or kept._digest() != made.id:  # somebody has written into that one
        _kept[made.id] = kept = made
    return kept


def packed_weight(id: str) -> PackedWeight:
    """The weight that was packed under this id, while anyone has it. Raises InvalidArgument, also where its numbers
    have changed since."""
    found = _kept.get(id)
    if found is None:
        raise InvalidArgument(f"no packed weight {id!r:.80} is kept here; pack it with lz.pack_weight, and keep it")
    found.check()
    return found


def packed_linear(
    x: ArrayT,
    weight: PackedWeight,
    bias: AnyArray | None = None,
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """x @ W^T + bias, W the numbers that a packed weight stands for, by scaled_linear.

    x: (..., in_features), float32, bfloat16 or float16; a copy where the weight has an order of its own. bias: float32
    (out_features,). Returns (..., out_features) in x's dtype.
    """
    if not isinstance(weight, PackedWeight):
        text = (
            f"packed_linear: weight is a {type(weight).__name__}; allowed: a PackedWeight; make one with lz.pack_weight"
        )
        raise InvalidArgument(text)
    if weight.order is not None:
        x = x[..., weight.order]  # type: ignore[index]
    args = (x, weight.weight, weight.scale, None, bias, None, weight.zero_point)
    params: dict[str, Any] = {"dtype": None, "weight_format": weight.weight_format}
    return perform(Request("scaled_linear", args, params, plan_scaled_linear, out, backend, timeout_s))


def _shared(array: Any) -> Any:
    made = empty(array.shape, array.dtype.name)
    made[...] = array
    return made
