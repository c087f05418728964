"""What of a call is quantized, and how: what descriptors' fields about quantization are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from layerzero.ipc.vocabulary.quantized_shapes import PACKED
from layerzero.ipc.vocabulary.tensors import TensorSpec


class Quantization(NamedTuple):
    """`dtype`: int8, uint8, int4, fp8_e4m3, fp8_e5m2, mxfp4 (fp4 in blocks of 32), nvfp4 (of 16) or fp4 (of others).
    `granularity`: of the finest scale: per_tensor, per_channel (one for each row) or blockwise."""

    dtype: str
    granularity: str
    has_zero_point: bool


_NAMES = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
_BLOCKS = {32: "mxfp4", 16: "nvfp4"}


def quantization(op: str, given: Mapping[str, TensorSpec], attrs: Mapping[str, Any]) -> Quantization | None:
    """Of a call in canonical form; None for ops without quantized numbers. Of a product the weight's dtype counts."""
    if op == "dynamic_quantize":
        groups, made = attrs["groups"], attrs["format"]
        granularity = (
            "blockwise" if groups > 1 or made in _BLOCKS.values() else "per_channel" if groups else "per_tensor"
        )
        return Quantization(_NAMES.get(made, made), granularity, not attrs["symmetric"])
    has_zero = any(name.endswith("zero_point") for name in given)
    if op == "quantize":
        made = attrs["dtype"]
        return Quantization(_NAMES.get(made, made), _granularity([given["scale"]]), has_zero)
    if op == "dequantize":
        return Quantization(_name(given["x"], given["scale"]), _granularity([given["scale"]]), has_zero)
    if op == "scaled_linear":
        weight, scale = given["weight"], given["weight_scale"]
        scales = [scale, *([given["x_scale"]] if "x_scale" in given else [])]
        is_of_blocks = scale.shape[0] not in (1, weight.shape[0])
        granularity = "blockwise" if is_of_blocks else _granularity(scales)
        return Quantization(attrs["weight_format"] or _name(weight, scale), granularity, has_zero)
    return None


def _name(numbers: TensorSpec, scale: TensorSpec) -> str:
    if numbers.dtype != PACKED:
        return _NAMES.get(numbers.dtype, numbers.dtype)
    return _BLOCKS.get(2 * numbers.shape[-1] // max(scale.shape[-1], 1), "fp4")


def _granularity(scales: list[TensorSpec]) -> str:
    if any(scale.shape[-1] > 1 for scale in scales):
        return "blockwise"
    return "per_tensor" if all(scale.numel == 1 for scale in scales) else "per_channel"
