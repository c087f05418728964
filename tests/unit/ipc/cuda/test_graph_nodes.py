"""What ipc/cuda/graph_nodes.py reads from a capture: structures as in cuda.h, in a driver of C made for the test."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
from tests.unit.ipc.cuda.test_driver import build

from layerzero.ipc.cuda import driver as cuda
from layerzero.ipc.cuda.nodes import Allocation, CopyNode, FillNode, KernelNode, OtherNode
from layerzero.ipc.errors import CudaError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

# Graph 1 is captured out of order: node 4 comes first and depends on node 1; node 5 holds graph 2. Handles of nodes are
# their numbers; their types are in `types`.
DRIVER = r"""
#include <stddef.h>
#include <string.h>
typedef unsigned long long u64;
typedef struct { void *func; unsigned grid[3], block[3], shared; void **params, **extra, *kern, *ctx; } Kernel;
typedef struct { u64 dst; size_t pitch; unsigned value, elem; size_t width, height; } Memset;
typedef struct { size_t x, y, z, lod; unsigned type; const void *host; u64 device; void *array, *reserved;
  size_t pitch, height; } End;
typedef struct { End src, dst; size_t width, height, depth; } Copy;
int types[64]; Kernel kernels[64]; Memset memsets[64]; Copy copies[64];
int cuInit(unsigned flags) { return 0; }
int cuGetErrorName(int n, const char **s) { return 1; }
static size_t order[2][5] = {{4, 1, 2, 3, 5}, {6, 7}}; static size_t counts[2] = {5, 2};
void set_count(size_t graph, size_t count, size_t first) { counts[graph - 1] = count; order[graph - 1][0] = first; }
int cuGraphGetNodes(void *graph, void **nodes, size_t *n) {
  size_t g = (size_t)graph - 1;
  if (nodes) for (size_t i = 0; i < *n; i++) nodes[i] = (void *)order[g][i];
  else *n = counts[g];
  return 0; }
static size_t destroyed;
size_t last_destroyed(void) { return destroyed; }
int cuGraphDestroy(void *g) { destroyed = (size_t)g; return 0; }
int cuStreamEndCapture(void *s, void **g) { if ((size_t)s == 9) { *g = 0; return 901; } *g = s; return 0; }
int cuGraphGetEdges_v2(void *graph, void **from, void **to, unsigned char (*data)[8], size_t *n) {
  if (graph != (void *)1 || counts[0] != 5) { *n = 0; return 0; }
  if (!from) { *n = 4; return 0; }
  size_t edges[4][2] = {{1, 4}, {1, 2}, {2, 3}, {3, 5}};
  if (!data) return 916;
  for (int i = 0; i < 4; i++) { from[i] = (void *)edges[i][0]; to[i] = (void *)edges[i][1]; memset(data[i], 1, 8); }
  return 0; }
int cuGraphNodeGetType(void *node, int *type) { *type = types[(size_t)node]; return 0; }
int cuGraphKernelNodeGetParams_v2(void *node, Kernel *k) { *k = kernels[(size_t)node]; return 0; }
int cuGraphMemsetNodeGetParams(void *node, Memset *m) { *m = memsets[(size_t)node]; return 0; }
int cuGraphMemcpyNodeGetParams(void *node, Copy *c) { *c = copies[(size_t)node]; return 0; }
int cuGraphChildGraphNodeGetGraph(void *node, void **graph) { *graph = (void *)2; return 0; }
int cuKernelGetFunction(void **f, void *kernel) { *f = (void *)((size_t)kernel + 100); return 0; }
int cuFuncGetName(const char **name, void *f) { *name = (size_t)f > 100 ? "from_library" : "plain"; return 0; }
int cuFuncGetModule(void **m, void *f) { *m = (void *)((size_t)f + 1000); return 0; }
/* an int, a struct of 24 bytes at 8, a char at 32 */
int cuFuncGetParamInfo(void *f, size_t i, size_t *offset, size_t *size) {
  static size_t known[3][2] = {{0, 4}, {8, 24}, {32, 1}};
  if (i >= ((size_t)f == 2 ? 0 : 3)) return 1;
  *offset = known[i][0]; *size = known[i][1]; return 0; }
int cuFuncGetAttribute(int *v, int which, void *f) { *v = which == 8 ? 49152 : which == 14 ? 1 : -1; return 0; }
static unsigned char attributes[32][64];
void set_attribute(int which, int at, int value) { attributes[which][at] = value; }
int cuGraphKernelNodeGetAttribute(void *node, int which, unsigned char *value) {
  if (which == 5) value[63] = 9;  /* what is behind the value */
  memcpy(value, attributes[which], 16); return 0; }
