"""Captures that are read instead of launched: a part of Driver (ipc/cuda/driver.py).

What is said about a graph is copied while it is there; nothing that these methods return outlives it but plain data.
"""

from __future__ import annotations

import ctypes
import heapq
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p

from layerzero.ipc.cuda import abi
from layerzero.ipc.cuda.kernels import MAX_DYNAMIC_SHARED_BYTES, NON_PORTABLE_CLUSTER_SIZE
from layerzero.ipc.cuda.library import Library
from layerzero.ipc.cuda.nodes import Allocation, CopyNode, FillNode, KernelNode, Node, OtherNode

# CUgraphNodeType
_KERNEL, _COPY, _FILL, _CHILD, _EMPTY = 0, 1, 2, 4, 5
_OTHERS = {
    3: "a function on the host",
    6: "a wait for an event",
    7: "a record of an event",
    8: "a signal of an external semaphore",
    9: "a wait for an external semaphore",
    10: "an allocation",
    11: "the end of an allocation",
    12: "operations on words of memory",
    13: "a condition",
}
# CUlaunchAttributeID: cooperative, cluster dimension, scheduling policy of clusters; and bytes of each. What is left
# out (priority, programmatic launch) is about when a kernel runs beside others.
_COOPERATIVE, _CLUSTER, _CLUSTER_POLICY = 2, 4, 5
_ATTRIBUTES = {_COOPERATIVE: 4, _CLUSTER: 12, _CLUSTER_POLICY: 4}
_ATTRIBUTE_BYTES = 64
_EXTRA_END, _EXTRA_POINTER, _EXTRA_SIZE = 0, 1, 2  # CU_LAUNCH_PARAM_*
_ON_DEVICE = frozenset({2, 4})  # CUmemorytype: device, unified
_EDGE_BYTES = 8  # of a CUgraphEdgeData
_MAX_DEPTH = 8  # of graphs in graphs
_MAX_PARAMETERS = 4096


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("function", c_void_p),
        *((name, c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")),
        ("params", POINTER(c_void_p)),
        ("extra", POINTER(c_void_p)),
        ("kernel", c_void_p),
        ("context", c_void_p),
    ]


class _FillParams(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = [
        ("target", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("itemsize", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    ]


class _CopyEnd(ctypes.Structure):
    """The half of CUDA_MEMCPY3D that is about the source, or the target."""

    _fields_ = [
        *((name, c_size_t) for name in ("x_bytes", "y", "z", "level")),
        ("memory_type", c_uint),
        ("host", c_void_p),
        ("device", c_uint64),
        ("array", c_void_p),
        ("_reserved", c_void_p),
        ("pitch", c_size_t),
        ("height", c_size_t),
    ]

    @property
    def start(self) -> int:
        return int(self.device + (self.z * self.height + self.y) * self.pitch + self.x_bytes)


class _CopyParams(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = [
        ("source", _CopyEnd),
        ("target", _CopyEnd),
        ("width_bytes", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
    ]


class GraphNodes(Library):
    """Every method may raise CudaError, and needs a current context."""

    def end_recording(self, stream: int) -> int:
        """The graph that a capture made, to be read and not launched; 0 when nothing was captured.

        Raises CudaError when the capture was broken; the stream is usable again.
        """
        graph = self._handle_after("cuStreamEndCapture", stream)
        if self._count_nodes(graph) == 0:
            self.discard_recording(graph)
            return 0
        return graph

    def discard_recording(self, graph: int) -> None:
        self._call("cuGraphDestroy", graph)

    def nodes(self, graph: int) -> tuple[Node, ...]:
        """What a graph does, in an order in which one stream may do it. Nodes that do nothing are left out, graphs
        within it are taken apart."""
        return tuple(self._nodes(graph, 0))

    def allocation(self, address: int) -> Allocation | None:
        """The memory that an address lies in; None for what CUDA does not know."""
        kind, base, nbytes = c_uint64(), c_uint64(), c_size_t()
        if self._is_refused("cuPointerGetAttribute", byref(kind), abi.MEMORY_TYPE, address):
            return None
        if kind.value not in _ON_DEVICE:
            return Allocation(address, 0, is_device=False)
        if self._is_refused("cuMemGetAddressRange_v2", byref(base), byref(nbytes), address):
            return Allocation(address, 0)
        return Allocation(base.value, nbytes.value)

    def function_attribute(self, function: int, which: int) -> int:
        value = c_int()
        self._call("cuFuncGetAttribute", byref(value), which, function)
        return value.value

    def parameter_layout(self, function: int) -> tuple[tuple[int, int], ...]:
        """Offset and bytes of each parameter."""
        found = []
        for index in range(_MAX_PARAMETERS):
            offset, nbytes = c_size_t(), c_size_t()
            number = self._code("cuFuncGetParamInfo", function, index, byref(offset), byref(nbytes))
            if number == abi.INVALID_VALUE:  # there are no more
                break
            if number:
                raise self._error("cuFuncGetParamInfo", number)
            found.append((offset.value, nbytes.value))
        return tuple(found)

    def _is_refused(self, name: str, *arguments: object) -> bool:
        number = self._code(name, *arguments)
        if number in abi.STICKY:
            raise self._error(name, number)
        return number != 0

    def _handle_after(self, name: str, argument: int) -> int:
        """As _handle, of functions whose result comes second."""
        made = c_void_p()
        self._call(name, argument, byref(made))
        return made.value or 0

    def _count_nodes(self, graph: int) -> int:
        count = c_size_t()
        self._call("cuGraphGetNodes", graph, None, byref(count))
        return count.value

    def _nodes(self, graph: int, depth: int) -> Iterator[Node]:
        if depth > _MAX_DEPTH:
            yield OtherNode(f"a graph within {_MAX_DEPTH} others")
            return
        for node in self._ordered(graph):
            kind = c_int()
            self._call("cuGraphNodeGetType", node, byref(kind))
            if kind.value == _KERNEL:
                yield self._kernel(node)
            elif kind.value == _FILL:
                yield self._fill(node)
            elif kind.value == _COPY:
                yield self._copy(node)
            elif kind.value == _CHILD:
                yield from self._nodes(self._handle_after("cuGraphChildGraphNodeGetGraph", node), depth + 1)
            elif kind.value != _EMPTY:
                yield OtherNode(_OTHERS.get(kind.value, f"a node of type {kind.value}"))

    def _ordered(self, graph: int) -> list[int]:
        """Its nodes, each after those that it depends on; else in the order in which they were captured."""
        count = c_size_t(self._count_nodes(graph))
        handles = (c_void_p * count.value)()
        self._call("cuGraphGetNodes", graph, handles, byref(count))
        nodes = [handle or 0 for handle in handles]
        place = {node: n for n, node in enumerate(nodes)}
        missing = [0] * len(nodes)
        after: list[list[int]] = [[] for _ in nodes]
        for source, target in self._edges(graph):
            after[place[source]].append(place[target])
            missing[place[target]] += 1
        ready = [n for n, number in enumerate(missing) if number == 0]
        ordered = []
        while ready:
            n = heapq.heappop(ready)
            ordered.append(nodes[n])
            for other in after[n]:
                missing[other] -= 1
                if missing[other] == 0:
                    heapq.heappush(ready, other)
        return ordered

    def _edges(self, graph: int) -> list[tuple[int, int]]:
        count = c_size_t()
        # From CUDA 12.3 on; the older one refuses edges with data, such as those of programmatic launches.
        has_data = hasattr(self._library, "cuGraphGetEdges_v2")
        name, null = ("cuGraphGetEdges_v2", (None,)) if has_data else ("cuGraphGetEdges", ())
        self._call(name, graph, None, None, *null, byref(count))
        if not count.value:
            return []
        sources, targets = (c_void_p * count.value)(), (c_void_p * count.value)()
        data = (ctypes.create_string_buffer(_EDGE_BYTES * count.value),) if has_data else ()
        self._call(name, graph, sources, targets, *data, byref(count))
        return [(source or 0, target or 0) for source, target in zip(sources, targets, strict=True)]

    def _kernel(self, node: int) -> KernelNode:
        raw = _KernelParams()
        self._call("cuGraphKernelNodeGetParams_v2", node, byref(raw))
        function = raw.function or self._handle("cuKernelGetFunction", raw.kernel)
        name = c_char_p()
        self._call("cuFuncGetName", byref(name), function)
        module = c_void_p()
        self._is_refused("cuFuncGetModule", byref(module), function)
        layout = self.parameter_layout(function)
        return KernelNode(
            module=module.value or 0,
            name=(name.value or b"").decode(errors="replace"),
            grid=(raw.grid_x, raw.grid_y, raw.grid_z),
            block=(raw.block_x, raw.block_y, raw.block_z),
            shared_bytes=raw.shared_bytes,
            params=_params(raw, layout),
            layout=layout,
            attributes=self._attributes(node),
            max_shared_bytes=max(0, self.function_attribute(function, MAX_DYNAMIC_SHARED_BYTES)),
            is_cluster_size_free=bool(self.function_attribute(function, NON_PORTABLE_CLUSTER_SIZE)),
        )

    def _attributes(self, node: int) -> tuple[tuple[int, bytes], ...]:
        found: dict[int, bytes] = {}
        for which, nbytes in _ATTRIBUTES.items():
            value = (c_ubyte * _ATTRIBUTE_BYTES)()
            if self._is_refused("cuGraphKernelNodeGetAttribute", node, which, value) or not any(value[:nbytes]):
                continue
            if which != _CLUSTER_POLICY or _CLUSTER in found:
                found[which] = bytes(value[:nbytes]).ljust(_ATTRIBUTE_BYTES, b"\0")
        return tuple(found.items())

    def _fill(self, node: int) -> FillNode:
        raw = _FillParams()
        self._call("cuGraphMemsetNodeGetParams", node, byref(raw))
        value = raw.value & ((1 << 8 * raw.itemsize) - 1)
        rows, pitch = max(raw.height, 1), raw.pitch
        if rows > 1 and pitch == raw.width * raw.itemsize:
            return FillNode(raw.target, value, raw.itemsize, raw.width * rows)
        return FillNode(raw.target, value, raw.itemsize, raw.width, rows, pitch if rows > 1 else 0)

    def _copy(self, node: int) -> CopyNode | OtherNode:
        raw = _CopyParams()
        self._call("cuGraphMemcpyNodeGetParams", node, byref(raw))
        source, target, width = raw.source, raw.target, raw.width_bytes
        if not {source.memory_type, target.memory_type} <= _ON_DEVICE:
            return OtherNode("a copy to or from other memory than the GPU's")
        rows, planes = max(raw.height, 1), max(raw.depth, 1)
        if planes > 1:
            if not (source.height == target.height == rows):
                return OtherNode("a copy of three dimensions")
            rows *= planes
        if rows > 1 and source.pitch == target.pitch == width:
            return CopyNode(source.start, target.start, width * rows)
        pitches = (source.pitch, target.pitch) if rows > 1 else (0, 0)
        return CopyNode(source.start, target.start, width, rows, *pitches)


def _params(raw: _KernelParams, layout: tuple[tuple[int, int], ...]) -> bytes | None:
    """All parameters, each in its place; None where the node has none of them."""
    length = max((offset + nbytes for offset, nbytes in layout), default=0)
    if raw.params:
        block = bytearray(length)
        for index, (offset, nbytes) in enumerate(layout):
            address = raw.params[index]
            if not address:
                return None
            block[offset : offset + nbytes] = ctypes.string_at(address, nbytes)
        return bytes(block)
    if raw.extra:
        pointer, nbytes, index = 0, 0, 0
        while (what := raw.extra[index] or _EXTRA_END) != _EXTRA_END:
            value = raw.extra[index + 1] or 0
            if what == _EXTRA_POINTER:
                pointer = value
            elif what == _EXTRA_SIZE:
                nbytes = c_size_t.from_address(value).value
            index += 2
        return ctypes.string_at(pointer, min(nbytes, length)).ljust(length, b"\0") if pointer else None
    return None if layout else b""
