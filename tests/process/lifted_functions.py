"""Functions for tests/process/test_lifted_functions.py: in a worker that has the GPU of threads, and CuPy for it. Their
kernels are machine code of tests/soft_gpu/soft_kernels.py."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import layerzero as lz

THERE = lz.env("lifted-there", from_interpreter=sys.executable)
_kernels: list[Any] = []
_loaded: dict[str, int] = {}
_state: dict[str, Any] = {"calls": 0}


def like(x: Any, *_: Any) -> Any:
    return x.shape, x.dtype


def like_product(x: Any, y: Any) -> Any:
    return (x.shape[0], y.shape[1]), x.dtype


def like_taken(table: Any, index: Any) -> Any:
    return (index.shape[0], table.shape[1]), table.dtype


def rows(table: Any, index: Any) -> Any:
    return {"index": range(table.shape[0])}


@lz.isolated(THERE)
def prepare(is_seen: bool = True) -> int:
    """To be called before the first array on the GPU comes. `is_seen`: machine code is, as by CUPTI."""
    if not _kernels:
        from tests.soft_gpu import soft_cupy, soft_kernels

        from layerzero.ipc.lifting.form import digest
        from layerzero.workers.functions import watching

        soft_cupy.install()
        made = soft_kernels.install()
        modules = watching.modules()

        def on_load(handle: int, code: bytes) -> None:
            modules.add(code)
            modules._by_handle[handle] = [digest(code)]

        if is_seen:
            modules.problem, made.on_load = "", on_load
        _kernels.append(made)
    return os.getpid()


def _launch(name: str, *params: Any) -> None:
    from tests.soft_gpu import soft_cupy
    from tests.soft_gpu.soft_kernels import tensor_words

    from layerzero.ipc.cuda.kernels import config_of
    from layerzero.ipc.vocabulary.tensors import TensorSpec

    (kernels,) = _kernels
    if name not in _loaded:
        code = b"soft:%s\0.text.%s\0" % (name.encode(), name.encode())
        _loaded[name] = kernels.function(kernels.load_module(code), name)

    def words(param: Any) -> bytes:
        if isinstance(param, int | float):
            return struct.pack("=d" if type(param) is float else "=q", param)
        steps = tuple(step // param.dtype.itemsize for step in param.strides)
        return tensor_words(param.data.ptr, TensorSpec(param.dtype.name, param.shape, steps))

    buffers = [ctypes.create_string_buffer(words(param)) for param in params]
    table = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
    config = config_of((3, 2, 1), (32, 1, 1), 0, ())
    config.stream = soft_cupy.current().ptr
    kernels.launch_kernel(config, _loaded[name], table)


def _empty(shape: Any) -> Any:
    from tests.soft_gpu import soft_cupy

    return soft_cupy.empty(shape)


def _is_captured() -> bool:
    from tests.soft_gpu import soft_cupy
    from tests.soft_gpu.soft_gpu import driver

    return driver.is_capturing(soft_cupy.current().ptr)


@lz.isolated(THERE, shapes=like, lift=True)
def silu(x: Any, what: str = "") -> Any:
    """An element by itself, by a number of kernels that `what` says."""
    made = _empty(x.shape)
    _launch("silu<float>", made, x)
    for _ in what:
        made, before = _empty(x.shape), made
        _launch("silu<float>", made, before)
    return made


@lz.isolated(THERE, shapes=like, lift=True)
def gelu(x: Any) -> Any:
    """By way of memory that it allocates."""
    between, made = _empty(x.shape), _empty(x.shape)
    from tests.soft_gpu import soft_cupy

    (kernels,) = _kernels
    kernels.fill(between.data.ptr, 0, 1, 4 * x.size, soft_cupy.current().ptr)
    _launch("gelu<float>", between, x, 1)
    _launch("store<float>", made, between)
    return made


@lz.isolated(THERE, shapes=like_product, lift=True)
def product(x: Any, y: Any) -> Any:
    made = _empty((x.shape[0], y.shape[1]))
    _launch("matmul<float>", made, x, y)
    return made


@lz.isolated(THERE, shapes=like, lift=True)
def into(x: Any, *, out: Any) -> Any:
    _launch("silu<float>", out, x)
    return out


@lz.isolated(THERE, shapes=like_taken, lift=True, trial=rows)
def taken(table: Any, index: Any) -> Any:
    """Rows of a table. The GPU is lost where an index leads outside."""
    made = _empty((index.shape[0], table.shape[1]))
    _launch("take<float>", made, table, index)
    return made


@lz.isolated(THERE, shapes=like_taken, lift=True)
def taken_untried(table: Any, index: Any) -> Any:
    return taken(table, index)


@lz.isolated(THERE, shapes=like, lift=True)
def branching(x: Any) -> Any:
    """Asks the GPU for a number, which no graph can hold."""
    return silu(x, "twice" if x.get().flat[0] > 0 else "")


@lz.isolated(THERE, shapes=like, lift=True)
def counted(x: Any) -> Any:
    """Each call is another than the one before: state of Python's."""
    _state["calls"] += 1
    made = _empty(x.shape)
    _launch("scale", made.data.ptr, x.data.ptr, float(_state["calls"]), x.size)
    return made


