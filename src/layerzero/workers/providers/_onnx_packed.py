"""Weights of 4 bits as constants of sessions of their own, which the runtime packs for its kernels once. Used by
onnxruntime.py."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.provider import Bind, Block, Bound, Call
from layerzero.workers.providers._kept_weights import KeptWeights, read_most_bytes
from layerzero.workers.providers._onnx_graph import Graph
from layerzero.workers.providers._onnx_quantized import POINTS, SHIFTS, packed_linear

# Each session has threads of its own: the runtime's Python has none for them to share (1.18.1).
MOST_SESSIONS = 256
# Numbers that share a scale in the runtime's kernels; what is a multiple of one of them are several such blocks.
BLOCKS = (128, 64, 32, 16)
_MOST_STEP, _MOST_SHIFT = 2e37, 3e38  # 15 times the one, and the other, are finite in float32
_CONSTANTS = ("weight", "weight_scale", "weight_zero_point")

MakeSession = Callable[[Graph, dict[str, str], dict[str, Any]], Any]
"""Of a graph, the dtypes of its tensors, and constants by name, whose memory the session may refer to."""


def block_of(call: Call) -> int:
    """How many numbers of a row are a block; 0 where the runtime has no kernel for groups like these."""
    weight, scale = call.inputs[1:3]
    assert weight is not None
    assert scale is not None
    size = 2 * weight.shape[1] // scale.shape[1]
    return next((block for block in BLOCKS if size % block == 0), 0)


class _Key:
    """What a binding is found by, for as long as its call is bound."""


class _Made:
    """The session of a weight, None where the runtime's layout does not have its numbers. `constants`: memory that it
    refers to."""

    def __init__(self, session: Any, constants: dict[str, Any]) -> None:
        self.session = session
        self.constants = constants
        self.bindings: weakref.WeakKeyDictionary[_Key, Any] = weakref.WeakKeyDictionary()


class PackedWeights:
    """Binds calls of scaled_linear with a weight of 4 bits; `bind_plain` does where it is not kept."""

    def __init__(self, numpy: Any, onnx: Any, make_session: MakeSession, bind_plain: Bind) -> None:
        self.numpy = numpy
        self.onnx = onnx
        self.make_session = make_session
        self.bind_plain = bind_plain
        self.kept = KeptWeights(read_most_bytes(os.environ), MOST_SESSIONS)

    def bind(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        block = block_of(call)
        if not block:
            return self.bind_plain(call, inputs, outputs)
        numpy, given = self.numpy, {**dict(zip(OPS[call.op].inputs, inputs, strict=True)), "out": outputs[0]}
        blocks = {name: one for name, one in given.items() if one is not None}
        arrays = {name: numpy.frombuffer(one.host, numpy.uint8) for name, one in blocks.items()}
        dtypes = {name: one.spec.dtype for name, one in blocks.items()}
        constants = [blocks[name].spec for name in _CONSTANTS if name in blocks]
        places = [(arrays[n].ctypes.data, s.numel * s.itemsize) for n, s in zip(_CONSTANTS, constants, strict=False)]
        graph = packed_linear(self.onnx, numpy, call, block, "")
        ranks = {name: len(shape) for name, shape in graph.inputs.items()}
        kind = (block, *(spec.shape for spec in constants), *sorted(ranks.items()), *sorted(dtypes.items()))
        n, half = constants[0].shape
        nbytes = n * half + 9 * n * (2 * half // block)  # a scale and what takes the place of a zero point, in floats
        key, plain = _Key(), list[Bound]()

        def make(copies: Sequence[Any]) -> _Made:
            values = self._constants(copies, constants, block)
            if not values:
                return _Made(None, values)
            points = next((name for name in (POINTS, SHIFTS) if name in values), "")
            built = packed_linear(self.onnx, numpy, call, block, points)
            return _Made(self.make_session(built, dtypes, values), values)

        def binding_of(made: _Made) -> Any:
            binding = made.bindings[key] = made.session.io_binding()
            for tensors, put in ((graph.inputs, binding.bind_input), (graph.outputs, binding.bind_output)):
                for name, shape in tensors.items():
                    put(name, "cpu", 0, numpy.dtype(dtypes[name]), shape, arrays[name].ctypes.data)
            return binding

        def bound() -> None:
            made = self.kept.get(kind, places, nbytes, make)
            if made is not None and made.session is not None:
                made.session.run_with_iobinding(made.bindings.get(key) or binding_of(made))
                return
            if not plain:
                plain.append(self.bind_plain(call, inputs, outputs))
            plain[0]()

        return bound

    def _constants(self, copies: Sequence[Any], specs: Sequence[TensorSpec], block: int) -> dict[str, Any]:
        """In the runtime's layout: numbers (N, blocks, block / 2), steps (N * blocks), and the zero points of each row
        two in a byte, or, where one is not from 0 to 15, what (blocks, N) to multiply the sum of each block of x by.
        Nothing where a scale is infinite, or so great that its products are: its kernels subtract after they scale."""
        numpy, (n, half) = self.numpy, specs[0].shape
        blocks = 2 * half // block

        def each(number: int, dtype: Any) -> Any:
            """One for each block of each row."""
            found = numpy.frombuffer(copies[number], dtype).reshape(specs[number].shape)
            rows, groups = specs[number].shape
            return found.repeat(n // rows, 0).repeat(blocks // groups, 1)

        steps = each(1, numpy.float32)
        made = {
            "numbers": numpy.frombuffer(copies[0], numpy.uint8).reshape(n, blocks, block // 2),
            "steps": steps.reshape(-1),
        }
        if not numpy.abs(steps).max() <= _MOST_STEP:
            return {}
        if len(specs) < 3:
            return made
        points = each(2, numpy.int32)
        if points.min() < 0 or points.max() > 15:
            shifts = ((8.0 - points) * steps).T
            if numpy.abs(shifts).max() > _MOST_SHIFT:
                return {}
            made[SHIFTS] = numpy.ascontiguousarray(shifts, numpy.float32)
        elif (points != 8).any():  # 8 is what it takes without them
            low, high = points[:, ::2], numpy.zeros((n, -(-blocks // 2)), numpy.int32)
            high[:, : blocks // 2] = points[:, 1::2]
            made[POINTS] = (low | high << 4).astype(numpy.uint8).reshape(-1)
        return made
