"""A capsule's call made smaller, as long as it fails in the same way: what goes into an issue is best small."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layerzero.client.arrays.recognition import CPU
from layerzero.client.capsules.form import ALIGNMENTS, CALL, Argument, Capsule, Segment, memory_name
from layerzero.client.facade.memory import empty
from layerzero.client.gpu.own_arrays import GpuArray
from layerzero.client.tools.replay import START_S, request_of, why_of
from layerzero.ipc.errors import InvalidArgument, LayerZeroError
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec

MAX_TRIES = 100
SUFFIX = "-small"


@dataclass(frozen=True)
class Shrunk:
    """`arguments`: the smallest ones found that fail by `what`. `tries`: how many calls that took."""

    arguments: dict[str, Any]
    what: str
    tries: int

    @property
    def label(self) -> str:
        return ", ".join(f"{name} {'x'.join(map(str, one.shape))}:{one.dtype}" for name, one in self.arguments.items())


def shrink(
    session: Any,
    capsule: Capsule,
    arguments: dict[str, Any],
    backend: str,
    *,
    times: int = 1,
    timeout_s: float | None = None,
    device: int = CPU,
    tried: Callable[[str], None] = lambda _: None,
) -> Shrunk:
    """Halve the extents of the arguments, equal ones together, as long as one of `times` calls on the backend fails as
    the whole one does; first the front half is kept, then the back half. What is kept are the numbers, the strides and
    the gaps of the whole. `device`: the ordinal of a GPU that each call is made on.

    Raises InvalidArgument for a call that does not fail here, and for an op with indices, whose
    numbers say what there must be."""
    if OPS[capsule.op].indices:
        raise InvalidArgument(
            f"calls of {capsule.op} have indices, which smaller tensors do not have: not to be shrunk"
        )
    tries = 0

    def failure(given: Mapping[str, Any]) -> str:
        """In a word; empty where it does not fail."""
        nonlocal tries
        before = {name: one.copy() for name, one in given.items()}
        for _ in range(times):
            within_s = timeout_s or START_S
            tries += 1
            try:
                placed = given if device == CPU else to_gpu(given, device)
                session.run_apart(request_of(capsule.op, capsule.params, placed, backend, within_s))
            except LayerZeroError as exc:
                return why_of(exc)[0]
            for name, one in given.items():
                one[...] = before[name]
        return ""

    what = failure(arguments)
    if not what:
        raise InvalidArgument(
            f"it does not fail on {backend} here, in {times} runs: nothing to shrink; --times runs more"
        )
    kept, done = arguments, False
    while not done and tries < MAX_TRIES:
        done = True
        for candidate in _smaller(kept):
            tried(", ".join("x".join(map(str, one.shape)) for one in candidate.values()))
            if failure(candidate) == what:
                kept, done = candidate, False
                break
            if tries >= MAX_TRIES:
                break
    return Shrunk(kept, what, tries)


def to_gpu(arrays: Mapping[str, Any], device: int) -> dict[str, GpuArray]:
    """NumPy's arrays in memory of ours on a GPU, with their strides and gaps, aligned as they are here."""
    found = {}
    for name, array in arrays.items():
        spec = TensorSpec(str(array.dtype), tuple(array.shape), tuple(step // array.itemsize for step in array.strides))
        room = GpuArray(device, TensorSpec.contiguous("uint8", (spec.span_bytes + ALIGNMENTS,)))
        found[name] = made = room.part(spec, (array.ctypes.data - room.address) % ALIGNMENTS)
        if spec.span_bytes:
            made.store(memoryview(bytearray(ctypes.string_at(array.ctypes.data, spec.span_bytes))))
    return found


def _smaller(arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Each with one extent halved, wherever it is: the largest first."""
    for extent in sorted({n for one in arguments.values() for n in one.shape if n > 1}, reverse=True):
        half = extent // 2
        for part in (slice(0, half), slice(extent - half, extent)):
            yield {name: _cut(one, extent, part) for name, one in arguments.items()}


def _cut(array: Any, extent: int, part: slice) -> Any:
    """A view; of an array without gaps one without gaps again, since kernels may take no other."""
    found = array[tuple(part if n == extent else slice(None) for n in array.shape)]
    if found.shape == array.shape or not array.flags.c_contiguous:
        return found
    made = empty(found.shape, str(found.dtype))
    made[...] = found
    return made


def save(folder: Path, capsule: Capsule, shrunk: Shrunk) -> str:
    """A capsule of the smaller call, beside the whole one; its name. Raises OSError."""
    arguments, segments, blocks = [], [], []
    for number, (its, array) in enumerate(shrunk.arguments.items()):
        strides = tuple(step // array.itemsize for step in array.strides)
        spec = TensorSpec(str(array.dtype), tuple(array.shape), strides)
        blocks.append(ctypes.string_at(array.ctypes.data, spec.span_bytes) if spec.numel else b"")
        segments.append(Segment(len(blocks[-1]), array.ctypes.data % ALIGNMENTS))
        arguments.append(Argument(its, spec, number, 0))
    smaller = replace(capsule, arguments=tuple(arguments), segments=tuple(segments), output=None)
    return put(folder, capsule, smaller, blocks)


def put(folder: Path, whole: Capsule, smaller: Capsule, blocks: Sequence[bytes]) -> str:
    """Keep a capsule beside the one that it was made of, with the bytes of its segments; its name. Raises OSError."""
    made_s, what = time.time(), whole.name.partition("-")[2].removesuffix(SUFFIX)
    name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(made_s))}-{what}{SUFFIX}"  # of its own time, as others
    draft = folder / f".{name}.{os.getpid()}"
    draft.mkdir(mode=0o700)
    try:
        segments = []
        for number, (segment, block) in enumerate(zip(smaller.segments, blocks, strict=True)):
            file = draft / memory_name(number)
            file.write_bytes(block)
            file.chmod(0o600)
            segments.append(replace(segment, sha256=hashlib.sha256(block).hexdigest()))
        facts = {**whole.facts, "shrunk_from": whole.name}
        made = replace(smaller, name=name, made_s=made_s, segments=tuple(segments), left_out="", facts=facts)
        (draft / CALL).write_text(json.dumps(made.to_dict(), indent=1))
        shutil.rmtree(folder / name, ignore_errors=True)
        draft.rename(folder / name)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return name
