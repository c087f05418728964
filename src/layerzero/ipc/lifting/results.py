"""What a call gave on trial inputs, as another process compares it with its own: a digest of all bytes, which the GPU
makes of large ones (gpu_digest.py), or a sample of the numbers, of a kernel whose additions take an order of chance."""

from __future__ import annotations

import hashlib
import math
import random
import struct
from collections.abc import Iterator, Mapping, Sequence

from layerzero.ipc.cuda.driver import Driver, read_back
from layerzero.ipc.lifting.gpu_digest import PREFIX, GpuDigest
from layerzero.ipc.vocabulary.tensors import TensorSpec

Result = str | bytes  # a digest, or a sample
Trials = Mapping[int, tuple[Result, ...]]  # by seed of ipc/lifting/trial.py, of each output

SAMPLED = 16384  # numbers: all of a small output, of a larger one as many runs of RUN, one in each equal part
RUN = 16
_PARTS = SAMPLED // RUN
_STEP_BYTES = 64 << 20  # read back at a time
# How far numbers may be apart, as a part of the largest of the sample: some units in the last place of what is stored,
# and for float32 and float64 what the order of some thousand additions makes of them.
_NEAR = {"bfloat16": 2.0**-6, "float16": 2.0**-9, "float32": 2.0**-14, "float64": 2.0**-40}


def read_digest(driver: Driver, address: int, nbytes: int, stream: int, digests: GpuDigest | None = None) -> str:
    """Of bytes on the GPU, once the stream has come to them. With `digests` large ones are not read back."""
    if digests is not None and digests.is_for(nbytes):
        return digests.of(address, nbytes, stream)
    found = hashlib.blake2b(digest_size=20)
    for at in range(0, nbytes, _STEP_BYTES):
        found.update(read_back(driver, address + at, min(_STEP_BYTES, nbytes - at), stream))
    return found.hexdigest()


def read_sample(driver: Driver, address: int, spec: TensorSpec, seed: int, stream: int) -> bytes:
    """Numbers of an output on the GPU, from places that follow from the spec and the seed; none where `can_be_near`
    is false."""
    if not can_be_near(spec):
        return b""
    found, at, data = bytearray(), 0, b""  # data: what lies from `at` on
    for start, stop in _runs(spec, seed):
        while stop > at + len(data):
            kept = data[max(start - at, 0) :] if start < at + len(data) else b""
            at = at + len(data) - len(kept)
            step = min(_STEP_BYTES, spec.span_bytes - at - len(kept))
            data = kept + read_back(driver, address + at + len(kept), step, stream)
        found += data[start - at : stop - at]
    return bytes(found)


def is_like(
    driver: Driver, address: int, spec: TensorSpec, seed: int, wanted: Result, stream: int, digests: GpuDigest
) -> bool:
    """Whether an output on the GPU is what it was in another process. Raises CudaError where the other process let its
    GPU make the digest, and this one's driver does not take that kernel."""
    if isinstance(wanted, str):
        if wanted.startswith(PREFIX):
            return digests.of(address, spec.span_bytes, stream) == wanted
        return read_digest(driver, address, spec.span_bytes, stream) == wanted
    return is_near(spec, wanted, read_sample(driver, address, spec, seed, stream))


def is_near(spec: TensorSpec, one: bytes, other: bytes) -> bool:
    """Whether two samples are the same numbers but for rounding. What is not finite must be the same."""
    if one == other:
        return True
    if not can_be_near(spec) or len(one) != len(other):
        return False
    values, others = _floats(spec.dtype, one), _floats(spec.dtype, other)
    bound = _NEAR[spec.dtype] * max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    return all(
        abs(a - b) <= bound if math.isfinite(a) and math.isfinite(b) else a == b or (a != a and b != b)
        for a, b in zip(values, others, strict=True)
    )


def can_be_near(spec: TensorSpec) -> bool:
    """Whether its numbers can be compared otherwise than by their bytes."""
    return spec.dtype in _NEAR


def fits(trials: Trials, outputs: Sequence[TensorSpec]) -> bool:
    """Whether each trial has a digest, or a sample of the right size, for each output."""
    return all(len(results) == len(outputs) for results in trials.values()) and all(
        type(result) is str or (can_be_near(spec) and len(result) == _sample_bytes(spec))
        for results in trials.values()
        for result, spec in zip(results, outputs, strict=True)
    )


def has_samples(trials: Trials) -> bool:
    """Whether numbers would be compared of some output: no proof for a kernel that is said to repeat its bytes."""
    return any(type(result) is bytes for results in trials.values() for result in results)


def _sample_bytes(spec: TensorSpec) -> int:
    return min(spec.span_bytes // spec.itemsize, SAMPLED) * spec.itemsize


def _runs(spec: TensorSpec, seed: int) -> Iterator[tuple[int, int]]:
    """Where the sample lies, as bytes from the start, in order."""
    size, numel = spec.itemsize, spec.span_bytes // spec.itemsize
    if numel <= SAMPLED:
        yield 0, numel * size
        return
    rng = random.Random(f"{seed}:{numel}")
    for n in range(_PARTS):
        least, end = n * numel // _PARTS, (n + 1) * numel // _PARTS
        start = least + rng.randrange(end - least - RUN + 1)
        yield start * size, (start + RUN) * size


def _floats(dtype: str, data: bytes) -> Sequence[float]:
    if dtype == "bfloat16":  # the upper half of a float32
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[0::2], data[1::2]
        return struct.unpack(f"<{len(data) // 2}f", wide)
    code, size = {"float16": ("e", 2), "float32": ("f", 4), "float64": ("d", 8)}[dtype]
    return struct.unpack(f"<{len(data) // size}{code}", data)
