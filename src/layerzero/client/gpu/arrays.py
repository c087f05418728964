"""Arrays of torch, CuPy and JAX on a GPU: the stream that their library works on, and new ones for results."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from layerzero.client.arrays.dlpack import CUDA, GpuExport
from layerzero.client.arrays.recognition import CPU, Array, array_namespace
from layerzero.client.gpu.memory import memory_of, ordinal_of, uuid_of
from layerzero.client.gpu.own_arrays import GpuArray
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import NARROW_DTYPES, TensorSpec


def device_of(op: str, arrays: Sequence[Array | None], outs: Sequence[Array] = ()) -> int:
    """Where a call runs: the ordinal of a GPU, or CPU. Raises InvalidArgument when its arrays are not all there."""
    names = (*OPS[op].inputs, *OPS[op].outputs)
    given = [(name, array) for name, array in zip(names, (*arrays, *outs), strict=False) if array is not None]
    device = given[0][1].device if given else CPU
    for name, array in given:
        if array.device != device:
            raise InvalidArgument(
                f"{op}: {given[0][0]} is on {device_name(device)}, {name} on {device_name(array.device)}; "
                "move all arrays to one device"
            )
    return device


def refuse_mixture(op: str, like: Array, arrays: Sequence[Array | None], outs: Sequence[Array]) -> None:
    """Each library has a stream of its own, and a call has one. Raises InvalidArgument."""
    for array in (*arrays, *outs):
        if array is not None and array.kind != like.kind:
            one, other = (f"{type(a.obj).__module__.partition('.')[0]} array" for a in (like, array))
            raise InvalidArgument(f"{op}: a {one} and a {other} on a GPU; pass arrays of one library")


def is_on_gpu(args: Sequence[Any]) -> bool:
    """Whether one of these arguments is an array on a GPU."""
    return any(_is_gpu_array(arg) for arg in args)


def _is_gpu_array(arg: Any) -> bool:
    if getattr(arg, "is_cuda", False) is True or type(arg).__module__ == "cupy" or isinstance(arg, GpuArray):
        return True
    device = getattr(arg, "__dlpack_device__", None)
    return type(arg).__module__.startswith("jax") and device is not None and int(device()[0]) == CUDA


def device_name(device: int) -> str:
    """As torch says it."""
    return "cpu" if device == CPU else f"cuda:{device}"


def gpu_name(device: int) -> str:
    """As a route names it: the UUID of a GPU, "" for the CPU."""
    return "" if device == CPU else uuid_of(device)


def current_stream(array: Array) -> int:
    """The stream, as a CUDA handle, that this thread's work on arrays of this kind goes to."""
    if array.kind in ("dlpack", "own"):  # JAX has streams of its own, of which nothing is known outside
        return memory_of(array.device).own_stream()
    if array.kind == "torch":
        torch = sys.modules["torch"]
        raw = getattr(
            torch._C, "_cuda_getCurrentRawStream", None
        )  # what torch.compile's code calls; a tenth of the time
        handle = raw(array.device) if raw is not None else torch.cuda.current_stream(array.device).cuda_stream
        return int(handle)
    return int(sys.modules["cupy"].cuda.get_current_stream(array.device).ptr)


def new_like(array: Array, spec: TensorSpec) -> tuple[Any, int]:
    """An array of the same kind, on the same GPU, contents undefined; and the address of its first element.

    `give` makes it the caller's once the work that fills it is enqueued.
    """
    if array.kind in ("dlpack", "own"):
        if not spec.is_contiguous and array.kind == "dlpack":
            raise InvalidArgument(f"a result {spec} with strides {list(spec.strides)} cannot be such an array")
        lent = GpuArray(array.device, spec)
        return lent, lent.address
    if array.kind == "torch":
        torch = sys.modules["torch"]
        device, dtype = torch.device("cuda", array.device), getattr(torch, spec.dtype)
        made = torch.empty_strided(spec.shape, spec.strides, dtype=dtype, device=device)
        return made, made.data_ptr()
    cupy = sys.modules["cupy"]
    if spec.dtype in NARROW_DTYPES:
        raise InvalidArgument(f"CuPy has no {spec.dtype} for the result; pass torch tensors")
    dtype = array.owner.dtype if spec.dtype == array.spec.dtype else cupy.dtype(spec.dtype)
    with cupy.cuda.Device(array.device):
        flat = cupy.empty(max(spec.span_bytes // spec.itemsize, 1), dtype)
    strides = tuple(step * spec.itemsize for step in spec.strides)
    made = cupy.ndarray(spec.shape, dtype, memptr=flat.data, strides=strides)
    return made, made.data.ptr


def give(array: Array, made: Any) -> Any:
    """What the caller gets of `new_like`, or of several of those."""
    if isinstance(made, tuple):
        return tuple(give(array, one) for one in made)
    if not isinstance(made, GpuArray) or array.kind == "own":
        return made
    memory, spec = made.memory, made.spec
    stream = memory.own_stream()

    def ready(consumer: int | None) -> None:
        driver = memory.context.driver
        with memory.context:
            if consumer is None:
                driver.synchronize_stream(stream)
            elif consumer >= 0:
                event = driver.create_event()
                driver.record_event(event, stream)
                driver.wait_event(consumer, event)
                driver.destroy_event(event)

    export = GpuExport(made.address, spec.dtype, spec.shape, array.device, ready, made)
    return array_namespace(array.obj).from_dlpack(export)


def zeros_like(array: Array, spec: TensorSpec) -> Any:
    """An array of the same kind, on the same GPU, whose elements become 0 in the order of the caller's stream."""
    made, address = new_like(array, spec)
    with memory_of(array.device).context as context:
        context.driver.clear(address, spec.span_bytes, current_stream(array))
    return give(array, made)


def named_device(op: str, arrays: Sequence[Array | None], device: str | None) -> int:
    """As `device_of`, for a call in which specs may stand for arrays: `device` says where those are ("cpu", "cuda",
    "cuda:1" or a UUID; None: where the arrays are, else on the CPU). Raises InvalidArgument, also where the arrays are
    elsewhere."""
    found = device_of(op, arrays)
    if device is None:
        return found
    wanted = ordinal_of(device)
    if any(array is not None for array in arrays):
        if found != wanted:
            raise InvalidArgument(f"{op}: its arrays are on {device_name(found)}; leave device={device!r} out")
    elif wanted != CPU and not OPS[op].runs_on_gpus:
        raise InvalidArgument(f"{op} runs on the CPU only; leave device= out")
    return wanted


def version_of(array: Array) -> int | None:
    """Torch's count of writes; None where there is none."""
    if array.kind != "torch":
        return None
    try:
        return int(array.owner._version)
    except (AttributeError, RuntimeError):  # made in inference mode, or of a class that counts none
        return None
