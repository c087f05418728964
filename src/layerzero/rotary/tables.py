"""Cosines and sines of positions."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import layerzero as lz
from layerzero.rotary.frequencies import Floats, _frequencies
from layerzero.rotary.parameters import Parameters, count, refuse

DTYPES = ("float64", "float32", "bfloat16", "float16")
STREAMS = 3  # of positions in mrope: time, height, width


class Tables(NamedTuple):
    """cos, sin: (..., sequence, pairs), a column for each pair, as lz.rope takes them, in shared memory."""

    cos: Any
    sin: Any


def tables(
    positions: Any,
    head_dim: int,
    parameters: Mapping[str, Any] | None = None,
    *,
    theta: float | None = None,
    max_position_embeddings: int | None = None,
    seq_len: int | None = None,
    dtype: Any = "float32",
) -> Tables:
    """cos and sin of positions times frequencies, times the scaling's attention factor: computed in float64, and
    rounded to the dtype once.

    positions: how many from 0 on, or an array of them on the CPU, (sequence) or (batch, sequence). Where parameters has
    mrope_section, an array of three streams, (3, sequence) or (3, batch, sequence): each pair turns by the stream of
    its section, with mrope_interleaved in turns; of a number all streams are the same.
    parameters, theta, max_position_embeddings: as frequencies. seq_len: likewise, by default one more than the greatest
    position, which is what Transformers takes it for.
    dtype: a name or a NumPy dtype for NumPy's arrays, a torch.dtype for tensors; float64, float32, bfloat16 or float16.
    Returns (cos, sin), each (..., sequence, pairs). Raises InvalidArgument, OutOfMemory.
    Sources: docs/rotary.md.
    """
    said = Parameters(parameters)
    section: list[int] | None = said["mrope_section"]
    places = _places(positions, is_mrope=section is not None)
    if seq_len is None:
        seq_len = int(places.max()) + 1 if places.size else 0
    inverse, factor = _frequencies(head_dim, said, theta, max_position_embeddings, max(seq_len, 0))
    if section is None:
        angles = places[..., None] * inverse
    else:
        streams = _streams(section, len(inverse), is_interleaved=bool(said["mrope_interleaved"]))
        angles = np.moveaxis(places, 0, -1)[..., streams] * inverse
    return Tables(_rounded(np.cos(angles) * factor, dtype), _rounded(np.sin(angles) * factor, dtype))


def _places(positions: Any, *, is_mrope: bool) -> Floats:
    if isinstance(positions, (int, np.integer)):
        places = np.arange(count("positions", positions, 0), dtype=np.float64)
        return np.broadcast_to(places, (STREAMS, len(places))) if is_mrope else places
    try:
        given = np.asarray(positions)
    except (TypeError, RuntimeError) as exc:  # a tensor of a GPU
        refuse(f"positions cannot be read here ({exc})", "an array on the CPU", "move it there: positions.cpu()")
    if given.dtype.kind not in "iuf" or not np.isfinite(given).all():
        refuse(f"positions has dtype {given.dtype}", "finite numbers", "convert them")
    if is_mrope and (given.ndim not in (2, 3) or given.shape[0] != STREAMS):
        allowed = "(3, sequence) or (3, batch, sequence), as parameters has mrope_section"
        refuse(f"positions has shape {list(given.shape)}", allowed, "of text alone repeat them three times")
    if not is_mrope and given.ndim not in (1, 2):
        refuse(f"positions has shape {list(given.shape)}", "(sequence) or (batch, sequence)", "reshape them")
    return given.astype(np.float64)


def _streams(section: list[int], pairs: int, *, is_interleaved: bool) -> NDArray[np.intp]:
    """Which stream's positions each pair turns by."""
    if sum(section) != pairs or (is_interleaved and len(section) != STREAMS):
        allowed = f"{'three ' if is_interleaved else ''}numbers of pairs that add up to {pairs}"
        refuse(f"mrope_section is {section}", allowed, "check head_dim")
    if not is_interleaved:
        return np.repeat(np.arange(len(section)) % STREAMS, section)
    number = np.arange(pairs)
    stream = number % STREAMS
    # Height and width have as many pairs as they say, time has all others.
    return np.where(number < STREAMS * np.array(section)[stream], stream, 0)


def _rounded(values: Floats, dtype: Any) -> Any:
    name = str(dtype).removeprefix("torch.") if not hasattr(dtype, "name") else dtype.name
    name = getattr(dtype, "__name__", name)  # numpy.float32, the class
    if name not in DTYPES:
        refuse(f"dtype is {dtype!r}", ", ".join(DTYPES), "pass one of them")
    out = lz.empty(values.shape, dtype)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(out, torch.Tensor):
        out.copy_(torch.from_numpy(np.ascontiguousarray(values)))
    else:
        np.copyto(out, values, casting="unsafe")
    return out