int cuPointerGetAttribute(void *value, int which, u64 address) {
  if (address < 4096) return 1;
  if (address == 0xBAD0000) return 700;
  *(unsigned *)value = address < 8192 ? 1 : 2; return 0; }
int cuMemGetAddressRange_v2(u64 *base, size_t *n, u64 address) {
  if (address > 100000) return 500;
  *base = address & ~4095ull; *n = 4096; return 0; }
"""
KERNEL, COPY, FILL, HOST, CHILD, EMPTY = range(6)


class Kernel(ctypes.Structure):
    _fields_ = [
        ("func", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("params", ctypes.c_void_p), ("extra", ctypes.c_void_p), ("kern", ctypes.c_void_p), ("ctx", ctypes.c_void_p),
    ]  # fmt: skip


class Memset(ctypes.Structure):
    _fields_ = [
        ("dst", ctypes.c_uint64), ("pitch", ctypes.c_size_t), ("value", ctypes.c_uint), ("elem", ctypes.c_uint),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    ]  # fmt: skip


class End(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("x", "y", "z", "lod")), ("type", ctypes.c_uint),
        ("host", ctypes.c_void_p), ("device", ctypes.c_uint64), ("array", ctypes.c_void_p), ("r", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t), ("height", ctypes.c_size_t),
    ]  # fmt: skip


class Copy(ctypes.Structure):
    _fields_ = [("src", End), ("dst", End), *((name, ctypes.c_size_t) for name in ("width", "height", "depth"))]


@pytest.fixture
def library(tmp_path: Path) -> ctypes.CDLL:
    return build(tmp_path, DRIVER)


@pytest.fixture
def driver(library: ctypes.CDLL) -> cuda.Driver:
    return cuda.Driver(library._name)


def table(library: ctypes.CDLL, name: str, kind: type) -> ctypes.Array:  # type: ignore[type-arg]
    return (kind * 64).in_dll(library, name)  # type: ignore[operator, no-any-return]


def node(library: ctypes.CDLL, kind: int) -> None:
    """The only one of graph 1 is node 1, of this type."""
    library.set_count(ctypes.c_size_t(1), ctypes.c_size_t(1), ctypes.c_size_t(1))
    table(library, "types", ctypes.c_int)[1] = kind


def memsets(library: ctypes.CDLL) -> ctypes.Array:  # type: ignore[type-arg]
    return table(library, "memsets", Memset)


def test_nodes_come_in_an_order_in_which_they_may_run(library: ctypes.CDLL, driver: cuda.Driver) -> None:
    """Empty ones are left out, and a graph in the graph is taken apart."""
    types = table(library, "types", ctypes.c_int)
    for number, kind in {1: FILL, 2: EMPTY, 3: FILL, 4: FILL, 5: CHILD, 6: FILL, 7: HOST}.items():
        types[number] = kind
        memsets(library)[number] = Memset(number * 4096, 0, 0, 1, 8, 1)
    *fills, host = driver.nodes(1)
    assert [fill.target // 4096 for fill in fills if isinstance(fill, FillNode)] == [1, 4, 3, 6]
    assert host == OtherNode("a function on the host")


@pytest.mark.parametrize(
    ("kind", "what"),
    [(6, "a wait for an event"), (10, "an allocation"), (12, "operations on words of memory"), (77, "of type 77")],
)
def test_other_nodes_are_named(library: ctypes.CDLL, driver: cuda.Driver, kind: int, what: str) -> None:
    node(library, kind)
    (found,) = driver.nodes(1)
    assert isinstance(found, OtherNode)
    assert found.what.endswith(what)


@pytest.mark.parametrize("by_buffer", [False, True])
def test_parameters_are_read_however_they_were_given(
    library: ctypes.CDLL, driver: cuda.Driver, by_buffer: bool
) -> None:
    """One by one, or as a buffer, which may end before the last parameter's padding does."""
    node(library, KERNEL)
    raw = Kernel(None, (4, 5, 6), (32, 2, 1), 1024, None, None, 55, None)
    values = [ctypes.create_string_buffer(data, len(data)) for data in (b"abcd", bytes(range(24)), b"z")]
    if by_buffer:
        block = ctypes.create_string_buffer(b"abcd\0\0\0\0" + bytes(range(24)) + b"z", 33)
        nbytes = ctypes.c_size_t(33)
        given = (ctypes.c_void_p * 5)(2, ctypes.addressof(nbytes), 1, ctypes.addressof(block), 0)
        raw.extra = ctypes.addressof(given)
    else:
        given = (ctypes.c_void_p * 3)(*map(ctypes.addressof, values))  # type: ignore[assignment]
        raw.params = ctypes.addressof(given)
    table(library, "kernels", Kernel)[1] = raw
    library.set_attribute(2, 0, 1)
    library.set_attribute(5, 0, 1)
    (found,) = driver.nodes(1)
    assert found == KernelNode(
        module=1155,
        name="from_library",
        grid=(4, 5, 6),
        block=(32, 2, 1),
        shared_bytes=1024,
        params=b"abcd\0\0\0\0" + bytes(range(24)) + b"z",
        layout=((0, 4), (8, 24), (32, 1)),
        attributes=((2, b"\x01".ljust(64, b"\0")),),  # a policy of clusters is nothing without clusters
        max_shared_bytes=49152,
        is_cluster_size_free=True,
    )
    library.set_attribute(4, 4, 2)
    (found,) = driver.nodes(1)
    assert isinstance(found, KernelNode)
    assert [which for which, _ in found.attributes] == [2, 4, 5]
    assert all(len(value) == 64 and value[63] == 0 for _, value in found.attributes)