@lz.isolated(THERE, shapes=like, lift=True)
def summed(x: Any) -> Any:
    """The sum of all calls: state on the GPU."""
    if "sum" not in _state:
        _state["sum"] = x * 0.0
    made = _empty(x.shape)
    _launch("add", made.data.ptr, _state["sum"].data.ptr, x.data.ptr, x.size)
    _launch("store<float>", _state["sum"], made)
    return made


@lz.isolated(THERE, shapes=like, lift=True)
def weighted(x: Any) -> Any:
    """Weights that the worker has, and nobody else."""
    if "weights" not in _state:
        _state["weights"] = x * 0.5
    made = _empty(x.shape)
    _launch("add", made.data.ptr, x.data.ptr, _state["weights"].data.ptr, x.size)
    return made


@lz.isolated(THERE, shapes=like, lift=True)
def on_host(x: Any) -> Any:
    """A function of the host, in its stream."""
    return x * 2.0


@lz.isolated(THERE, shapes=like, lift=True)
def otherwise(x: Any) -> Any:
    """Of another shape than is told of, when nobody looks."""
    return silu(x)[:1] if _is_captured() else silu(x)


@lz.isolated(THERE, shapes=like, lift=True)
def leaves(x: Any, note: str) -> Any:
    """Ends its worker when it is captured."""
    if _is_captured():
        with Path(note).open("a") as file:
            file.write("left\n")
        os._exit(3)
    return silu(x)


@lz.isolated(THERE, shapes=like, lift=True)
def hangs(x: Any, note: str) -> Any:
    """Does not come back when it is captured."""
    if _is_captured():
        with Path(note).open("a") as file:
            file.write("hung\n")
        threading.Event().wait()
    return silu.local(x)


@lz.isolated(THERE, shapes=like, lift=True)
def exits(x: Any) -> Any:
    """Ends its interpreter when it is captured."""
    if _is_captured():
        raise SystemExit(3)
    return silu(x)


@lz.isolated(THERE, shapes=like, lift=True)
def speaks(x: Any, word: str) -> Any:
    print(word)
    return silu(x)


@lz.isolated(THERE, shapes=like, lift=True)
def versioned(x: Any, path: str) -> Any:
    """As its module was when it was imported: by a file that is read once."""
    return silu(x, _state.setdefault(path, Path(path).read_text()))


@lz.isolated(THERE, shapes=like, lift=True)
def mended(x: Any, path: str) -> Any:
    """As `counted`, as long as a file says so that is read once."""
    is_counted = _state.setdefault(path, Path(path).read_text()) == "counted"
    return counted.local(x) if is_counted else silu.local(x)


@lz.isolated(THERE, shapes=like, lift=True)
def numbered(x: Any, number: int) -> Any:
    """As `silu`, whatever the number."""
    return silu.local(x)


@lz.isolated(THERE, shapes=like, lift=True)
def slow(x: Any) -> Any:
    time.sleep(0.3)
    return silu(x)


@lz.isolated(THERE, shapes=like)
def never(x: Any) -> Any:
    """As `silu`, of a function that nobody wants lifted."""
    return silu(x)


def like_two(x: Any) -> Any:
    return [(x.shape, x.dtype)] * 2


@lz.isolated(THERE, shapes=like_two, lift=True)
def two(x: Any) -> Any:
    return silu(x), silu(x, "twice")
