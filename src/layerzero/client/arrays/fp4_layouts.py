"""Weights of fp4 as libraries store them, and as lz.scaled_linear takes them: rows of out_features, two numbers in a
byte, and scales in float32. In NumPy, which knows numbers of fp4 as bytes alone."""

from __future__ import annotations

import math
import sys
from typing import Any

from layerzero.client.arrays.int4_layouts import Packed, array_of, numpy_module, refuse

LAYOUTS = {"mxfp4": 32, "nvfp4": 16}  # how many numbers have a scale


def converted(layout: str, qweight: Any, scales: Any, qzeros: Any, g_idx: Any, global_scale: Any) -> Packed:
    """Of one of LAYOUTS. Raises InvalidArgument for tensors that do not belong together."""
    np = numpy_module()
    for name, tensor in (("qweight", qweight), ("scales", scales)):
        if type(tensor).__module__.partition(".")[0] != "torch":
            found = f"{name} is a {type(tensor).__name__} for layout {layout!r}"
            refuse(found, "a tensor of torch", "convert it: NumPy has no packed fp4")
    for name, given in (("qzeros", qzeros), ("g_idx", g_idx)):
        if given is not None:
            refuse(f"{name} is given for layout {layout!r}", "None", "leave it out")
    words = array_of("qweight", _as_bytes(qweight))
    if words.ndim == 3 and words.shape[2] == LAYOUTS[layout] // 2:  # a block for each scale, as gpt-oss stores them
        words = words.reshape(words.shape[0], -1)
    if words.ndim != 2 or words.dtype != np.uint8 or 2 * words.shape[1] % LAYOUTS[layout]:
        allowed = f"uint8 (out_features, in_features / 2), whole blocks of {LAYOUTS[layout]} numbers"
        refuse(f"qweight is {words.dtype}{list(words.shape)}", allowed, "pass the layer's own tensor")
    groups = [len(words), 2 * words.shape[1] // LAYOUTS[layout]]
    is_whole = str(scales.dtype) in ("torch.uint8", "torch.float8_e8m0fnu")
    if list(scales.shape) != groups or is_whole != (layout == "mxfp4"):
        allowed = f"{'exponents in uint8' if layout == 'mxfp4' else 'floats'} {groups}"
        refuse(f"scales is {scales.dtype}{list(scales.shape)}", allowed, "pass the layer's own tensor")
    if layout == "mxfp4":
        if global_scale is not None:
            refuse("global_scale is given for layout 'mxfp4'", "None", "leave it out")
        codes = array_of("scales", _as_bytes(scales)).astype(np.int32)
        steps = np.where(codes == 255, np.float32(math.nan), np.ldexp(np.float32(1), codes - 127))
    else:
        steps = array_of("scales", scales.float()) * np.float32(1.0 if global_scale is None else float(global_scale))
    return Packed(np.ascontiguousarray(words), np.ascontiguousarray(steps, np.float32), None, None)


def _as_bytes(tensor: Any) -> Any:
    """Formats that NumPy does not know."""
    is_narrow = str(tensor.dtype) in ("torch.float4_e2m1fn_x2", "torch.float8_e8m0fnu")
    return tensor.view(sys.modules["torch"].uint8) if is_narrow else tensor