def test_parameters_that_are_not_told_are_none(library: ctypes.CDLL, driver: cuda.Driver) -> None:
    """And a kernel without parameters has no bytes of them."""
    node(library, KERNEL)
    for function, params in ((1, None), (2, b"")):
        table(library, "kernels", Kernel)[1] = Kernel(function, (1, 1, 1), (1, 1, 1), 0, None, None, None, None)
        (found,) = driver.nodes(1)
        assert isinstance(found, KernelNode)
        assert (found.params, found.name) == (params, "plain")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (Memset(64, 0, 0x1FF, 1, 10, 1), FillNode(64, 0xFF, 1, 10)),
        (Memset(64, 80, 7, 4, 20, 3), FillNode(64, 7, 4, 60)),
        (Memset(64, 100, 7, 2, 20, 3), FillNode(64, 7, 2, 20, 3, 100)),
    ],
)
def test_fills_without_gaps_are_one(library: ctypes.CDLL, driver: cuda.Driver, raw: Memset, expected: FillNode) -> None:
    node(library, FILL)
    memsets(library)[1] = raw
    assert driver.nodes(1) == (expected,)


def end(address: int, *, kind: int = 2, pitch: int = 0, height: int = 0, x: int = 0, y: int = 0, z: int = 0) -> End:
    return End(x, y, z, 0, kind, None, address, None, None, pitch, height)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (Copy(end(64), end(4096, kind=4), 100, 1, 1), CopyNode(64, 4096, 100)),
        (Copy(end(64, x=3, y=2, pitch=10), end(0, x=1), 5, 1, 1), CopyNode(87, 1, 5)),
        (Copy(end(64, pitch=8), end(0, pitch=8), 8, 4, 1), CopyNode(64, 0, 32)),
        (Copy(end(64, pitch=8), end(0, pitch=16), 8, 4, 1), CopyNode(64, 0, 8, 4, 8, 16)),
        (Copy(end(64, pitch=8, height=4), end(0, pitch=8, height=4), 8, 4, 2), CopyNode(64, 0, 64)),
        (Copy(end(64, pitch=8, height=5), end(0, pitch=8, height=4), 8, 4, 2), None),
        (Copy(end(64, kind=1), end(0), 8, 1, 1), None),
        (Copy(end(64), end(0, kind=3), 8, 1, 1), None),
    ],
)
def test_copies_on_the_gpu_are_told(
    library: ctypes.CDLL, driver: cuda.Driver, raw: Copy, expected: CopyNode | None
) -> None:
    node(library, COPY)
    table(library, "copies", Copy)[1] = raw
    (found,) = driver.nodes(1)
    assert found == expected if expected is not None else isinstance(found, OtherNode)


def test_a_capture_of_nothing_is_no_graph(library: ctypes.CDLL, driver: cuda.Driver) -> None:
    """And one that was broken raises."""
    assert driver.end_recording(1) == 1
    library.set_count(ctypes.c_size_t(2), ctypes.c_size_t(0), ctypes.c_size_t(0))
    assert driver.end_recording(2) == 0
    assert library.last_destroyed() == 2
    driver.discard_recording(1)
    assert library.last_destroyed() == 1
    with pytest.raises(CudaError):
        driver.end_recording(9)


def test_allocations_are_those_of_the_gpu(driver: cuda.Driver) -> None:
    """Memory of the host is told apart; what the driver fails on for good is no answer."""
    assert driver.allocation(100) is None
    assert driver.allocation(5000) == Allocation(5000, 0, is_device=False)
    assert driver.allocation(8192 + 100) == Allocation(8192, 4096)
    assert driver.allocation(200000) == Allocation(200000, 0)
    with pytest.raises(CudaError):
        driver.allocation(0xBAD0000)
