"""Users' functions in an environment of their own (docs/functions.md). NumPy and torch are imported when an array of
theirs comes, or when a function has done so."""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from layerzero.ipc.errors import ConfigError, InvalidArgument
from layerzero.ipc.functions import frames
from layerzero.ipc.functions.frames import Payload
from layerzero.ipc.vocabulary.ops import FUNCTION_ON_GPU
from layerzero.ipc.vocabulary.tensors import ITEMSIZE, MAX_NDIM, TensorSpec
from layerzero.workers.functions import stand_in, watching
from layerzero.workers.functions.device import device
from layerzero.workers.functions.lifted import LiftableCalls
from layerzero.workers.functions.serving import Functions
from layerzero.workers.provider import Block, Bound, Call, Loaded
from layerzero.workers.providers._gpu_arrays import GpuLibraries
from layerzero.workers.providers.models.kinds import Kinds

MAX_VERSIONS = 64
PROBE = 0  # as a client: brokers number theirs from 1 on
BACKEND = "LAYERZERO_FUNCTIONS"  # the name of this environment, in its manifest


def load() -> Loaded:
    name = os.environ.get(BACKEND, "")
    if not name:
        raise ConfigError(f"{BACKEND} is not set; declare the environment with lz.env, which writes its manifest")
    stand_in.install()
    versions = {"python": platform.python_version()}
    for dist, version in itertools.islice(_installed(), MAX_VERSIONS):
        versions.setdefault(dist.lower(), version)
    served = Functions(_Arrays(), name, Kinds())
    device.libraries = GpuLibraries()
    probed, liftable = served.bind_of(PROBE), LiftableCalls(served)

    def bind(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        return (liftable.bind if call.op == FUNCTION_ON_GPU else probed)(call, inputs, outputs)

    its = {"on_stream": device.on_stream, "per_client": served, "modules": watching.modules}
    its["on_change"] = liftable.on_change
    return Loaded(versions=versions, kernels={f"{name}.call": bind}, **its)  # type: ignore[arg-type]


_METADATA = ("*.dist-info/METADATA", "*.egg-info/PKG-INFO")


def _installed() -> Iterator[tuple[str, str]]:
    """Name and version of each distribution; importlib.metadata takes as long to import as half of the rest here."""
    for folder in sys.path:
        if os.path.isdir(folder):
            for path in (p for kind in _METADATA for p in sorted(Path(folder).glob(kind))):
                said: dict[str, str] = {}
                with path.open(encoding="utf-8", errors="replace") as file:
                    for line in itertools.takewhile(str.strip, file):
                        key, _, value = line.partition(":")
                        said.setdefault(key.lower(), value.strip())
                if "name" in said and "version" in said:
                    yield said["name"], said["version"]


class _Arrays:
    def open(self, library: str, spec: TensorSpec, memory: memoryview) -> Any:
        return self._asked(_to_torch if library == "torch" else _to_numpy, library, spec, memory)

    def opener(self, library: str, spec: TensorSpec, memory: memoryview) -> Callable[[], Any]:
        opened: Callable[[], Any]
        opened = self._asked(_torch_opener if library == "torch" else _numpy_opener, library, spec, memory)
        return opened

    @staticmethod
    def _asked(of: Callable[[TensorSpec, memoryview], Any], library: str, spec: TensorSpec, memory: memoryview) -> Any:
        """What this tells of an array. Raises InvalidArgument where there is no such library."""
        try:
            return of(spec, memory)
        except ImportError as exc:
            kind = "a torch tensor" if library == "torch" else "a NumPy array"
            hint = f"add {library} to its requires, or install it into the interpreter that it is from"
            hint = hint if exc.name == library else str(exc)
            raise InvalidArgument(f"{kind}, and this environment cannot open one: {hint}") from exc

    def put(self, value: Any, payload: Payload) -> list[Any] | None:
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy is not None and type(value) is numpy.ndarray:
            return _from_numpy(numpy, value, payload)
        if torch is not None and isinstance(value, torch.Tensor) and not value.is_cuda:
            return _from_torch(torch, value, payload)
        return device.put(value)


def _to_numpy(spec: TensorSpec, memory: memoryview) -> Any:
    known, make, shape, dtype, strides = _layouts.get(id(spec), _UNKNOWN)
    if known is not spec:
        make, shape, dtype, strides = _layout_of(spec)
    return make(shape, dtype, memory, 0, strides) if len(memory) else make(shape, dtype)


def _numpy_opener(spec: TensorSpec, memory: memoryview) -> Callable[[], Any]:
    make, shape, dtype, strides = _layout_of(spec)
    return partial(make, shape, dtype, memory, 0, strides) if len(memory) else partial(make, shape, dtype)


def _layout_of(spec: TensorSpec) -> tuple[Any, ...]:
    """NumPy's ndarray, shape, dtype, strides."""
    import numpy

    dtype = _ml_dtype(spec.dtype) if spec.dtype not in _NUMPY else numpy.dtype(spec.dtype)
    found = numpy.ndarray, spec.shape, dtype, tuple(stride * spec.itemsize for stride in spec.strides)
    if len(_layouts) >= MAX_LAYOUTS:
        _layouts.clear()
    _layouts[id(spec)] = spec, *found
    return found


MAX_LAYOUTS = 1024
_UNKNOWN: tuple[Any, ...] = (None, None, (), None, ())
_layouts: dict[int, tuple[Any, ...]] = {}
"""By id of a spec, of which there is one for arrays that are alike: spec, NumPy's ndarray, shape, dtype, strides."""


_NUMPY = frozenset(name for name in ITEMSIZE if not name.startswith(("bfloat", "float8", "float4")))


def _ml_dtype(name: str) -> Any:
    import ml_dtypes
    import numpy

    found = getattr(ml_dtypes, name, None)
    if found is None:
        raise InvalidArgument(f"ml_dtypes of this environment has no {name}")
    return numpy.dtype(found)


def _to_torch(spec: TensorSpec, memory: memoryview) -> Any:
    return _torch_opener(spec, memory)()


def _torch_opener(spec: TensorSpec, memory: memoryview) -> Callable[[], Any]:
    import torch

    dtype = getattr(torch, spec.dtype, None)
    if dtype is None:
        raise InvalidArgument(f"torch {torch.__version__} of this environment has no {spec.dtype}")
    if not spec.numel:
        return partial(torch.empty, spec.shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot be written: docs/functions.md says so
        flat = torch.frombuffer(memory, dtype=dtype)
    return partial(flat.as_strided, spec.shape, spec.strides)


def _from_numpy(numpy: Any, value: Any, payload: Payload) -> list[Any]:
    name = value.dtype.name
    if name not in ITEMSIZE or not value.dtype.isnative:
        raise InvalidArgument(f"a NumPy array of {value.dtype}; allowed: {', '.join(ITEMSIZE)}, of native byte order")
    spec = _spec(name, value.shape)
    if value.flags.c_contiguous:
        place = payload.place_of(value.__array_interface__["data"][0], value.nbytes)
        if place is not None:
            return frames.array_node("numpy", spec, frames.IN_FRAME, place)
    dense = numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8)

    def write(target: memoryview) -> None:
        if dense.nbytes:
            target[:] = memoryview(dense)

    return frames.array_node("numpy", spec, frames.IN_FRAME, payload.add(dense.nbytes, write))


def _from_torch(torch: Any, value: Any, payload: Payload) -> list[Any]:
    name = str(value.dtype).removeprefix("torch.")
    if name not in ITEMSIZE or value.device.type != "cpu" or value.layout is not torch.strided:
        text = f"a {value.layout} tensor of {name} on {value.device}"
        raise InvalidArgument(f"{text}; allowed: dense ones of the CPU, of {', '.join(ITEMSIZE)}")
    dense = value.detach().resolve_conj().resolve_neg().contiguous()
    nbytes = dense.numel() * dense.element_size()
    place = payload.place_of(dense.data_ptr(), nbytes)
    if place is not None:
        return frames.array_node("torch", _spec(name, tuple(dense.shape)), frames.IN_FRAME, place)

    def write(target: memoryview) -> None:
        if nbytes:
            target[:] = memoryview((ctypes.c_char * nbytes).from_address(dense.data_ptr())).cast("B")

    return frames.array_node("torch", _spec(name, tuple(dense.shape)), frames.IN_FRAME, payload.add(nbytes, write))


def _spec(dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    if len(shape) > MAX_NDIM:
        raise InvalidArgument(f"an array of {len(shape)} dimensions; allowed: at most {MAX_NDIM}; reshape it")
    return TensorSpec.contiguous(dtype, tuple(shape))
